"""Basic blocks and liveness of one function.

A block ends at a branch, a return, a call or a barrier.  Warp-synchronous
instructions (``shfl.sync`` and the like) start one, because that is where the
lanes named in their member mask meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rgpu.server.device.cpu.ptx.errors import PtxError
from rgpu.server.device.cpu.ptx.model import Addr, Function, Instruction, LabelMark, Not, Operand, Pair, Reg, Sym, Vec

CARRY = Reg("%cc", 1)
WARP_SYNC = {"shfl", "vote", "match", "redux"}
STACK_END = "#stack"  #: replaces a call for which the stack has no level
_ENDS = {"bra", "brx", "ret", "exit", "trap", "brkpt", "call", STACK_END}
_NO_RESULT = _ENDS | {
    "st", "red", "bar", "barrier", "membar", "fence", "prefetch", "prefetchu", "nanosleep", "pmevent", "discard",
    "applypriority", "stmatrix", "sust", "call_result",
}  # fmt: skip


@dataclass(slots=True)
class Block:
    """Straight-line instructions; ``end`` is the one that leads elsewhere (None: fall through)."""

    id: int
    body: list[Instruction] = field(default_factory=list)
    end: Instruction | None = None
    targets: list[int] = field(default_factory=list)
    falls: bool = True
    member_mask: Operand | None = None
    live_in: frozenset[Reg] = frozenset()
    live_out: frozenset[Reg] = frozenset()


def is_barrier(ins: Instruction) -> bool:
    """Whether ``ins`` may wait for other warps."""
    return ins.op == "barrier" or (ins.op == "bar" and ins.mods[:1] != ("warp",))


def member_mask(ins: Instruction) -> Operand | None:
    """Return the member mask of a warp-synchronous instruction."""
    if ins.op in WARP_SYNC and "sync" in ins.mods and ins.operands:
        return ins.operands[-1]
    if ins.op == "bar" and ins.mods[:1] == ("warp",) and ins.operands:
        return ins.operands[0]
    return None


def _registers(op: Operand) -> list[Reg]:
    if isinstance(op, Reg):
        return [op]
    if isinstance(op, Not):
        return [op.reg]
    if isinstance(op, Addr):
        return _registers(op.base)
    if isinstance(op, Vec):
        return [r for x in op.items for r in _registers(x)]
    if isinstance(op, Pair):
        return _registers(op.first) + _registers(op.second)
    return []


def defs_and_uses(ins: Instruction) -> tuple[list[Reg], list[Reg]]:
    """Return the registers written and read; a guarded write also reads, since it keeps the old value."""
    first = 0 if ins.op in _NO_RESULT else 1
    defs = [r for x in ins.operands[:first] for r in _registers(x)]
    uses = [r for x in ins.operands[first:] for r in _registers(x)]
    if "cc" in ins.mods:
        defs = [*defs, CARRY]
    if ins.op in ("addc", "subc", "madc"):
        uses.append(CARRY)
    if ins.guard is not None:
        uses += _registers(ins.guard) + defs
    return defs, uses


def _expanded(fn: Function) -> list[Instruction | LabelMark]:
    """Return the body with guards on calls, barriers and returns turned into branches around them."""
    out: list[Instruction | LabelMark] = []
    for item in fn.body or []:
        if isinstance(item, LabelMark) or item.guard is None or item.op == "bra":
            out.append(item)
            continue
        if item.op not in _ENDS and not is_barrier(item):
            out.append(item)
            continue
        label = f"#skip{len(out)}"
        guard = item.guard.reg if isinstance(item.guard, Not) else Not(item.guard)
        out.append(Instruction(item.line, "bra", (), (Sym(label),), guard))
        out.append(Instruction(item.line, item.op, item.mods, item.operands))
        out.append(LabelMark(label, item.line))
    return out


class _Builder:
    """Cuts a function's body into blocks."""

    def __init__(self, fn: Function, first_id: int):
        self.fn = fn
        self.blocks = [Block(first_id)]
        self.labels: dict[str, int] = {}
        self.written: set[Reg] = set()

    def build(self) -> list[Block]:
        for item in _expanded(self.fn):
            if isinstance(item, LabelMark):
                if self._now.body or self._now.end or self._now.member_mask is not None:
                    self._start()
                self.labels[item.name] = self._now.id
            else:
                self._instruction(item)
        if self._now.end is None:
            # Falling off the end of a function is a return.
            self._now.end = Instruction(self.fn.line, "ret", (), ())
            self._now.falls = False
        self._link()
        return self.blocks

    @property
    def _now(self) -> Block:
        return self.blocks[-1]

    def _start(self) -> None:
        self.blocks.append(Block(self._now.id + 1))
        self.written = set()

    def _instruction(self, ins: Instruction) -> None:
        if self._now.end is not None:
            self._start()
        mask = member_mask(ins)
        if mask is not None and (mask != self._now.member_mask or mask in self.written):
            if self._now.body or self._now.member_mask is not None:
                self._start()
            self._now.member_mask = mask
        if is_barrier(ins) and "red" in ins.mods:
            result, *rest = ins.operands
            self._end(Instruction(ins.line, ins.op, ins.mods, tuple(rest)))
            self._start()
            self._now.body.append(Instruction(ins.line, "bar_result", ins.mods, (result, rest[0])))
        elif ins.op in _ENDS or is_barrier(ins):
            self._end(ins)
            if ins.op == "call" and any(isinstance(op, Reg) for op in ins.operands):  # through a pointer
                self._start()
                self._now.body.append(Instruction(ins.line, "call_result", ins.mods, ins.operands))
        else:
            self._now.body.append(ins)
            self.written.update(defs_and_uses(ins)[0])

    def _end(self, ins: Instruction) -> None:
        self._now.end = ins
        leaves = ins.op in ("ret", "exit", "trap", "brkpt", "brx", STACK_END)
        self._now.falls = not (leaves or (ins.op == "bra" and not ins.guard))

    def _link(self) -> None:
        last = self.blocks[-1]
        if last.falls:
            self.blocks.append(Block(last.id + 1, end=Instruction(self.fn.line, "ret", (), ()), falls=False))
        for block in self.blocks:
            names: tuple[str, ...] = ()
            if block.end is not None and block.end.op == "bra":
                names = tuple(x.name for x in block.end.operands if isinstance(x, Sym))
                if len(names) != 1:
                    raise block.end.refuse("needs a label")
            elif block.end is not None and block.end.op == "brx":
                names = self._table(block.end)
            for name in names:
                if name not in self.labels:
                    raise PtxError(f"unknown label {name}", block.end.line if block.end else None)
                block.targets.append(self.labels[name])

    def _table(self, ins: Instruction) -> tuple[str, ...]:
        if ins.mods not in (("idx",), ("idx", "uni")) or len(ins.operands) != 2 or not isinstance(ins.operands[1], Sym):
            raise ins.refuse()
        table = self.fn.branch_targets.get(ins.operands[1].name)
        if table is None:
            raise PtxError(f"unknown branch table {ins.operands[1].name}", ins.line)
        return table


def _liveness(blocks: list[Block]) -> None:
    first = blocks[0].id
    reads: list[set[Reg]] = []
    writes: list[set[Reg]] = []
    for block in blocks:
        read: set[Reg] = set(_registers(block.member_mask)) if block.member_mask is not None else set()
        written: set[Reg] = set()
        for ins in [*block.body, *([block.end] if block.end else [])]:
            defs, uses = defs_and_uses(ins)
            read.update(r for r in uses if r not in written)
            written.update(defs)
        reads.append(read)
        writes.append(written)
    following = [dict.fromkeys([t - first for t in b.targets] + ([i + 1] if b.falls else []))
                 for i, b in enumerate(blocks)]
    before: list[list[int]] = [[] for _ in blocks]
    for i, others in enumerate(following):
        for j in others:
            before[j].append(i)
    # A block is examined again only when one of its successors has changed: in any order of the labels, once for each
    # register found live there, not once for each other block.
    again, waiting = list(range(len(blocks))), [True] * len(blocks)
    while again:
        i = again.pop()
        waiting[i], block = False, blocks[i]
        out = frozenset().union(*(blocks[j].live_in for j in following[i]))
        live = frozenset(reads[i] | (out - writes[i]))
        block.live_out = out
        if live != block.live_in:
            block.live_in = live
            for j in before[i]:
                if not waiting[j]:
                    waiting[j] = True
                    again.append(j)


def blocks_of(fn: Function, first_id: int) -> list[Block]:
    """Return the blocks of ``fn``, numbered from ``first_id`` in program order, with liveness."""
    blocks = _Builder(fn, first_id).build()
    _liveness(blocks)
    return blocks


def call_target(ins: Instruction) -> str:
    """Return the name of a call's function; for a call through a pointer, the label of its prototype or targets."""
    for op in ins.operands:
        if isinstance(op, Sym):
            return op.name
    raise ins.refuse("calls through pointers")


def call_lists(ins: Instruction) -> tuple[Sequence[Operand], Sequence[Operand]]:
    """Return the operands that receive a call's results, and those that it passes."""
    at = next((i for i, op in enumerate(ins.operands) if isinstance(op, (Reg, Sym))), len(ins.operands))
    given = [op for op in ins.operands[at + 1 :] if not isinstance(op, Sym)] if isinstance(
        ins.operands[at], Reg) else ins.operands[at + 1 :]
    return _names(ins.operands[:at]), _names(given)


def _names(operands: Sequence[Operand]) -> Sequence[Operand]:
    """Return the operands of one list of a call: in brackets or alone."""
    return operands[0].items if operands and isinstance(operands[0], Vec) else operands
