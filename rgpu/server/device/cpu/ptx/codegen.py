"""Compiles one kernel, with the functions that it calls, to LLVM IR text.

The whole kernel becomes one LLVM function over 32 lanes.  Values that live
within a basic block are SSA vectors; those that live across blocks have a slot
in the warp's frame, written at block ends under the active mask.  That keeps
the optimiser's work proportional to the PTX and lets a warp stop and resume
at any block boundary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rgpu.server.device.cpu.ptx import schedule_ir
from rgpu.server.device.cpu.ptx.calls.reached import kind_of, pointer_of, reached
from rgpu.server.device.cpu.ptx.calls.recursion import MOST_CYCLES, Recursion, unrolled
from rgpu.server.device.cpu.ptx.control import write_kernel
from rgpu.server.device.cpu.ptx.emitter import Gen, Place, aligned
from rgpu.server.device.cpu.ptx.errors import CompileLimit, PtxError
from rgpu.server.device.cpu.ptx.flow import call_lists, call_target
from rgpu.server.device.cpu.ptx.jit import Helper
from rgpu.server.device.cpu.ptx.model import Function, Instruction, Program, Sym, Variable, Vec
from rgpu.server.device.cpu.ptx.ops import memory_ir
from rgpu.server.device.cpu.ptx.ops.special import special_register

MOST_PARAMETERS = 32764  #: bytes of a kernel's parameters (PTX 8.1)
MOST_CALLS = 200  #: nested calls
MOST_LOCAL = 512 * 1024  #: bytes of local memory of a thread


@dataclass
class KernelCode:
    """A kernel's IR and what a launch needs besides."""

    name: str
    symbol: str
    text: str
    helpers: list[Helper]
    entry: int
    frame_bytes: int
    static_shared: int
    dynamic_shared: int
    local_bytes: int
    sites: int
    params: list[tuple[int, int]] = field(default_factory=list)
    param_bytes: int = 0
    uses_dynamic: bool = False


def ordered_functions(entry: Function, program: Program) -> list[Function]:
    """Return the functions that a kernel reaches, callees before callers. Raises :class:`Recursion`.

    Callees come first so that their block ids are lower: lanes inside a call
    then have priority over lanes waiting in the caller, and meet them again.
    """
    order: list[Function] = []
    state: dict[str, int] = {}
    through: set[tuple[object, ...]] = set()  # targets and prototypes of the calls through pointers followed so far

    def visit(fn: Function, line: int, depth: int = 0) -> None:
        if depth > MOST_CALLS:
            raise CompileLimit(f"{fn.name} is called more than {MOST_CALLS} functions deep", line)
        if state.get(fn.name) == 1:
            raise Recursion(fn, line)
        if state.get(fn.name) == 2:
            return
        state[fn.name] = 1
        for item in fn.body or []:
            if isinstance(item, Instruction) and item.op == "call":
                callees = reached(program, fn, item)
                if pointer_of(item) is None:
                    for callee in callees:
                        visit(callee, item.line, depth + 1)
                elif (kind := kind_of(fn, item)) not in through:  # being executed already: an error at the call
                    through.add(kind)
                    for callee in callees:
                        if state.get(callee.name) != 1:
                            visit(callee, item.line, depth + 1)
        state[fn.name] = 2
        order.append(fn)

    visit(entry, entry.line)
    return order


def place_variables(g: Gen, functions: list[Function]) -> None:
    """Decide the places of all variables that the kernel's functions name."""
    referenced = _referenced(functions)
    for name, var in g.program.variables.items():
        if var.space == "shared":
            if name in referenced and not var.extern:
                g.places["", name] = _static_shared(g, var)
        else:
            g.places["", name] = Place("global", g.global_index[name])
    for fn in functions:
        for var in fn.variables.values():
            if var.space == "shared" and not var.extern:
                g.places[fn.name, var.key] = _static_shared(g, var)
            elif var.space == "local":
                g.places[fn.name, var.key] = Place("local", g.local_space(var.size, var.align))
            elif var.space in ("global", "const"):
                raise PtxError(f"unsupported .{var.space} variable inside a function", var.line)
        if not fn.entry:
            for var in (*fn.params, *fn.results):
                g.places[fn.name, var.key] = Place("local", g.local_space(var.size, var.align))
    _place_dynamic_shared(g)
    for fn in functions:
        _alias_call_parameters(g, fn)
        for var in fn.variables.values():
            if var.space == "param" and (fn.name, var.key) not in g.places:
                g.places[fn.name, var.key] = Place("local", g.local_space(var.size, var.align))
    if g.local_bytes > MOST_LOCAL:
        raise PtxError(f"unsupported {g.entry.name}: {g.local_bytes} bytes of local memory, {MOST_LOCAL} at most",
                       g.entry.line)


def _place_dynamic_shared(g: Gen) -> None:
    """Place a launch's dynamic shared memory behind the rest, aligned for every variable that names it."""
    names = [(name, var) for name, var in g.program.variables.items() if var.space == "shared" and var.extern]
    g.dynamic_shared = aligned(g.static_shared, max([16, *(var.align for _, var in names)]))
    for name, _ in names:
        g.places["", name] = Place("shared", g.dynamic_shared)


def _referenced(functions: list[Function]) -> set[str]:
    names: set[str] = set()

    def visit(op: object) -> None:
        if isinstance(op, Sym):
            names.add(op.name)
        elif isinstance(op, Vec):
            for item in op.items:
                visit(item)
        elif hasattr(op, "base"):
            visit(op.base)

    for fn in functions:
        for item in fn.body or []:
            if isinstance(item, Instruction):
                for op in item.operands:
                    visit(op)
    return names


def _static_shared(g: Gen, var: Variable) -> Place:
    offset = aligned(g.static_shared, var.align)
    g.static_shared = offset + var.size
    return Place("shared", offset)


def _alias_call_parameters(g: Gen, fn: Function) -> None:
    """Give each variable passed in a call the callee's own place for that parameter.

    Each level of a recursion is a function, so a parameter's place is free whenever its function
    is not running in that lane; passing arguments then needs no copy.
    """
    for item in fn.body or []:
        if not isinstance(item, Instruction) or item.op != "call":
            continue
        callee = g.program.functions.get(call_target(item))
        if callee is None or pointer_of(item) is not None:
            continue
        for names, formal in zip(call_lists(item), (callee.results, callee.params), strict=True):
            if not formal and formal is callee.results:
                continue  # as a linker allows: the caller reads an unwritten place of its own
            if len(names) != len(formal):
                raise item.refuse(f"{callee.name} takes {len(formal)} parameters, not {len(names)}")
            for actual, var in zip(names, formal, strict=True):
                if not isinstance(actual, Sym) or actual.name not in fn.variables:
                    raise item.refuse("arguments must be .param variables")
                if actual.name in fn.variables and fn.variables[actual.name].size > var.size:
                    raise item.refuse(f"{actual.name} is larger than the parameter of {callee.name}")
                place = g.places[callee.name, var.key]
                known = g.places.setdefault((fn.name, actual.name), place)
                if known != place:
                    raise item.refuse(f"{actual.name} is passed to two functions")


def lay_out_parameters(entry: Function, g: Gen) -> tuple[list[tuple[int, int]], int]:
    """Return (offset, size) of each of a kernel's parameters, and their total size."""
    at, params = 0, []
    for var in entry.params:
        at = aligned(at, var.align)
        g.places[entry.name, var.key] = Place("param", at)
        params.append((at, var.size))
        at += var.size
    if at > MOST_PARAMETERS:
        raise PtxError(f"unsupported {entry.name}: {at} bytes of parameters, {MOST_PARAMETERS} at most", entry.line)
    g.param_bytes = at
    return params, at


def _without_recursion(program: Program, entry: Function) -> tuple[Program, list[Function]]:
    """Return the program with its recursive functions unrolled into levels, and what the kernel reaches of it."""
    for _ in range(MOST_CYCLES):
        try:
            return program, ordered_functions(entry, program)
        except Recursion as found:
            program = unrolled(program, found.function)
    raise CompileLimit(f"{entry.name} has {MOST_CYCLES} recursions or more", entry.line)


def generate(program: Program, entry: Function, global_index: dict[str, int]) -> KernelCode:
    """Return the IR of one kernel. Raises ``PtxError`` for anything that cannot run."""
    program, functions = _without_recursion(program, entry)
    g = Gen(program, entry, global_index, special_register)
    place_variables(g, functions)
    params, param_bytes = lay_out_parameters(entry, g)
    text, symbol = write_kernel(g, functions)
    for helper in (schedule_ir.PICK, schedule_ir.EXIT, memory_ir.REPORT):
        g.helpers.setdefault(helper.name, helper)
    return KernelCode(
        entry.name,
        symbol,
        text,
        list(g.helpers.values()),
        g.entries[entry.name],
        aligned(g.frame_bytes, 64),
        g.static_shared,
        g.dynamic_shared,
        aligned(g.local_bytes, g.local_align),
        g.sites,
        params,
        param_bytes,
    )
