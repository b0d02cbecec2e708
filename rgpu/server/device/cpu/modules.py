"""Modules of a ``cpu`` device: module binary → PTX → engine → the table that the client gets.

The PTX engine (:mod:`rgpu.server.device.cpu.ptx`) compiles and runs; this file
chooses the text, places the variables, translates the engine's errors to
CUresults, and checks launches against what the kernel allows.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from rgpu.checkpoint.device import FunctionInfo, GlobalVariable, Launch, ModuleTable
from rgpu.server.device.cpu import addressspace, facts, fatbin, ptxlink
from rgpu.server.device.cpu.memory import Memory, PlacedGlobal
from rgpu.server.device.loads import LoadNotes
from rgpu.session.errors import DeviceError

log = structlog.get_logger(__name__)

INVALID_VALUE, OUT_OF_MEMORY, INVALID_HANDLE, NOT_SUPPORTED = 1, 2, 400, 801
INVALID_PTX, UNSUPPORTED_PTX_VERSION, NO_BINARY_FOR_GPU = 218, 222, 209
OUT_OF_RESOURCES, COOPERATIVE_TOO_LARGE = 701, 720
MAX_TARGET = facts.COMPUTE_CAPABILITY[0] * 10 + facts.COMPUTE_CAPABILITY[1]
MAX_PTX_MAJOR = 9  #: .version 9.x: CUDA 13

ATTRIBUTE_MAX_DYNAMIC_SHARED, ATTRIBUTE_CARVEOUT = 8, 9
_SETTABLE_IGNORED = frozenset({ATTRIBUTE_CARVEOUT, 10, 11, 12, 13, 14, 15})

#: CUjitInputType of cuLink*.
INPUT_CUBIN, INPUT_PTX, INPUT_FATBIN, INPUT_OBJECT, INPUT_LIBRARY, INPUT_NVVM = range(6)

#: CUlaunchAttributeID that change where or whether work runs; the others are hints.
_CLUSTER_DIMENSION, _PROGRAMMATIC_EVENT, _COMPLETION_EVENT = 4, 7, 12
_LAUNCH_ATTRIBUTE_SIZE = 72

_OPTION = struct.Struct("<iq")  #: CUjit_option, its value
_JIT_MAX_REGISTERS = 0


class Engine(Protocol):
    """The interface of the PTX engine that this file needs; tests inject a stub."""

    PtxError: type[Exception]
    MemoryRanges: Any

    def parse_module(self, text: str, max_target: int = ..., max_registers: int = ...) -> Any:
        """Check and compile PTX text for at most this target and number of registers. Raises DeviceError."""


@dataclass(slots=True)
class Kernel:
    """A kernel of a module; sizes in bytes, ``max_threads`` of a block."""

    name: str
    info: Any  #: the engine's KernelInfo
    parameter_bytes: int
    max_threads: int
    max_dynamic_shared: int


@dataclass(slots=True)
class Module:
    """A loaded module: code, kernels, placed variables, table."""

    linked: Any
    kernels: list[Kernel]
    variables: tuple[PlacedGlobal, ...] = field(default=())
    table: ModuleTable = field(default=ModuleTable((), ()))


def check_version(text: str) -> None:
    """Raise DeviceError(222) for a newer PTX language than this device supports."""
    match = re.search(r"^\s*\.version\s+(\d+)\.(\d+)", text, re.M)
    if match and int(match[1]) > MAX_PTX_MAJOR:
        raise DeviceError(f"unsupported .version {match[1]}.{match[2]}: this device supports PTX up to "
                          f"{MAX_PTX_MAJOR}.x", UNSUPPORTED_PTX_VERSION)


class Modules:
    """All modules of one device, by the client's handle."""

    def __init__(self, memory: Memory, engine: Engine, notes: LoadNotes | None = None) -> None:
        """Make an empty table. ``notes``: gets the time of each stage of a load."""
        self._notes = notes or LoadNotes()
        self._memory = memory
        self._engine = engine
        self._modules: dict[int, Module] = {}

    # -- loading ------------------------------------------------------------------
    def load(self, handle: int, binary: bytes, device: int = 0, options: bytes = b"") -> tuple[ModuleTable, str]:
        """Compile, place and initialise a module. Raises DeviceError: 200, 209, 218, 222, 2 (see the message)."""
        if handle in self._modules:
            raise DeviceError(f"module {handle} exists", INVALID_HANDLE)
        try:
            with self._notes.stage("unpack"):
                text = fatbin.extract_ptx(binary, MAX_TARGET)
        except DeviceError as error:
            log.warning("a module cannot run on this device", module=handle, reason=error.message)
            raise
        check_version(text)
        try:
            module, table = self._build(handle, text, device, _max_registers(options))
        except self._engine.PtxError as error:
            line = getattr(error, "line", None)
            reason = f"{'' if line is None else f'line {line}: '}{getattr(error, 'reason', error)}"
            log.warning("PTX was refused", module=handle, reason=reason)
            raise DeviceError(reason, OUT_OF_MEMORY if getattr(error, "limit", False) else INVALID_PTX) from error
        self._modules[handle] = module
        return table, ""

    def _build(self, handle: int, text: str, device: int, max_registers: int) -> tuple[Module, ModuleTable]:
        with self._notes.stage("compile"):
            parsed = self._engine.parse_module(text, max_target=MAX_TARGET, max_registers=max_registers)
        with self._notes.stage("load"):
            linked, placed = self._place(handle, parsed, device)
        with self._notes.stage("describe"):
            return _described(linked, placed, parsed)

    def _place(self, handle: int, parsed: Any, device: int) -> tuple[Any, tuple[PlacedGlobal, ...]]:
        """Place the module's variables and set their first values; returns the linked module and the variables."""
        wanted = [(name, info.size, info.align) for name, info in parsed.globals.items()
                  if info.space in ("global", "const")]
        managed = frozenset(name for name, info in parsed.globals.items() if info.managed)
        placed = self._memory.plan_globals(handle, wanted, device, managed)
        addresses = {variable.name: variable.address for variable in placed}
        binaries = parsed.initial_image(addresses)
        linked = parsed.link(addresses)
        self._memory.place_globals(handle, placed)
        for variable in placed:
            data = binaries.get(variable.name, b"")[:variable.size]
            if data:
                addressspace.view(variable.address, len(data))[:] = memoryview(data)
        return linked, tuple(placed)

    def unload(self, handle: int) -> None:
        """Unload a module with its variables. Raises :class:`DeviceError`."""
        self._get(handle)
        del self._modules[handle]
        self._memory.remove_globals(handle)

    def unload_all(self) -> None:
        """Unload every module."""
        for handle in list(self._modules):
            self.unload(handle)

    def _get(self, handle: int) -> Module:
        module = self._modules.get(handle)
        if module is None:
            raise DeviceError(f"no module {handle}", INVALID_HANDLE)
        return module

    def kernel(self, handle: int, function: int) -> tuple[Module, Kernel]:
        """Return a module and its kernel number ``function``. Raises :class:`DeviceError`."""
        module = self._get(handle)
        if not 0 <= function < len(module.kernels):
            raise DeviceError(f"module {handle} has no function {function}", INVALID_HANDLE)
        return module, module.kernels[function]

    def attributes(self, handle: int, function: int) -> tuple[int, ...]:
        """Return the attributes of a kernel, as in the table: nothing is loaded lazily here."""
        module, _ = self.kernel(handle, function)
        return module.table.functions[function].attributes

    def set_attribute(self, handle: int, function: int, attribute: int, value: int) -> None:
        """Set dynamic shared memory, up to the opt-in limit; carve-out and cluster hints are accepted and ignored."""
        _, kernel = self.kernel(handle, function)
        if attribute == ATTRIBUTE_MAX_DYNAMIC_SHARED:
            if not 0 <= value <= facts.SHARED_OPTIN - kernel.info.static_shared:
                raise DeviceError(f"{kernel.name}: {value} bytes of dynamic shared memory", INVALID_VALUE)
            kernel.max_dynamic_shared = value
        elif attribute not in _SETTABLE_IGNORED:
            raise DeviceError(f"function attribute {attribute} cannot be set", INVALID_VALUE)

    # -- linking ------------------------------------------------------------------
    def link(self, inputs: list[tuple[int, str, bytes]], options: bytes = b"") -> tuple[bytes, str]:
        """Link cuLink* inputs, (type, name, bytes) each, to one PTX text; returns it and a log. Raises DeviceError."""
        texts: list[tuple[str, str]] = []
        notes: list[str] = []
        for kind, name, data in inputs:
            label = name or f"input {len(texts) + 1}"
            if kind in (INPUT_PTX, INPUT_FATBIN):
                texts.append((label, fatbin.extract_ptx(data, MAX_TARGET)))
            elif kind in (INPUT_OBJECT, INPUT_LIBRARY):
                try:
                    texts += [(label, text) for text in fatbin.embedded_ptx(data, MAX_TARGET)]
                except DeviceError as error:
                    if kind == INPUT_OBJECT or error.result != NO_BINARY_FOR_GPU:
                        raise
                    # A library matters only if its symbols are used: what is missing then is named at the load.
                    notes.append(f"{label} is left out: {error.message}")
            elif kind == INPUT_CUBIN:
                raise DeviceError(f"{label} is machine code (a cubin): the cpu device links PTX only",
                                  NO_BINARY_FOR_GPU)
            else:
                raise DeviceError(f"{label}: linking inputs of type {kind} is not supported", NOT_SUPPORTED)
        merged = ptxlink.with_max_registers(ptxlink.merge(texts), _max_registers(options))
        check_version(merged)
        return merged.encode() + b"\0", "\n".join([f"linked {len(texts)} PTX module(s)", *notes])

    # -- launching ------------------------------------------------------------------
    def check_launch(self, launch: Launch) -> tuple[Module, Kernel]:
        """Check what cuLaunchKernel checks at the call. Raises DeviceError: 1, 400, 701, 720, 801."""
        module, kernel = self.kernel(launch.module, launch.function)
        for axis, (size, limit) in enumerate(zip(launch.grid + launch.block, facts.MAX_GRID + facts.MAX_BLOCK,
                                                 strict=True)):
            if not 1 <= size <= limit:
                raise DeviceError(f"{kernel.name}: {'grid' if axis < 3 else 'block'} size {size}", INVALID_VALUE)
        block = launch.block[0] * launch.block[1] * launch.block[2]
        if block > facts.MAX_THREADS:
            raise DeviceError(f"{kernel.name}: {block} threads in a block", INVALID_VALUE)
        if block > kernel.max_threads:
            raise DeviceError(f"{kernel.name}: {block} threads in a block, {kernel.max_threads} allowed",
                              OUT_OF_RESOURCES)
        if not 0 <= launch.shared <= kernel.max_dynamic_shared:
            raise DeviceError(f"{kernel.name}: {launch.shared} bytes of dynamic shared memory, "
                              f"{kernel.max_dynamic_shared} allowed", INVALID_VALUE)
        if len(launch.parameters) < kernel.parameter_bytes:
            raise DeviceError(f"{kernel.name}: {len(launch.parameters)} bytes of parameters, "
                              f"{kernel.parameter_bytes} wanted", INVALID_VALUE)
        room = _most_blocks(kernel, block, launch.shared)
        if launch.cooperative and launch.grid[0] * launch.grid[1] * launch.grid[2] > room:
            raise DeviceError(f"{kernel.name}: {room} blocks of a cooperative grid fit on the device",
                              COOPERATIVE_TOO_LARGE)
        _check_launch_attributes(kernel.name, launch.attributes)
        return module, kernel


    def compile(self, module: Module, kernel: Kernel) -> None:
        """Compile a kernel, unless it is compiled. Raises DeviceError(2) for one that exceeds the compiler's limits."""
        try:
            module.linked.compile(kernel.name)
        except self._engine.PtxError as error:
            reason = f"{kernel.name}: {getattr(error, 'reason', error)}"
            log.warning("a kernel was not compiled", reason=reason)
            raise DeviceError(reason, OUT_OF_MEMORY) from error
        except Exception as error:  # noqa: BLE001 - its execution reports it
            log.info("a kernel was not compiled yet", kernel=kernel.name, reason=str(error)[:500])


def _described(linked: Any, placed: tuple[PlacedGlobal, ...], parsed: Any) -> tuple[Module, ModuleTable]:
    kernels = [_kernel(name, info) for name, info in parsed.kernels.items()]
    table = ModuleTable(
        tuple(FunctionInfo(k.name, tuple((p.offset, p.size) for p in k.info.params), _attributes(k)) for k in kernels),
        tuple(GlobalVariable(v.name, v.address, v.size, v.managed) for v in placed))
    return Module(linked, kernels, placed, table), table


def _max_registers(options: bytes) -> int:
    """Return CU_JIT_MAX_REGISTERS of a program's JIT options (pairs of i32 and i64); 0 where it is not among them."""
    if len(options) % _OPTION.size:
        raise DeviceError(f"JIT options of {len(options)} bytes", INVALID_VALUE)
    return next((value & 0xFFFF for option, value in _OPTION.iter_unpack(options) if option == _JIT_MAX_REGISTERS), 0)


def _kernel(name: str, info: Any) -> Kernel:
    end = max((parameter.offset + parameter.size for parameter in info.params), default=0)
    # 0 or absent: no .maxntid, .reqntid or register limit
    max_threads = min(int(getattr(info, "max_threads", 0) or facts.MAX_THREADS), facts.MAX_THREADS)
    if info.static_shared > facts.SHARED_DEFAULT:
        raise DeviceError(f"{name}: {info.static_shared} bytes of static shared memory, {facts.SHARED_DEFAULT} "
                          f"are there", INVALID_PTX)
    return Kernel(name, info, end, max_threads, facts.SHARED_DEFAULT - info.static_shared)


def _most_blocks(kernel: Kernel, threads: int, shared: int) -> int:
    """Return how many blocks fit on the device's multiprocessors at once, by the numbers that it reports."""
    warps = -(-threads // 32)
    registers = -(-kernel.info.num_regs // 8) * 8 * 32 * warps
    memory = kernel.info.static_shared + shared
    each = min(facts.MOST_BLOCKS, facts.MAX_THREADS // 32 // warps, facts.REGISTERS // max(1, registers),
               facts.SHARED_OPTIN // max(1, memory))
    return each * facts.MULTIPROCESSORS


def _attributes(kernel: Kernel) -> tuple[int, ...]:
    """Return CUfunction_attribute 0…15; −1 for those without a value here."""
    info = kernel.info
    return (kernel.max_threads, info.static_shared, int(getattr(info, "const_bytes", 0)), info.local_bytes,
            info.num_regs, MAX_TARGET, MAX_TARGET, 0, kernel.max_dynamic_shared, -1, 0, 0, 0, 0, 0, 0)


def _check_launch_attributes(name: str, raw: bytes) -> None:
    if len(raw) % _LAUNCH_ATTRIBUTE_SIZE:
        raise DeviceError(f"{name}: launch attributes of {len(raw)} bytes", INVALID_VALUE)
    for at in range(0, len(raw), _LAUNCH_ATTRIBUTE_SIZE):
        kind = int.from_bytes(raw[at:at + 4], "little")
        if kind in (_PROGRAMMATIC_EVENT, _COMPLETION_EVENT):
            raise DeviceError(f"{name}: launch attribute {kind} (an event) is not supported", NOT_SUPPORTED)
        if kind == _CLUSTER_DIMENSION:
            cluster = [int.from_bytes(raw[i:i + 4], "little") for i in range(at + 8, at + 20, 4)]
            if any(size > 1 for size in cluster):
                raise DeviceError(f"{name}: clusters need compute capability 9.0", INVALID_VALUE)
