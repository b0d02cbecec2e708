"""A PTX module as its user sees it: parse, inspect, link, launch."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from rgpu.server.device.cpu.ptx import jit, registers
from rgpu.server.device.cpu.ptx.calls.reached import address_of
from rgpu.server.device.cpu.ptx.codegen import KernelCode, generate
from rgpu.server.device.cpu.ptx.emitter import float_bits
from rgpu.server.device.cpu.ptx.errors import CompileLimit, PtxError
from rgpu.server.device.cpu.ptx.launch import Dim, Launch, LaunchResult, MemoryRanges
from rgpu.server.device.cpu.ptx.model import Program, Variable
from rgpu.server.device.cpu.ptx.syntax.parser import parse

MOST_IR = 512 << 20  #: bytes of LLVM IR of a module
MOST_TEXT = 64 << 20  #: bytes of PTX of a module


@dataclass(frozen=True)
class ParamInfo:
    """A kernel parameter's place in the parameter buffer."""

    offset: int
    size: int


@dataclass(frozen=True)
class KernelInfo:
    """The facts of a kernel that the driver API reports."""

    name: str
    params: tuple[ParamInfo, ...]
    param_bytes: int
    static_shared: int
    local_bytes: int
    max_threads: int
    num_regs: int
    const_bytes: int
    ptx_version: int
    binary_version: int


@dataclass(frozen=True)
class GlobalInfo:
    """A variable in device memory, with its initial contents before relocation."""

    name: str
    size: int
    align: int
    space: str
    data: bytes
    managed: bool = False


class PtxModule:
    """Parsed and fully checked PTX; nothing is compiled by LLVM yet."""

    def __init__(self, program: Program, max_registers: int = 0):
        self._program = program
        self._max_registers = max_registers or program.max_registers
        placed = [n for n, v in program.variables.items() if v.space != "shared"]
        self._index = {name: i for i, name in enumerate(placed)}
        self._code: dict[str, KernelCode] = {}
        self.kernels: dict[str, KernelInfo] = {}
        self.globals: dict[str, GlobalInfo] = {}
        for name in placed:
            var = program.variables[name]
            if not var.extern:
                data = self._image(var, lambda *_: 0)
                self.globals[name] = GlobalInfo(name, var.size, var.align, var.space, data, var.managed)
        room = MOST_IR
        for fn in program.functions.values():
            if fn.entry and fn.body is not None:
                self._code[fn.name] = code = generate(program, fn, self._index)
                room -= len(code.text)
                if room < 0:  # each kernel contains the functions that it calls
                    raise CompileLimit(f"its kernels are too large: more than {MOST_IR} bytes of LLVM IR", fn.line)
                self.kernels[fn.name] = self._info(fn.name)

    def _info(self, name: str) -> KernelInfo:
        fn, code = self._program.functions[name], self._code[name]
        used = registers.estimated(self._program, fn, self._max_registers)
        constants = sum(g.size for g in self.globals.values() if g.space == "const")
        return KernelInfo(
            name,
            tuple(ParamInfo(offset, size) for offset, size in code.params),
            code.param_bytes,
            code.static_shared,
            code.local_bytes,
            registers.block_limit(used, fn.max_threads),
            used,
            constants,
            self._program.version,
            75,
        )

    def _image(self, var: Variable, resolve: Callable[[str, int], int]) -> bytes:
        out = bytearray()
        size = var.element
        for item in var.init:
            if isinstance(item, tuple):
                name, offset = item
                if size != 8:
                    raise PtxError(f"unsupported initialiser of {var.name}: an address needs 8 bytes", var.line)
                value = resolve(name, var.line) + offset
            else:
                value = float_bits(item, 8 * size) if isinstance(item, float) else item
            out += (value & (1 << 8 * size) - 1).to_bytes(size, "little")
        if len(out) > var.size:
            raise PtxError(f"{var.name} has more initial values than elements", var.line)
        return bytes(out)  # the rest is zero, as fresh memory is: a few bytes of text may declare gigabytes

    def initial_image(self, addresses: Mapping[str, int]) -> dict[str, bytes]:
        """Return the first bytes of each global and constant, given all addresses; the bytes behind them are zero."""

        def resolve(name: str, line: int) -> int:
            if name in addresses:
                return addresses[name]
            if (function := address_of(self._program, name)) is None:
                raise PtxError(f"unsupported initialiser: {name} has no address", line)
            return function

        return {name: self._image(self._program.variables[name], resolve) for name in self.globals}

    def link(self, addresses: Mapping[str, int], externs: Mapping[str, int] | None = None) -> LinkedModule:
        """Return the module with every variable placed; ``externs``: addresses of other modules' variables."""
        table = np.zeros(max(1, len(self._index)), dtype=np.uint64)
        for name, i in self._index.items():
            address = addresses.get(name, (externs or {}).get(name))
            if address is None:
                raise PtxError(f"undefined variable {name}", self._program.variables[name].line)
            table[i] = address
        return LinkedModule(self.kernels, self._code, table)


class LinkedModule:
    """A module ready to run: kernels compile at first use, once per process."""

    def __init__(self, kernels: dict[str, KernelInfo], code: dict[str, KernelCode], table: np.ndarray):
        self.kernels = kernels
        self._code = code
        self._table = table

    def compile(self, kernel: str) -> None:
        """Compile now what the first launch would compile."""
        _entry_point(self._code[kernel])

    def launch(
        self,
        kernel: str,
        grid: Dim,
        block: Dim,
        dynamic_shared: int,
        params: bytes,
        ranges: MemoryRanges,
        *,
        threads: int = 2,
        cancel: threading.Event | None = None,
        printf: Callable[[bytes], None] | None = None,
        cooperative: bool = False,
        textures: np.ndarray | None = None,
        conditions: dict[int, int] | None = None,
    ) -> LaunchResult:
        """Run a kernel to its end; safe to call from several threads at once.

        ``threads``: host threads it may use; a ``cooperative`` grid takes one for each block (a few hundred at most).
        ``textures``: addresses of texture and surface descriptors by their handle, uint64; 0 for none.
        ``conditions``: values of the graph's conditions by handle, which the kernel may set.
        """
        code = self._code[kernel]
        if len(params) < code.param_bytes:
            raise ValueError(f"{kernel} takes {code.param_bytes} bytes of parameters, not {len(params)}")
        made = Launch(code, _entry_point(code), self._table, grid, block, dynamic_shared, params, ranges,
                      cooperative, textures, conditions)
        return made.run(threads, cancel, printf)


_lock = threading.Lock()
_compiling: dict[str, threading.Lock] = {}
_entry_points: dict[str, int] = {}
_modules: dict[tuple[bytes, int, int], PtxModule] = {}


def _entry_point(code: KernelCode) -> int:
    """Return the address of the kernel's machine code, compiled at most once: the symbol is a hash of its IR."""
    found = _entry_points.get(code.symbol)
    if found is not None:
        return found
    with _lock:
        mine = _compiling.setdefault(code.symbol, threading.Lock())
    with mine:
        if code.symbol not in _entry_points:
            _entry_points[code.symbol] = jit.compile_kernel(code.text, code.symbol, code.helpers)
        return _entry_points[code.symbol]


def parse_module(text: str, *, max_target: int = 75, max_registers: int = 0) -> PtxModule:
    """Parse and check PTX, down to the last modifier. Raises ``PtxError``.

    ``max_registers``: of a thread, where the kernel itself sets no limit; 0: no limit.
    """
    text = text.rstrip("\0")
    if len(text) > MOST_TEXT:
        raise CompileLimit(f"{len(text)} bytes of PTX, {MOST_TEXT} at most")
    key = hashlib.sha256(text.encode()).digest(), max_target, max_registers
    with _lock:
        known = _modules.get(key)
    if known is None:
        known = PtxModule(parse(text, max_target), max_registers)
        with _lock:
            _modules[key] = known
    return known
