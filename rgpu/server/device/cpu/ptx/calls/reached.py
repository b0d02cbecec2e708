"""Functions that a call may reach, and their addresses.

A function's address is a number below all memory, which contains 20 bits of the hash of its module's text. A pointer
that a kernel of another module left in memory therefore calls nothing, and a module has the same addresses wherever and
whenever it is loaded. A call through a pointer may reach the functions whose address the module takes and whose
parameters and results have the sizes of the call's prototype (PTX ISA, ``call``).
"""

from __future__ import annotations

from rgpu.server.device.cpu.ptx.errors import CompileLimit
from rgpu.server.device.cpu.ptx.flow import call_target
from rgpu.server.device.cpu.ptx.model import Addr, Function, Instruction, Operand, Program, Reg, Sym, Variable, Vec

_BASE, _MODULE, _STEP = 0x0E00_0000_0000, 20, 4  #: first address; bits of addresses within a module, of a function
MOST_FUNCTIONS = 1 << (_MODULE - _STEP)


def pointer_of(ins: Instruction) -> Reg | None:
    """Return the register of a call through a pointer; None for a call that names its function."""
    return next((op for op in ins.operands if isinstance(op, Reg)), None) if ins.op == "call" else None


def address_of(program: Program, name: str) -> int | None:
    """Return a function's address; None where the module defines no function of that name. Raises CompileLimit."""
    fn = program.functions.get(name)
    if fn is None or fn.entry or fn.body is None:
        return None
    if not program.numbers:
        program.numbers.update((known, number) for number, known in enumerate(program.functions))
    number = program.numbers[name]
    if number >= MOST_FUNCTIONS:
        raise CompileLimit(f"the address of {name}: a module has addresses for {MOST_FUNCTIONS} functions", fn.line)
    return _BASE + ((program.tag & 0xFFFFF) << _MODULE) + (number << _STEP)


def reached(program: Program, fn: Function, ins: Instruction) -> list[Function]:
    """Return the functions that a call in ``fn`` may reach; none where the module does not define the name."""
    if pointer_of(ins) is None:
        callee = program.functions.get(call_target(ins))
        return [] if callee is None else [callee]
    label = call_target(ins)
    if (names := fn.call_targets.get(label)) is not None:
        return _listed(program, names)
    sizes = fn.prototypes.get(label)
    if sizes is None:
        raise ins.refuse(f"{label} is no .callprototype or .calltargets of this function")
    return _addressed(program).setdefault(sizes, [])


def kind_of(fn: Function, ins: Instruction) -> tuple[object, ...]:
    """Return a key of the functions that a call through a pointer in ``fn`` may reach: equal for equal sets."""
    label = call_target(ins)
    return fn.call_targets.get(label) or fn.prototypes[label]


def _listed(program: Program, names: tuple[str, ...]) -> list[Function]:
    return [program.functions[name] for name in dict.fromkeys(names) if address_of(program, name) is not None]


def _sizes(variables: list[Variable]) -> tuple[int, ...]:
    return tuple(var.size for var in variables)


def _addressed(program: Program) -> dict[tuple[tuple[int, ...], tuple[int, ...]], list[Function]]:
    """Return the functions whose address an instruction or a variable's initial value takes, by sizes; kept."""
    if program.addressed is None:
        names: set[str] = set()
        for var in program.variables.values():
            names.update(item[0] for item in var.init if isinstance(item, tuple))
        for fn in program.functions.values():
            for item in fn.body or ():
                if isinstance(item, Instruction) and item.op != "call":
                    for op in item.operands:
                        _name(op, names)
        program.addressed = {}
        for each in _listed(program, tuple(sorted(names))):
            program.addressed.setdefault((_sizes(each.results), _sizes(each.params)), []).append(each)
    return program.addressed


def _name(op: Operand, names: set[str]) -> None:
    if isinstance(op, Sym):
        names.add(op.name)
    elif isinstance(op, Addr):
        _name(op.base, names)
    elif isinstance(op, Vec):
        for item in op.items:
            _name(item, names)
