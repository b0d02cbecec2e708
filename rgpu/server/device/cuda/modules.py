"""Modules on the GPU: load, and learn everything that a client may ask about them.

The names of a module's variables come from the image itself (PTX text or the
ELF symbol table of a cubin): the driver has no call that lists them.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver

from rgpu.server.device.cpu import fatbin
from rgpu.server.device.cuda.errors import check
from rgpu.session.errors import DeviceError
from rgpu.session.module_table import FunctionInfo, GlobalVariable, ModuleTable

_VARIABLE = re.compile(
    r"^\s*(?:\.(?:visible|weak|common)\s+)*\.(?:global|const)\b[^;={]*?([\w$]+)\s*(?:\[[^\]]*\]\s*)*(?:=|;)",
    re.MULTILINE)
FUNCTION_ATTRIBUTES = 16
CUDA_ERROR_NOT_FOUND = 500


@dataclass
class Module:
    handle: Any
    functions: list[Any]
    table: ModuleTable
    layouts: list[tuple[tuple[int, int], ...]]


def load(image: bytes) -> tuple[Module, str]:
    """Load an image into the current context. Raises :class:`DeviceError` with the JIT's log."""
    size = 16384
    error_log, info_log = bytearray(size), bytearray(size)
    option = driver.CUjit_option
    options = [option.CU_JIT_ERROR_LOG_BUFFER, option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
               option.CU_JIT_INFO_LOG_BUFFER, option.CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES]
    if not image.endswith(b"\0"):
        image += b"\0"
    error, handle = driver.cuModuleLoadDataEx(image, len(options), options, [error_log, size, info_log, size])
    if int(error):
        text = bytes(error_log).split(b"\0", 1)[0].decode(errors="replace")
        raise DeviceError(text or driver.CUresult(int(error)).name, int(error))
    count = check(driver.cuModuleGetFunctionCount(handle), "cuModuleGetFunctionCount")
    functions = check(driver.cuModuleEnumerateFunctions(count, handle), "cuModuleEnumerateFunctions") if count else []
    infos = tuple(_function(function) for function in functions)
    variables = tuple(_variables(handle, image))
    module = Module(handle, list(functions), ModuleTable(infos, variables), [info.parameters for info in infos])
    return module, bytes(info_log).split(b"\0", 1)[0].decode(errors="replace")


def _function(function: Any) -> FunctionInfo:
    name = check(driver.cuFuncGetName(function), "cuFuncGetName")
    parameters: list[tuple[int, int]] = []
    while True:
        error, *values = driver.cuFuncGetParamInfo(function, len(parameters))
        if int(error):
            break
        parameters.append((int(values[0]), int(values[1])))
    attributes = []
    for number in range(FUNCTION_ATTRIBUTES):
        error, value = driver.cuFuncGetAttribute(driver.CUfunction_attribute(number), function)
        attributes.append(int(value) if int(error) == 0 else -1)
    return FunctionInfo(name.decode() if isinstance(name, bytes) else str(name), tuple(parameters), tuple(attributes))


def _variables(handle: Any, image: bytes) -> list[GlobalVariable]:
    found = []
    for name in sorted(variable_names(image)):
        error, address, size = driver.cuModuleGetGlobal(handle, name.encode())
        if int(error) == 0 and int(size):
            found.append(GlobalVariable(name, int(address), int(size)))
        elif int(error) not in (0, CUDA_ERROR_NOT_FOUND):
            raise DeviceError(f"cuModuleGetGlobal({name}): {driver.CUresult(int(error)).name}", int(error))
    return found


def variable_names(image: bytes) -> set[str]:
    """Names of the variables that a PTX text or a cubin defines; empty for what is neither."""
    if image[:4] == b"\x7fELF":
        return _elf_objects(image)
    if image[:4] == struct.pack("<I", 0xBA55ED50):
        return _fatbin_variables(image)
    return set(_VARIABLE.findall(image.rstrip(b"\0").decode(errors="replace")))


def _fatbin_variables(image: bytes) -> set[str]:
    names: set[str] = set()
    for entry in fatbin.entries(image):
        names |= variable_names(fatbin.decompress(entry))
    return names


def _elf_objects(image: bytes) -> set[str]:
    """STT_OBJECT symbols of an ELF64 file (System V ABI, "Symbol Table"); bounds are checked."""
    if len(image) < 64:
        return set()
    (section_offset,) = struct.unpack_from("<Q", image, 40)
    entry_size, number = struct.unpack_from("<HH", image, 58)
    sections = []
    for index in range(number):
        at = section_offset + index * entry_size
        if at + 64 > len(image):
            return set()
        sections.append(struct.unpack_from("<IIQQQQIIQQ", image, at))
    names: set[str] = set()
    for section in sections:
        if section[1] != 2 or section[6] >= len(sections):  # SHT_SYMTAB and its string table
            continue
        start, length, strings = section[4], section[5], sections[section[6]]
        text = image[strings[4]:strings[4] + strings[5]]
        for at in range(start, min(start + length, len(image) - 23), 24):
            name, info, _, _, _, _ = struct.unpack_from("<IBBHQQ", image, at)
            if info & 15 == 1 and name < len(text):
                names.add(text[name:text.index(b"\0", name)].decode(errors="replace"))
    return names - {""}
