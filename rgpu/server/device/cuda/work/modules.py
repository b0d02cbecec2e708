"""Modules and libraries on the GPU: loads them, and reads everything that a client may query.

A module binary is passed to the driver unchanged (cubin, fat binary, PTX), with the
program's JIT options; where the program used a library it is loaded as one. Its
variables are read from the module binary (:mod:`.binaries`), their addresses from the driver
or, for those that the driver does not name, from their section. A variable
whose address cannot be found pins the session (SEMANTICS 12): ``Module.pins``.

The description that a load makes is kept for the next load of the same binary (:mod:`.described`).
Machine code that PTX was compiled to is kept, too, and loaded in its place where
it gives the same kernels and variables in the same places; the order of the table
stays that of the first load, by which journals name kernels.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog
from blake3 import blake3
from cuda.bindings import driver

from rgpu.server import derived_format
from rgpu.server.derived import Derived
from rgpu.server.device.cuda.errors import STICKY, check
from rgpu.server.device.cuda.work import binaries, described
from rgpu.server.device.cuda.work.binaries import Trait, Variable
from rgpu.server.device.cuda.work.described import Description
from rgpu.server.device.loads import LoadNotes
from rgpu.session.errors import DeviceError
from rgpu.session.objects.module_table import FunctionInfo, GlobalVariable, ModuleTable

log = structlog.get_logger(__name__)

FUNCTION_ATTRIBUTES = 16
LOG_BYTES = 16384
CUDA_ERROR_INVALID_VALUE = 1
QUICK = 0.02  #: s; code that the driver compiles faster is not worth keeping
_OPTION = struct.Struct("<iq")
_ERROR_LOG, _ERROR_SIZE, _INFO_LOG, _INFO_SIZE = (
    int(option) for option in (
        driver.CUjit_option.CU_JIT_ERROR_LOG_BUFFER, driver.CUjit_option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        driver.CUjit_option.CU_JIT_INFO_LOG_BUFFER, driver.CUjit_option.CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES))


@dataclass
class Module:
    """A loaded module binary. ``library``: its CUlibrary where it was loaded as one, else None."""

    handle: Any
    functions: list[Any]
    table: ModuleTable
    layouts: list[tuple[tuple[int, int], ...]]
    library: Any = None
    traits: Trait = Trait(0)  #: what its kernels may do
    pins: list[str] = field(default_factory=list)


class _Jit:
    """The program's JIT options and two log buffers, as arrays for the driver."""

    def __init__(self, options: bytes) -> None:
        if len(options) % _OPTION.size:
            raise DeviceError(f"JIT options of {len(options)} bytes", CUDA_ERROR_INVALID_VALUE)
        self.error, self.info = (ctypes.create_string_buffer(LOG_BYTES) for _ in range(2))
        pairs = [(option, value) for option, value in _OPTION.iter_unpack(options)
                 if option not in (_ERROR_LOG, _ERROR_SIZE, _INFO_LOG, _INFO_SIZE)]
        pairs += [(_ERROR_LOG, ctypes.addressof(self.error)), (_ERROR_SIZE, LOG_BYTES),
                  (_INFO_LOG, ctypes.addressof(self.info)), (_INFO_SIZE, LOG_BYTES)]
        self.count = len(pairs)
        self.names = (ctypes.c_int * self.count)(*(option for option, _ in pairs))
        self.values = (ctypes.c_void_p * self.count)(*(value & (1 << 64) - 1 for _, value in pairs))

    def failure(self, result: int) -> DeviceError:
        text = self.error.value.decode(errors="replace")
        return DeviceError(text or f"the module binary does not load: {driver.CUresult(result).name}", result)

    @property
    def log(self) -> str:
        return self.info.value.decode(errors="replace")


@dataclass(frozen=True)
class Loader:
    """Loads module binaries for one session. ``driver_version``: as cuDriverGetVersion. ``notes`` get the stages."""

    capability: tuple[int, int]
    driver_version: int
    kept: Derived
    notes: LoadNotes

    def load(self, binary: bytes, options: bytes, library: bool) -> tuple[Module, str]:
        """Load a module binary into the current context. Raises :class:`DeviceError` with the JIT's log."""
        with self.notes.stage("describe"):
            key = self._key(binary, options) if self.kept.keeps else b""
            known = described.decode_or_none(self.kept.get(derived_format.DESCRIPTION, key)) if key else None
        if known is not None and known.compiles:
            found = self._load_compiled(key, binary, options, library, known)
            if found is not None:
                return found
        began = time.monotonic()
        with self.notes.stage("load"):
            made, text = _load(binary, options, library)
        seconds = time.monotonic() - began
        try:
            if known is not None and self._describe_as(made, known):
                return made, text
            self._describe(made, binary, options, key, seconds > QUICK)
        except DeviceError:
            unload(made)
            raise
        return made, text

    def _key(self, binary: bytes, options: bytes) -> bytes:
        """Return the key of everything that determines a module's description and machine code."""
        facts = struct.pack("<III", *self.capability, self.driver_version)
        loading = os.environ.get("CUDA_MODULE_LOADING", "").encode()  # lazy: attributes are known later
        return derived_format.key(b"module 2", self.notes.digest or blake3(binary).digest(), options, facts, loading)

    def _describe(self, made: Module, binary: bytes, options: bytes, key: bytes, slow: bool) -> None:
        """Describe a module from its binary and the driver, and keep the description."""
        with self.notes.stage("unpack"):
            part = binaries.chosen(binary, self.capability)
            made.traits = binaries.traits(part)
        cubins: list[bytes] = []

        def compile_it(text: bytes) -> bytes:
            with self.notes.stage("compile"):
                self.notes.compiled = False
                cubins.append(_linked(text, b"")[0])
            return cubins[0]

        with self.notes.stage("describe"):
            wanted = _describe(made, part, compile_it)
        if not key:
            return
        self.notes.described = False
        compiles = slow and binaries.is_ptx(part)
        if compiles and cubins and not options:  # it was compiled without options
            self.kept.keep(derived_format.COMPILED, key, described.encode_code(cubins[0], ""))
        self.kept.keep(derived_format.DESCRIPTION, key, described.encode(Description(
            made.table.functions, tuple(wanted), described.distances(made.table.globals), made.traits, compiles)))

    def _describe_as(self, made: Module, known: Description) -> bool:
        """Describe a module by a kept description; False where the driver gives other kernels now."""
        with self.notes.stage("describe"):
            functions = _functions(made.handle)
            if [_name(function) for function in functions] != [info.name for info in known.functions]:
                log.error("a kept description does not fit its module and is made anew", kernels=len(functions),
                          described=len(known.functions))
                return False
            told = _told(made.handle, {variable.name for variable in known.variables})
            if any(variable.name not in told and not variable.section for variable in known.variables):
                return False
            placed, unknown = binaries.place(known.variables, told)
            made.functions, made.traits = functions, known.traits
            _fill(made, known.functions, _globals(placed, told), unknown)
        self.notes.described = True
        return True

    # -- machine code in the place of PTX -------------------------------------------------
    def _load_compiled(self, key: bytes, binary: bytes, options: bytes, library: bool,
                       known: Description) -> tuple[Module, str] | None:
        """Load the PTX's machine code, compiling it first where none is kept; None: the PTX itself has to be loaded."""
        data = self.kept.get(derived_format.COMPILED, key)
        code = described.decode_code(data) if data is not None else None
        self.notes.compiled = code is not None
        try:
            if code is None:
                with self.notes.stage("unpack"):
                    text = binaries.chosen(binary, self.capability)
                with self.notes.stage("compile"):
                    code = _linked(text, options)
                self.kept.keep(derived_format.COMPILED, key, described.encode_code(*code))
            if not code[0]:  # it was tried, and gave another module
                self.notes.compiled = None
                return None
            with self.notes.stage("load"):
                made, _ = _load(code[0], options, library)
        except DeviceError as error:
            if error.result in STICKY:
                raise
            log.info("PTX is loaded as text", reason=error.message[:200])
            self.kept.keep(derived_format.COMPILED, key, described.encode_code(b"", ""))
            return None
        try:
            if self._same(made, code[0], known):
                return made, code[1]
        except DeviceError:
            unload(made)
            raise
        unload(made)
        log.info("PTX is loaded as text", reason="its machine code gives other kernels or variables")
        self.kept.keep(derived_format.COMPILED, key, described.encode_code(b"", ""))
        return None

    def _same(self, made: Module, cubin: bytes, known: Description) -> bool:
        """Describe compiled code in the order of the text's own load; False where it is not the same module."""
        with self.notes.stage("describe"):
            by_name = {_name(function): function for function in _functions(made.handle)}
            if len(by_name) != len(known.functions) or any(info.name not in by_name for info in known.functions):
                return False
            variables, unknown, _ = _variables(made.handle, cubin, None)
            if unknown or described.distances(variables) != known.distances:
                return False
            made.functions, made.traits = [by_name[info.name] for info in known.functions], known.traits
            _fill(made, known.functions, variables, [])
        self.notes.described = True
        return True


def _load(code: bytes, options: bytes, library: bool) -> tuple[Module, str]:
    """Load code by the driver; nothing is described yet. Raises :class:`DeviceError` with the JIT's log."""
    jit = _Jit(options)
    libcuda = ctypes.CDLL("libcuda.so.1")
    handle, owner = ctypes.c_void_p(), ctypes.c_void_p()
    ended = ctypes.create_string_buffer(code, len(code) + 1)  # PTX text ends with a NUL
    if library:
        result = libcuda.cuLibraryLoadData(ctypes.byref(owner), ended, jit.names, jit.values, jit.count, None, None, 0)
        if result == 0:
            result = libcuda.cuLibraryGetModule(ctypes.byref(handle), owner)
    else:
        result = libcuda.cuModuleLoadDataEx(ctypes.byref(handle), ended, jit.count, jit.names, jit.values)
    if result:
        raise jit.failure(result)
    return Module(driver.CUmodule(handle.value), [], ModuleTable((), ()), [],
                  driver.CUlibrary(owner.value) if library else None), jit.log


def unload(module: Module) -> None:
    """End a module. Raises :class:`DeviceError`."""
    if module.library is not None:
        check(driver.cuLibraryUnload(module.library), "cuLibraryUnload")
    else:
        check(driver.cuModuleUnload(module.handle), "cuModuleUnload")


def _functions(handle: Any) -> list[Any]:
    count = check(driver.cuModuleGetFunctionCount(handle), "cuModuleGetFunctionCount")
    if not count:
        return []
    return list(check(driver.cuModuleEnumerateFunctions(count, handle), "cuModuleEnumerateFunctions"))


def _describe(module: Module, code: bytes, compiled: Callable[[bytes], bytes]) -> list[Variable]:
    """Fill in everything from the driver; returns the variables that were looked for. ``compiled``: PTX to a cubin."""
    module.functions = _functions(module.handle)
    infos = tuple(_function(function) for function in module.functions)
    variables, unknown, wanted = _variables(module.handle, code, compiled)
    _fill(module, infos, variables, unknown)
    return wanted


def _fill(module: Module, infos: tuple[FunctionInfo, ...], variables: list[GlobalVariable],
          unknown: list[str]) -> None:
    module.layouts = [info.parameters for info in infos]
    module.table = ModuleTable(infos, tuple(sorted(variables, key=lambda each: (each.name, each.address))))
    module.pins = [f"variable {name} of a loaded module cannot be found in device memory" for name in sorted(unknown)]


def _variables(handle: Any, code: bytes, compiled: Callable[[bytes], bytes] | None
               ) -> tuple[list[GlobalVariable], list[str], list[Variable]]:
    """Return the module's variables, the names of those that cannot be found, and all that were looked for."""
    wanted = binaries.variables(code)
    told = _told(handle, {variable.name for variable in wanted})
    if compiled is not None and not binaries.is_cubin(code) and any(v.name not in told for v in wanted):
        # PTX has no addresses of variables, and does not show which ones the compiler drops: the cubin does.
        wanted = binaries.variables(compiled(code))
        told = _told(handle, {variable.name for variable in wanted})
    placed, unknown = binaries.place(wanted, told)
    return _globals(placed, told), unknown, wanted


def _globals(placed: dict[Variable, int], told: dict[str, tuple[int, int]]) -> list[GlobalVariable]:
    return [GlobalVariable(variable.name, address, variable.size or told[variable.name][1],
                           variable.name in told and _is_managed(address))
            for variable, address in placed.items()]


def _is_managed(address: int) -> bool:
    error, managed = driver.cuPointerGetAttribute(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED, address)
    return not error and bool(managed)


def _linked(text: bytes, options: bytes) -> tuple[bytes, str]:
    """Return the cubin that the driver's compiler makes of PTX text, and its log. Raises :class:`DeviceError`."""
    jit, libcuda = _Jit(options), ctypes.CDLL("libcuda.so.1")
    state, pointer, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
    result = libcuda.cuLinkCreate_v2(jit.count, jit.names, jit.values, ctypes.byref(state))
    if result:
        raise jit.failure(result)
    try:
        text = text.rstrip(b"\0") + b"\0"
        result = libcuda.cuLinkAddData_v2(state, int(driver.CUjitInputType.CU_JIT_INPUT_PTX), text,
                                          ctypes.c_size_t(len(text)), b"module.ptx", 0, None, None)
        result = result or libcuda.cuLinkComplete(state, ctypes.byref(pointer), ctypes.byref(size))
        if result:
            raise jit.failure(result)
        return ctypes.string_at(pointer.value or 0, size.value), jit.log
    finally:
        libcuda.cuLinkDestroy(state)


def link(inputs: Sequence[tuple[int, str, bytes]]) -> bytes:
    """Link binaries (CUjitInputType, name, data) to a module binary. The context is current.

    Raises :class:`DeviceError`.
    """
    state = check(driver.cuLinkCreate(0, [], []), "cuLinkCreate")
    try:
        for kind, name, data in inputs:
            number = driver.CUjitInputType(kind)
            check(driver.cuLinkAddData(state, number, data, len(data), name.encode(), 0, [], []),
                  f"cuLinkAddData({name})")
        pointer, size = check(driver.cuLinkComplete(state), "cuLinkComplete")
        return ctypes.string_at(int(pointer), int(size))
    finally:
        driver.cuLinkDestroy(state)


def _told(handle: Any, names: set[str]) -> dict[str, tuple[int, int]]:
    """Return the variables' addresses that the driver reports; it does not name local and removed variables."""
    told = {}
    for name in sorted(names):
        error, address, size = driver.cuModuleGetGlobal(handle, name.encode())
        if int(error) in STICKY:
            raise DeviceError(f"cuModuleGetGlobal({name}): {driver.CUresult(int(error)).name}", int(error))
        if int(error) == 0 and int(size):
            told[name] = (int(address), int(size))
    return told


def _function(function: Any) -> FunctionInfo:
    parameters: list[tuple[int, int]] = []
    while True:
        error, *values = driver.cuFuncGetParamInfo(function, len(parameters))
        if int(error):
            break
        parameters.append((int(values[0]), int(values[1])))
    return FunctionInfo(_name(function), tuple(parameters), attributes(function))


def _name(function: Any) -> str:
    name = check(driver.cuFuncGetName(function), "cuFuncGetName")
    return name.decode() if isinstance(name, bytes) else str(name)


def attributes(function: Any) -> tuple[int, ...]:
    """Return CUfunction_attribute 0…15; −1: the driver reports it only once the function is loaded (cuFuncLoad)."""
    values = []
    for number in range(FUNCTION_ATTRIBUTES):
        error, value = driver.cuFuncGetAttribute(driver.CUfunction_attribute(number), function)
        values.append(int(value) if int(error) == 0 else -1)
    return tuple(values)
