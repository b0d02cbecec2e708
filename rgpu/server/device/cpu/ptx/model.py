"""The parser's output: operands, instructions, variables, functions.

Registers are bags of bits: their declared type matters only for its width,
because newer compilers keep floats in ``.b32`` registers.  The instruction
determines how the bits are read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rgpu.server.device.cpu.ptx.errors import PtxError

# Width in bits of every scalar type a register, variable or access can have.
WIDTHS = {
    "pred": 1,
    "b8": 8, "u8": 8, "s8": 8,
    "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16,
    "b32": 32, "u32": 32, "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32,
    "b64": 64, "u64": 64, "s64": 64, "f64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reg:
    """A register; ``name`` is unique within its function."""

    name: str
    width: int


@dataclass(frozen=True, slots=True)
class Imm:
    """An integer literal."""

    value: int


@dataclass(frozen=True, slots=True)
class FloatImm:
    """A ``0f…``/``0d…`` or decimal literal, as a Python float."""

    value: float


@dataclass(frozen=True, slots=True)
class Sym:
    """A variable, function or label by name, plus a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Special:
    """A special register such as ``%tid.x``."""

    name: str


@dataclass(frozen=True, slots=True)
class Addr:
    """``[base+offset]``."""

    base: Operand
    offset: int


@dataclass(frozen=True, slots=True)
class Vec:
    """``{a, b, …}``, or the parenthesised list of a call."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """``d|p``: two destinations."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Not:
    """``!p``."""

    reg: Reg


@dataclass(frozen=True, slots=True)
class Sink:
    """``_``: a destination whose value is dropped."""


Operand = Reg | Imm | FloatImm | Sym | Special | Addr | Vec | Pair | Not | Sink


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable in some state space; ``key`` is unique within its function."""

    name: str
    key: str
    space: str
    align: int
    size: int
    line: int
    init: tuple = ()
    element: int = 1
    extern: bool = False
    managed: bool = False  #: ``.attribute(.managed)``: the program also uses it on the CPU


@dataclass(slots=True)
class Instruction:
    """One instruction; ``mods`` are the dotted parts after the opcode."""

    line: int
    op: str
    mods: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Reg | Not | None = None
    variables: dict[str, Variable] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The dotted opcode, as error messages name it."""
        return ".".join((self.op, *self.mods))

    def refuse(self, why: str = "") -> PtxError:
        """Return the error that refuses this instruction here."""
        return PtxError(f"unsupported {self.text}" + (f": {why}" if why else ""), self.line)


@dataclass(slots=True)
class LabelMark:
    """The place of a label in a function's body."""

    name: str
    line: int


@dataclass(slots=True)
class Function:
    """An ``.entry`` or ``.func``."""

    name: str
    entry: bool
    line: int
    params: list[Variable] = field(default_factory=list)
    results: list[Variable] = field(default_factory=list)
    body: list[Instruction | LabelMark] | None = None
    variables: dict[str, Variable] = field(default_factory=dict)
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    call_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)  #: of calls through pointers, by label
    #: sizes in bytes of results and of parameters of functions that are called through pointers, by label
    prototypes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    max_threads: int = 1024
    bounded: bool = False  #: ``max_threads`` was given by .maxntid or .reqntid
    min_blocks: int = 0  #: .minnctapersm
    max_registers: int = 0  #: .maxnreg


@dataclass(slots=True)
class Program:
    """A whole PTX module."""

    version: int
    target: int
    variables: dict[str, Variable]
    functions: dict[str, Function]
    max_registers: int = 0  #: the option that the module was linked with
    tag: int = 0  #: derived from the module's text: keeps its functions' addresses apart from those of other modules
    numbers: dict[str, int] = field(default_factory=dict)  #: of functions whose address was requested
    #: functions whose address is taken, by the sizes of results and parameters; None: not yet computed
    addressed: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Function]] | None = None
