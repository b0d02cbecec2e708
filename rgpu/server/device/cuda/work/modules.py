"""Modules and libraries on the GPU: load, and learn everything that a client may ask about them.

A module binary goes to the driver as it came (cubin, fat binary, PTX), with the
program's JIT options; where the program used a library it is loaded as one. Its
variables come from the module binary (:mod:`.binaries`), their addresses from the driver
or, for those that the driver does not name, from their section. A variable
whose address cannot be found pins the session (SEMANTICS 12): ``Module.pins``.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass, field
from typing import Any

from cuda.bindings import driver

from rgpu.server.device.cuda.errors import STICKY, check
from rgpu.server.device.cuda.work import binaries
from rgpu.session.errors import DeviceError
from rgpu.session.objects.module_table import FunctionInfo, GlobalVariable, ModuleTable

FUNCTION_ATTRIBUTES = 16
LOG_BYTES = 16384
CUDA_ERROR_INVALID_VALUE = 1
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
    prints: bool = False  #: some kernel of it may print
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


def load(binary: bytes, options: bytes, library: bool, capability: tuple[int, int]) -> tuple[Module, str]:
    """Load a module binary into the current context. Raises :class:`DeviceError` with the JIT's log."""
    jit = _Jit(options)
    libcuda = ctypes.CDLL("libcuda.so.1")
    handle, owner = ctypes.c_void_p(), ctypes.c_void_p()
    code = ctypes.create_string_buffer(binary, len(binary) + 1)  # PTX text ends with a NUL
    if library:
        result = libcuda.cuLibraryLoadData(ctypes.byref(owner), code, jit.names, jit.values, jit.count, None, None, 0)
        if result == 0:
            result = libcuda.cuLibraryGetModule(ctypes.byref(handle), owner)
    else:
        result = libcuda.cuModuleLoadDataEx(ctypes.byref(handle), code, jit.count, jit.names, jit.values)
    if result:
        raise jit.failure(result)
    module = driver.CUmodule(handle.value)
    made = Module(module, [], ModuleTable((), ()), [], driver.CUlibrary(owner.value) if library else None)
    try:
        part = binaries.chosen(binary, capability)
        made.prints = binaries.prints(part)
        _describe(made, part)
    except DeviceError:
        unload(made)
        raise
    return made, jit.log


def unload(module: Module) -> None:
    """End the module. Raises :class:`DeviceError`."""
    if module.library is not None:
        check(driver.cuLibraryUnload(module.library), "cuLibraryUnload")
    else:
        check(driver.cuModuleUnload(module.handle), "cuModuleUnload")


def _describe(module: Module, code: bytes) -> None:
    count = check(driver.cuModuleGetFunctionCount(module.handle), "cuModuleGetFunctionCount")
    if count:
        module.functions = list(check(driver.cuModuleEnumerateFunctions(count, module.handle),
                                      "cuModuleEnumerateFunctions"))
    infos = tuple(_function(function) for function in module.functions)
    variables, unknown = _variables(module.handle, code)
    module.layouts = [info.parameters for info in infos]
    module.table = ModuleTable(infos, tuple(sorted(variables, key=lambda each: (each.name, each.address))))
    module.pins = [f"variable {name} of a loaded module cannot be found in device memory" for name in sorted(unknown)]


def _variables(handle: Any, code: bytes) -> tuple[list[GlobalVariable], list[str]]:
    """The module's variables, and the names of those that cannot be found."""
    wanted = binaries.variables(code)
    told = _told(handle, {variable.name for variable in wanted})
    if not binaries.is_cubin(code) and any(variable.name not in told for variable in wanted):
        # PTX does not say where a variable goes, nor which ones the compiler drops: the cubin does.
        wanted = binaries.variables(_compiled(code))
        told = _told(handle, {variable.name for variable in wanted})
    placed, unknown = binaries.place(wanted, told)
    return [GlobalVariable(variable.name, address, variable.size or told[variable.name][1])
            for variable, address in placed.items()], unknown


def _compiled(text: bytes) -> bytes:
    """The cubin that the driver's compiler makes of PTX text. Raises :class:`DeviceError`."""
    state = check(driver.cuLinkCreate(0, [], []), "cuLinkCreate")
    try:
        kind = driver.CUjitInputType.CU_JIT_INPUT_PTX
        text = text.rstrip(b"\0") + b"\0"
        check(driver.cuLinkAddData(state, kind, text, len(text), b"module.ptx", 0, [], []), "cuLinkAddData")
        pointer, size = check(driver.cuLinkComplete(state), "cuLinkComplete")
        return ctypes.string_at(int(pointer), int(size))
    finally:
        driver.cuLinkDestroy(state)


def _told(handle: Any, names: set[str]) -> dict[str, tuple[int, int]]:
    """Where the driver says variables are; those that it does not name (local, removed) are left out."""
    told = {}
    for name in sorted(names):
        error, address, size = driver.cuModuleGetGlobal(handle, name.encode())
        if int(error) in STICKY:
            raise DeviceError(f"cuModuleGetGlobal({name}): {driver.CUresult(int(error)).name}", int(error))
        if int(error) == 0 and int(size):
            told[name] = (int(address), int(size))
    return told


def _function(function: Any) -> FunctionInfo:
    name = check(driver.cuFuncGetName(function), "cuFuncGetName")
    parameters: list[tuple[int, int]] = []
    while True:
        error, *values = driver.cuFuncGetParamInfo(function, len(parameters))
        if int(error):
            break
        parameters.append((int(values[0]), int(values[1])))
    return FunctionInfo(name.decode() if isinstance(name, bytes) else str(name), tuple(parameters),
                        attributes(function))


def attributes(function: Any) -> tuple[int, ...]:
    """CUfunction_attribute 0…15. −1: the driver says so only once the function is loaded (cuFuncLoad)."""
    values = []
    for number in range(FUNCTION_ATTRIBUTES):
        error, value = driver.cuFuncGetAttribute(driver.CUfunction_attribute(number), function)
        values.append(int(value) if int(error) == 0 else -1)
    return tuple(values)
