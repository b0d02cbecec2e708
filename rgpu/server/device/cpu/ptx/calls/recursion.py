"""Recursion: functions that call themselves or each other become as many copies as a lane's stack has levels.

A lane's frame has one place for each register, parameter and variable of a function. So that pointers to variables of
outer calls stay valid, each level of a recursion is a function of its own, which calls the next level; a call at the
last level ends the launch with CUDA_ERROR_HARDWARE_STACK_ERROR. The number of levels of a GPU's stack
(CU_LIMIT_STACK_SIZE, 1 KiB by default) depends on the size of the frames as well.
"""

from __future__ import annotations

from dataclasses import replace

from rgpu.server.device.cpu.ptx.errors import PtxError
from rgpu.server.device.cpu.ptx.flow import STACK_END, call_target
from rgpu.server.device.cpu.ptx.model import Function, Instruction, LabelMark, Program, Sym

LEVELS = 32  #: of small functions
MOST_CYCLES = 16  #: of a kernel: groups of functions that call each other
_LEAST = 4
_MOST_INSTRUCTIONS = 20_000  #: of all levels together
_MOST_DEEP = 128  #: functions of all levels together


class Recursion(PtxError):
    """A function that reaches itself by calls that name their functions."""

    def __init__(self, function: Function, line: int) -> None:
        super().__init__(f"unsupported call: {function.name} is recursive", line)
        self.function = function


def unrolled(program: Program, function: Function) -> Program:
    """Replace a recursive function, and those that take part in its recursion, by levels; returns the program.

    Raises PtxError where there would be too many instructions, or variables that all levels share.
    """
    cycle = _cycle(program, function)
    size = sum(len(fn.body or ()) for fn in cycle.values())
    levels = min(LEVELS, _MOST_DEEP // len(cycle), _MOST_INSTRUCTIONS // max(1, size))
    if levels < _LEAST:
        raise PtxError(f"unsupported call: {function.name} is recursive, by {size} instructions of {len(cycle)} "
                       f"functions", function.line)
    for fn in cycle.values():
        if fn.entry:
            raise PtxError(f"unsupported call: {fn.name} is a kernel", function.line)
        if any(var.space not in ("local", "param", "reg") for var in fn.variables.values()):
            raise PtxError(f"unsupported call: {fn.name} is recursive and has variables that all calls share", fn.line)
    made = {}
    for level in range(levels):
        for fn in cycle.values():
            body = [_called(item, cycle, level + 1, levels) for item in fn.body or ()]
            made[_level(fn.name, level)] = replace(fn, name=_level(fn.name, level), body=body)
    return replace(program, functions={**program.functions, **made}, addressed=None)


def _cycle(program: Program, function: Function) -> dict[str, Function]:
    """Return the functions that ``function`` reaches and that reach it, itself among them."""
    calls = {fn.name: {call_target(item) for item in fn.body or ()
                       if isinstance(item, Instruction) and item.op == "call"} & program.functions.keys()
             for fn in program.functions.values()}
    callers: dict[str, set[str]] = {}
    for name, callees in calls.items():
        for callee in callees:
            callers.setdefault(callee, set()).add(name)
    both = _closure(calls, function.name) & _closure(callers, function.name)
    return {name: fn for name, fn in program.functions.items() if name in both}


def _closure(edges: dict[str, set[str]], start: str) -> set[str]:
    found, waiting = {start}, [start]
    while waiting:
        for name in edges.get(waiting.pop(), set()) - found:
            found.add(name)
            waiting.append(name)
    return found


def _level(name: str, level: int) -> str:
    return f"{name}#level{level}" if level else name  # a # occurs in no PTX name


def _called(item: Instruction | LabelMark, cycle: dict[str, Function], level: int, levels: int
            ) -> Instruction | LabelMark:
    """Return a statement as of the level before ``level``: its calls within the cycle are calls of that level."""
    if not isinstance(item, Instruction) or item.op != "call" or (name := call_target(item)) not in cycle:
        return item
    if level == levels:
        return replace(item, op=STACK_END, mods=(), operands=())
    at = next(i for i, op in enumerate(item.operands) if isinstance(op, Sym))
    return replace(item, operands=(*item.operands[:at], Sym(_level(name, level)), *item.operands[at + 1 :]))
