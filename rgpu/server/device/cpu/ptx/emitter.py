"""The state in which an instruction's code is generated: the IR so far, registers, places of variables, modifiers."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

from rgpu.server.device.cpu.ptx.calls.reached import address_of
from rgpu.server.device.cpu.ptx.errors import PtxError
from rgpu.server.device.cpu.ptx.jit import Helper
from rgpu.server.device.cpu.ptx.layout import F_REGISTERS, L_LINE, T_GLOBALS, T_LAUNCH
from rgpu.server.device.cpu.ptx.model import (
    FloatImm,
    Function,
    Imm,
    Instruction,
    Not,
    Operand,
    Program,
    Reg,
    Sink,
    Special,
    Sym,
)

_SELECT = re.compile(
    r"select <32 x i1> (\S+|splat \(.*?\)|<[^>]*>), <32 x i(32|64)> (\S+|splat \(.*?\)), <32 x i\d+> (.*)"
)


class Mods:
    """An instruction's modifiers; one that is never taken is an error."""

    def __init__(self, ins: Instruction):
        self.ins = ins
        self.left = list(ins.mods)

    def take(self, *names: str, default: str = "") -> str:
        """Remove and return the one of ``names`` that is present; ``default`` where none is."""
        for name in self.left:
            if name in names:
                self.left.remove(name)
                return name
        return default

    def has(self, name: str) -> bool:
        """Remove ``name``; returns whether it was present."""
        return bool(self.take(name))

    def type(self, *allowed: str) -> str:
        """Remove and return the last modifier, which must be one of ``allowed``."""
        if not self.left or self.left[-1] not in allowed:
            raise self.ins.refuse()
        return self.left.pop()

    def done(self) -> None:
        """Fail if a modifier is left over."""
        if self.left:
            raise self.ins.refuse(f"modifier .{self.left[0]}")


@dataclass(frozen=True)
class Place:
    """A variable's place: its space and its offset (or table index) there."""

    space: str
    offset: int


def aligned(value: int, to: int) -> int:
    """Round ``value`` up to a multiple of ``to``."""
    return -(-value // to) * to


def float_bits(value: float, width: int) -> int:
    """Return the bits of a float of 16, 32 or 64 bits."""
    try:
        return int.from_bytes(struct.pack({16: "<e", 32: "<f", 64: "<d"}[width], value), "little")
    except OverflowError:
        return float_bits(float("inf") if value > 0 else float("-inf"), width)


class Gen:
    """Code generation for one kernel. ``special_register``: returns a register's value and its width, by name."""

    def __init__(self, program: Program, entry: Function, global_index: dict[str, int],
                 special_register: Callable[[Gen, str], tuple[str, int]]):
        self.program = program
        self.entry = entry
        self.global_index = global_index
        self.special_register = special_register
        self.lines: list[str] = []
        self.helpers: dict[str, Helper] = {}
        self.places: dict[tuple[str, str], Place] = {}
        self.slots: dict[tuple[str, Reg], int] = {}
        self.return_slots: dict[str, int] = {}
        self.entries: dict[str, int] = {}
        self.frame_bytes = F_REGISTERS
        self.counter = self.sites = self.local_bytes = self.static_shared = self.dynamic_shared = self.param_bytes = 0
        self.local_align = 16  # of every lane's local memory
        self.logic: set[str] = set()  # names of and/or/xor results
        self.env: dict[Reg, str] = {}
        self.dirty: set[Reg] = set()
        self.fn = entry
        self.act = self.lanes_vector = ""
        self.guard: str | None = None
        self.line = 0

    # -- emission --------------------------------------------------------

    def emit(self, text: str) -> None:
        """Append one line of IR."""
        self.lines.append("  " + text)

    def t(self, expression: str) -> str:
        """Emit ``%new = expression`` and return the new name."""
        word = expression.split(" ", 1)[0]
        if word == "select":
            expression = self._fenced(expression)
        self.counter += 1
        name = f"%t{self.counter}"
        self.lines.append(f"  {name} = {expression}")
        if word in ("and", "or", "xor"):
            self.logic.add(name)
        return name

    def _fenced(self, select: str) -> str:
        """Keep a ``select`` apart from the logic that feeds it.

        LLVM 20 fuses the two into a masked vpternlog on AVX-512, and for some
        operand orders with the wrong truth table (fmodf came out wrong).
        """
        match = _SELECT.fullmatch(select)
        if match is None or not {match[3], match[4]} & self.logic:
            return select
        kind, scalar = match[2], {"32": "float", "64": "double"}[match[2]]
        f = f"v32f{kind}"
        fenced = []
        for value in (match[3], match[4]):
            if value in self.logic:
                number = self.t(f"bitcast <32 x i{kind}> {value} to <32 x {scalar}>")
                number = self.t(f"call <32 x {scalar}> @llvm.arithmetic.fence.{f}(<32 x {scalar}> {number})")
                value = self.t(f"bitcast <32 x {scalar}> {number} to <32 x i{kind}>")
            fenced.append(value)
        return f"select <32 x i1> {match[1]}, <32 x i{kind}> {fenced[0]}, <32 x i{kind}> {fenced[1]}"

    def label(self, prefix: str = "L") -> str:
        """Return a fresh label name."""
        self.counter += 1
        return f"{prefix}{self.counter}"

    def place_label(self, name: str) -> None:
        """Start the LLVM block ``name``."""
        self.lines.append(f"{name}:")

    def call(self, helper: Helper, *args: str) -> str:
        """Emit a call of a helper; returns the name of its result (empty for void)."""
        self.helpers[helper.name] = helper
        result = helper.declaration.split("@")[0].removeprefix("declare ").strip()
        text = f"call {result} @{helper.name}({', '.join(args)})"
        if result == "void":
            self.emit(text)
            return ""
        return self.t(text)

    def splat(self, kind: str, value: str) -> str:
        """Copy a scalar to all lanes."""
        one = self.t(f"insertelement <32 x {kind}> poison, {kind} {value}, i32 0")
        return self.t(f"shufflevector <32 x {kind}> {one}, <32 x {kind}> poison, <32 x i32> zeroinitializer")

    def word(self, index: int, kind: str = "i64") -> str:
        """Load a 64-bit word of the thread record."""
        pointer = self.t(f"getelementptr i64, ptr %T, i64 {index}")
        return self.t(f"load {kind}, ptr {pointer}")

    def frame_word(self, index: int) -> str:
        """Load a 32-bit word of the frame."""
        pointer = self.t(f"getelementptr i32, ptr %F, i64 {index}")
        return self.t(f"load i32, ptr {pointer}")

    def site(self) -> str:
        """Return the number of a new memory access (each remembers the range of its last hit)."""
        self.sites += 1
        return f"i32 {self.sites - 1}"

    # -- operands --------------------------------------------------------

    def current(self, reg: Reg) -> str:
        """Return the value of a register at this point: <32 x iN>."""
        if reg not in self.env:
            slot = self.slots.get((self.fn.name, reg))
            if slot is None:
                return "zeroinitializer"  # nothing can have written the register
            pointer = self.t(f"getelementptr i8, ptr %F, i64 {slot}")
            if reg.width == 1:
                bits = self.t(f"load i32, ptr {pointer}")
                self.env[reg] = self.t(f"bitcast i32 {bits} to <32 x i1>")
            else:
                self.env[reg] = self.t(f"load <32 x i{reg.width}>, ptr {pointer}, align 64")
        return self.env[reg]

    def read(self, op: Operand, width: int) -> str:
        """Return an operand's bits as ``<32 x iwidth>``."""
        if isinstance(op, Reg):
            value = self.current(op)
            return self.resize(value, op.width, width)
        if isinstance(op, Imm):
            return f"splat (i{width} {op.value & ((1 << width) - 1)})"
        if isinstance(op, FloatImm):
            return f"splat (i{width} {float_bits(op.value, width)})"
        if isinstance(op, Special):
            value, have = self.special_register(self, op.name)
            return self.resize(value, have, width)
        if isinstance(op, Sym):
            return self.resize(self.symbol(op), 64, width)
        if isinstance(op, Sink):
            return "zeroinitializer"
        raise PtxError(f"unsupported operand {op}", self.line)

    def resize(self, value: str, have: int, want: int, signed: bool = False) -> str:
        """Truncate or extend lanes from ``have`` to ``want`` bits."""
        if have == want:
            return value
        how = "trunc" if want < have else "sext" if signed else "zext"
        return self.t(f"{how} <32 x i{have}> {value} to <32 x i{want}>")

    def write(self, op: Operand, value: str, width: int, signed: bool = False) -> None:
        """Set a register from ``<32 x iwidth>``, only in guarded lanes if there is a guard."""
        if isinstance(op, Sink):
            return
        if not isinstance(op, Reg):
            raise PtxError("unsupported destination: not a register", self.line)
        if op.width < width:
            raise PtxError(f"unsupported destination {op.name}: narrower than the result", self.line)
        value = self.resize(value, width, op.width, signed)
        if self.guard is not None:
            kind = f"<32 x i{op.width}>"
            value = self.t(f"select <32 x i1> {self.guard}, {kind} {value}, {kind} {self.current(op)}")
        self.env[op] = value
        self.dirty.add(op)

    def pred(self, op: Operand) -> str:
        """Return a predicate operand as ``<32 x i1>``."""
        if isinstance(op, Not):
            return self.t(f"xor <32 x i1> {self.current(op.reg)}, splat (i1 true)")
        if isinstance(op, Imm):
            return f"splat (i1 {'true' if op.value else 'false'})"
        if isinstance(op, Reg) and op.width == 1:
            return self.current(op)
        raise PtxError("unsupported operand: not a predicate", self.line)

    def lanes(self) -> str:
        """Return the lanes that an instruction acts on: active, and its guard true (i32)."""
        if self.guard is None:
            return self.act
        bits = self.t(f"bitcast <32 x i1> {self.guard} to i32")
        return self.t(f"and i32 {self.act}, {bits}")

    def first_active(self, value: str, width: int = 32) -> str:
        """Return the value in the first active lane, as a scalar."""
        lane = self.t(f"call i32 @llvm.cttz.i32(i32 {self.act}, i1 false)")
        lane = self.t(f"and i32 {lane}, 31")
        return self.t(f"extractelement <32 x i{width}> {value}, i32 {lane}")

    # -- variables -------------------------------------------------------

    def find(self, name: str) -> Place:
        """Return the place of the variable called ``name``, as this function sees it."""
        place = self.places.get((self.fn.name, name)) or self.places.get(("", name))
        if place is None:
            raise PtxError(f"unknown name {name}", self.line)
        return place

    def symbol(self, sym: Sym) -> str:
        """Return the address of a variable as ``<32 x i64>``: real for globals, an offset otherwise."""
        local = (self.fn.name, sym.name) in self.places or ("", sym.name) in self.places
        if not local and not sym.offset and (address := address_of(self.program, sym.name)) is not None:
            return f"splat (i64 {address})"
        place = self.find(sym.name)
        if place.space == "global":
            table = self.word(T_GLOBALS, "ptr")
            pointer = self.t(f"getelementptr i64, ptr {table}, i64 {place.offset}")
            base = self.t(f"load i64, ptr {pointer}")
            if sym.offset:
                base = self.t(f"add i64 {base}, {sym.offset & (1 << 64) - 1}")
            return self.splat("i64", base)
        return f"splat (i64 {place.offset + sym.offset & (1 << 64) - 1})"

    def local_space(self, size: int, align: int) -> int:
        """Reserve bytes in every lane's local memory; returns their offset."""
        self.local_align = max(self.local_align, align)
        offset = aligned(self.local_bytes, max(align, 1))
        self.local_bytes = offset + size
        return offset

    def frame_space(self, size: int) -> int:
        """Reserve bytes in the frame, aligned for vectors; returns their offset."""
        offset = aligned(self.frame_bytes, 64 if size >= 64 else 4)
        self.frame_bytes = offset + size
        return offset

    def note_line(self) -> None:
        """Record the current line for the error message of a trap."""
        launch = self.word(T_LAUNCH, "ptr")
        pointer = self.t(f"getelementptr i64, ptr {launch}, i64 {L_LINE}")
        self.emit(f"store i64 {self.line}, ptr {pointer}")
