"""The files in which the client's driver library keeps what NVRTC compiled, as `rgpu doctor` checks them.

The library writes and reads them itself (``shim/handshake/compile_cache.cpp``); the table of offsets is in
docs/developers/shim.md.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

MAGIC, VERSION = b"RGPUNVC1", 1
MOST_FILE = 256 << 20  #: bytes; a larger one is never read
_HEADER = struct.Struct("<8sIIQQ")  #: magic, version, CRC-32 of all from offset 16 on, bytes of the key, of the result
_COVERED = 16


@dataclass(slots=True)
class Survey:
    """Result of a check. ``files``: number of valid files. ``size``: bytes of all. ``damaged``: by path, the damage."""

    files: int = 0
    size: int = 0
    damaged: dict[Path, str] = field(default_factory=dict)


def folder(environment: Mapping[str, str]) -> Path | None:
    """Return the folder of the files for a program of that environment; None where the cache is off."""
    if environment.get("CUDA_CACHE_DISABLE", "0") not in ("", "0"):
        return None
    if path := environment.get("CUDA_CACHE_PATH"):
        return Path(path) / "rgpu-nvrtc"
    home = environment.get("HOME")
    return Path(home) / ".nv" / "ComputeCache" / "rgpu-nvrtc" if home else None


def survey(where: Path) -> Survey:
    """Read and check every file in the folder ``where``. Raises OSError where the folder cannot be read."""
    found = Survey()
    for path in sorted(where.iterdir()):
        if path.is_symlink() or not path.is_file():
            continue
        try:
            size = path.stat().st_size
            problem = f"{size} bytes, more than {MOST_FILE}" if size > MOST_FILE else damage(path.read_bytes())
        except FileNotFoundError:  # the oldest are deleted while others are written
            continue
        found.size += size
        if problem:
            found.damaged[path] = problem
        else:
            found.files += 1
    return found


def damage(data: bytes) -> str:
    """Say what is wrong with a file's bytes; "" for a whole one."""
    if len(data) < _HEADER.size:
        return f"{len(data)} bytes, fewer than its header"
    magic, version, crc, key, result = _HEADER.unpack_from(data)
    if magic != MAGIC:
        return "its magic is another one's"
    if version != VERSION:
        return f"version {version}, not {VERSION}"
    if key + result != len(data) - _HEADER.size:
        return f"{len(data) - _HEADER.size} bytes of key and result, {key + result} by its header"
    return "" if zlib.crc32(data[_COVERED:]) == crc else "its checksum is another one"
