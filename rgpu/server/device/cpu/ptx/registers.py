"""Estimates the registers that an assembler would give a kernel: the most that are live at one place.

PTX uses a new register for every value, so their number carries no information. What is live at a place follows from
the blocks of ``flow``; values that an assembler keeps elsewhere (constants and kernel parameters, which instructions
read directly) count as none, and copies share the register of their source.
"""

from __future__ import annotations

from collections.abc import Callable

from rgpu.server.device.cpu.ptx.calls.reached import reached
from rgpu.server.device.cpu.ptx.flow import Block, blocks_of, defs_and_uses
from rgpu.server.device.cpu.ptx.model import Addr, FloatImm, Function, Imm, Instruction, Program, Reg, Sym

MOST = 255  #: registers of a thread
LEAST = 16
_OWN = 4  #: the stack pointer, and temporaries for addresses and results
_FILE = 65536  #: registers of a multiprocessor
_UNIT = 8  #: registers of a thread are allocated in such steps
_WARP = 32


def estimated(program: Program, entry: Function, most: int = 0) -> int:
    """Return the registers of a thread of ``entry``. ``most``: the compiler option (maxrregcount), 0 for none.

    As in ptxas, ``.maxnreg`` and launch bounds of the kernel itself take precedence over the option.
    """
    wanted = _pressure(program, entry, {}) + _OWN
    return max(1, min(max(LEAST, wanted), _limit(entry, most)))


def block_limit(registers: int, threads: int) -> int:
    """Return how many threads a block can have, ``threads`` at most, if each has ``registers`` registers."""
    warp = -(-registers // _UNIT) * _UNIT * _WARP
    return min(threads, _FILE // warp * _WARP)


def _limit(entry: Function, most: int) -> int:
    if entry.max_registers:
        return min(MOST, entry.max_registers)
    limit = MOST
    if entry.bounded:
        warps = -(-entry.max_threads // _WARP) * max(1, entry.min_blocks)
        limit = min(limit, _FILE // (warps * _WARP) // _UNIT * _UNIT)
    elif most > 0:
        limit = min(limit, most)
    return max(LEAST, limit)


def _pressure(program: Program, fn: Function, known: dict[str, int]) -> int:
    """Return the most 32-bit registers that ``fn`` and its callees have live at once."""
    if fn.name in known:
        return known[fn.name]
    known[fn.name] = 0  # for a function that calls itself: the caller's are on the stack meanwhile
    if fn.body is None:
        return 0
    blocks = blocks_of(fn, 0)
    held = _held_elsewhere(fn, blocks)

    def called(ins: Instruction) -> int:
        return max((_pressure(program, callee, known) for callee in reached(program, fn, ins)), default=0)

    known[fn.name] = max((_of_block(block, held, called) for block in blocks), default=0)
    return known[fn.name]


def _of_block(block: Block, held: set[Reg], called: Callable[[Instruction], int]) -> int:
    """Walk a block backwards: what is live behind each instruction, and what a call needs besides."""
    live = {reg for reg in block.live_out if reg not in held}
    now = sum(map(_size, live))
    most = now
    for ins in reversed([*block.body, *([block.end] if block.end else [])]):
        if ins.op == "call":
            most = max(most, now + called(ins))
        defs, uses = defs_and_uses(ins)
        for reg in defs:
            if reg in live:
                live.discard(reg)
                now -= _size(reg)
        for reg in uses:
            if reg not in live and reg not in held:
                live.add(reg)
                now += _size(reg)
        most = max(most, now)
    return most


def _size(reg: Reg) -> int:
    """Return the number of 32-bit registers; predicates have a file of their own."""
    return 0 if reg.width == 1 else max(1, reg.width // 32)


def _held_elsewhere(fn: Function, blocks: list[Block]) -> set[Reg]:
    """Return the registers with one definition, which is a constant, a parameter of the kernel or a copy."""
    definitions: dict[Reg, Instruction | None] = {}
    for block in blocks:
        for ins in block.body:
            for reg in defs_and_uses(ins)[0]:
                definitions[reg] = None if reg in definitions or ins.guard is not None else ins
    held: set[Reg] = set()
    for _ in range(2):  # a copy of a copy
        held |= {reg for reg, ins in definitions.items() if ins is not None and _costs_nothing(fn, ins, held)}
    return held


def _costs_nothing(fn: Function, ins: Instruction, held: set[Reg]) -> bool:
    if len(ins.operands) != 2:
        return False
    source = ins.operands[1]
    if ins.op in ("mov", "cvta"):
        return isinstance(source, (Imm, FloatImm, Sym)) or source in held
    return (ins.op == "ld" and "param" in ins.mods and fn.entry and isinstance(source, Addr)
            and isinstance(source.base, Sym) and any(source.base.name == var.key for var in fn.params))
