"""Fat binaries in Python: made, taken apart, and slimmed by the shim's own code."""

from __future__ import annotations

import ctypes as c
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SHIM = ROOT / "rgpu" / "client" / "shim"
ROOMS = [f"-I{room}" for room in SHIM.iterdir()]
MAGIC = 0xBA55ED50
PTX, ELF = 1, 2
ONLY_PTX, FORCE_PTX = 1, 2  #: flags of :meth:`Slimmer.slim`
_HEADER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")
_BITS = {"": 0x11, "a": 0x100011, "f": 0x200011}


@dataclass(frozen=True, slots=True)
class Part:
    """One entry. ``variant``: "", "a" or "f", as in sm_90a."""

    kind: int
    architecture: int
    variant: str = ""
    payload: bytes = b"code code code code "


def pack(parts: list[Part], header_size: int = 16) -> bytes:
    body = b""
    for part in parts:
        padded = part.payload + bytes(-len(part.payload) % 8)
        body += _ENTRY.pack(part.kind, 0x101, _ENTRY.size, len(padded), 0, 0, 0, 0, part.architecture, 0, 0,
                            _BITS[part.variant], 0, 0) + padded
    return _HEADER.pack(MAGIC, 1, header_size, len(body)) + bytes(header_size - 16) + body


def unpack(data: bytes) -> list[Part]:
    """Every byte must belong to the header or to an entry."""
    magic, version, at, size = _HEADER.unpack_from(data)
    assert (magic, version) == (MAGIC, 1) and at + size == len(data)
    found = []
    while at < len(data):
        kind, _, header, length, *_ = _ENTRY.unpack_from(data, at)
        architecture, flags = struct.unpack_from("<I", data, at + 28)[0], struct.unpack_from("<Q", data, at + 40)[0]
        variant = "a" if flags >> 20 & 1 else "f" if flags >> 21 & 1 else ""
        found.append(Part(kind, architecture, variant, data[at + header:at + header + length]))
        at += header + length
    assert at == len(data)
    return found


class Slimmer:
    """The shim's slim.cpp, compiled into ``folder``."""

    def __init__(self, folder: Path) -> None:
        library = folder / "slim.so"
        sources = [Path(__file__).with_name("slim_parts.cpp"), SHIM / "modules/slim.cpp", SHIM / "modules/fatbin.cpp"]
        subprocess.run(["c++", "-std=c++20", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", *ROOMS,
                        "-o", str(library), *map(str, sources)], check=True)
        self._slim = c.CDLL(str(library)).slim_image
        self._slim.restype = c.c_uint64
        self._slim.argtypes = [c.c_char_p, c.c_uint64, c.c_int, c.c_int, c.c_int, c.c_void_p]

    def slim(self, image: bytes, capability: tuple[int, int], flags: int = 0) -> bytes:
        """What is sent in place of ``image``."""
        out = c.create_string_buffer(len(image))
        size = self._slim(image, len(image), *capability, flags, out)
        assert 0 < size <= len(image)
        return out.raw[:size]
