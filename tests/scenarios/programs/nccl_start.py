"""What programs of several ranks begin with: NCCL, checked calls of it, and a unique id that goes through a file."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

nccl = ctypes.CDLL("libnccl.so.2")
nccl.ncclGetErrorString.restype = nccl.ncclGetLastError.restype = ctypes.c_char_p


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


def ok(result: int) -> None:
    """End the program where a call failed."""
    if result:
        raise SystemExit(f"NCCL: {nccl.ncclGetErrorString(result).decode()}: {nccl.ncclGetLastError(None).decode()}")


def unique_id(path: Path, rank: int) -> UniqueId:
    """Write it, as rank 0, or wait for it."""
    unique = UniqueId()
    if not rank:
        ok(nccl.ncclGetUniqueId(ctypes.byref(unique)))
        path.with_suffix(".part").write_bytes(bytes(unique.internal))
        path.with_suffix(".part").rename(path)
    while not path.exists():
        time.sleep(0.02)
    return UniqueId.from_buffer_copy(path.read_bytes())
