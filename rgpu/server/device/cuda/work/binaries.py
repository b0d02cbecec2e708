"""The variables that a module binary defines, and what its kernels may do: read from the binary, before it is loaded.
Pure.

The driver has no call that lists a module's variables, and does not report
where a section was placed. Both follow from the ELF symbol table of the cubin that
will run: a variable is an object symbol, defined in one of the sections of
memory that lives as long as the module (``.nv.global``, ``.nv.global.init``,
``.nv.constant3``; *not* ``.nv.shared.*``, and not the undefined
``.nv.reservedSmem.*`` that every cubin for sm_90 and later names). Symbols of
one section keep their distance, so one address that the driver reports gives all
others of the section (:func:`place`).

Source: System V ABI, "Symbol Table"; section names as ``cuobjdump`` and
``readelf`` show them for cubins of CUDA 13.0. Module binaries are the program's:
every offset is checked.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntFlag

from rgpu.server.device.cpu import fatbin

_VARIABLE = re.compile(
    r"^\s*(?:\.(?:visible|weak|common)\s+)*\.(?:global|const)\b[^;={]*?([\w$]+)\s*(?:\[[^\]]*\]\s*)*(?:=|;)",
    re.MULTILINE)
_MALLOC = re.compile(rb"\.extern\s+\.func\s*\([^)]*\)\s*malloc\b")
_FATBIN = struct.pack("<I", fatbin.MAGIC)
_ELF = b"\x7fELF"
_SYMTAB, _OBJECT, _FUNCTION, _UNDEFINED, _RESERVED = 2, 1, 2, 0, 0xFF00
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")


class Trait(IntFlag):
    """Actions of kernels that a session has to allow for; the engine has the same numbers."""

    PRINTS = 1  #: call ``printf``
    ALLOCATES = 2  #: call ``malloc``, whose heap belongs to the driver


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable. ``section`` 0: unknown (PTX). ``offset``: bytes from the section's start; ``size`` 0: unknown."""

    name: str
    section: int = 0
    offset: int = 0
    size: int = 0


def is_cubin(code: bytes) -> bool:
    """Tell whether a module binary is machine code (ELF)."""
    return code[:4] == _ELF


def is_ptx(code: bytes) -> bool:
    """Tell whether a module binary is PTX text."""
    return not is_cubin(code) and b".version" in code[:65536]


def traits(code: bytes) -> Trait:
    """Return what kernels of a cubin or a PTX text may do, by the functions of the device's runtime that they name.

    Code that is not understood is taken to print, which costs a check at each launch, and not to allocate, which would
    forbid a move.
    """
    found = Trait.PRINTS if not code or b"vprintf" in code else Trait(0)
    allocates = _calls(code, "malloc") if is_cubin(code) else bool(_MALLOC.search(code))
    return found | Trait.ALLOCATES if allocates else found


def variables(code: bytes) -> list[Variable]:
    """Return the variables of a cubin or a PTX text (names only); empty for anything else."""
    if is_cubin(code):
        return _elf_variables(code)
    names = set(_VARIABLE.findall(bytes(code).rstrip(b"\0").decode(errors="replace")))
    return [Variable(name) for name in sorted(names)]


def chosen(binary: bytes, capability: tuple[int, int]) -> bytes:
    """Return the cubin or PTX text that the driver takes from a fat binary; other module binaries as they are.

    Machine code of the same major and no higher minor is preferred over PTX, as in the CUDA programming guide,
    "Application Compatibility".
    """
    if binary[:4] != _FATBIN:
        return binary
    target = capability[0] * 10 + capability[1]
    found = fatbin.entries(binary)
    cubins = [e for e in found if e.kind == fatbin.KIND_ELF and e.target // 10 == capability[0] and e.target <= target]
    texts = [e for e in found if e.kind == fatbin.KIND_PTX and e.target <= target]
    best = max(cubins or texts, key=lambda entry: entry.target, default=None)
    return fatbin.decompress(best) if best is not None else b""


def _elf_variables(binary: bytes) -> list[Variable]:
    sections = _sections(binary)
    if not sections:
        return []
    names = _section_names(binary, sections)
    durable = {index for index, name in enumerate(names)
               if name in (".nv.global", ".nv.global.init", ".nv.constant3") or name.startswith(".nv.global.")}
    found = []
    for strings, name, info, where, offset, size in _symbols(binary, sections):
        if info & 15 != _OBJECT or not _UNDEFINED < where < _RESERVED or where not in durable or not size:
            continue
        text = _text(strings, name)
        if text and not text.startswith("$"):  # $str and the like: constants of the compiler
            found.append(Variable(text, where, offset, size))
    return found


def _calls(binary: bytes, function: str) -> bool:
    """Whether a cubin calls a function of the device's runtime, which it names and does not define."""
    return any(info & 15 == _FUNCTION and where == _UNDEFINED and _text(strings, name) == function
               for strings, name, info, where, _, _ in _symbols(binary, _sections(binary)))


def _symbols(binary: bytes, sections: list[tuple[int, ...]]) -> Iterator[tuple[bytes, int, int, int, int, int]]:
    """Yield for each symbol: table of names, place of its name there, kind, section, offset in that, bytes."""
    for section in sections:
        kind, start, length, link = section[1], section[4], section[5], section[6]
        if kind != _SYMTAB or link >= len(sections):
            continue
        strings = _bytes(binary, sections[link])
        for at in range(start, min(start + length, len(binary) - _SYMBOL.size + 1), _SYMBOL.size):
            name, info, _, where, offset, size = _SYMBOL.unpack_from(binary, at)
            yield strings, name, info, where, offset, size


def _sections(binary: bytes) -> list[tuple[int, ...]]:
    """Return the section headers; empty where the file is cut short. More than 65,279 are counted in the first one."""
    if len(binary) < 64:
        return []
    (table,) = struct.unpack_from("<Q", binary, 40)
    entry, number = struct.unpack_from("<HH", binary, 58)
    if entry != _SECTION.size or table + entry > len(binary):
        return []
    if number == 0:
        number = _SECTION.unpack_from(binary, table)[5]
    if number > (len(binary) - table) // entry:
        return []
    return [_SECTION.unpack_from(binary, table + index * entry) for index in range(number)]


def _section_names(binary: bytes, sections: list[tuple[int, ...]]) -> list[str]:
    (index,) = struct.unpack_from("<H", binary, 62)
    if index == 0xFFFF:
        index = sections[0][6]
    if index >= len(sections):
        return []
    strings = _bytes(binary, sections[index])
    return [_text(strings, section[0]) for section in sections]


def _bytes(binary: bytes, section: tuple[int, ...]) -> bytes:
    return binary[section[4]:section[4] + section[5]]


def _text(strings: bytes, at: int) -> str:
    end = strings.find(b"\0", at)
    return strings[at:end].decode(errors="replace") if 0 <= at < len(strings) and end >= 0 else ""


def place(wanted: Iterable[Variable], told: Mapping[str, tuple[int, int]]) -> tuple[dict[Variable, int], list[str]]:
    """Return the addresses of all variables, computed from those that the driver reported (name → address, size).

    The result is ({variable: address}, names that stay unknown). A section's base is used
    only where all its reported symbols agree on it; a name that occurs twice
    (static variables of several units) is placed by its section, never by name.
    """
    wanted = list(wanted)
    count: dict[str, int] = {}
    for variable in wanted:
        count[variable.name] = count.get(variable.name, 0) + 1
    bases: dict[int, set[int]] = {}
    for variable in wanted:
        if variable.section and count[variable.name] == 1 and variable.name in told:
            bases.setdefault(variable.section, set()).add(told[variable.name][0] - variable.offset)
    placed: dict[Variable, int] = {}
    unknown: list[str] = []
    for variable in wanted:
        base = bases.get(variable.section, set())
        if count[variable.name] == 1 and variable.name in told:
            placed[variable] = told[variable.name][0]
        elif len(base) == 1:
            placed[variable] = next(iter(base)) + variable.offset
        else:
            unknown.append(variable.name)
    return placed, unknown
