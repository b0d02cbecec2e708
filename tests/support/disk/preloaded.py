"""A program's changes of files, as :mod:`.crashing_disk` replays them, recorded under libc (``recorder.cpp``)."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from pathlib import Path

from tests.support.building import ROOT
from tests.support.disk.crashing_disk import Operation
from tests.support.fake_driver import compiler

__all__ = ["compiler", "mark", "record"]

HERE = Path(__file__).parent
_HEAD = struct.Struct("<IIQII")
_KINDS = ("", "create", "write", "sync", "syncdir", "truncate", "rename", "link", "unlink", "mkdir", "mark")


def record(module: str, folder: Path) -> list[Operation]:
    """Run ``python -m module ROOT`` with an empty ROOT; what it did there, and its marks, in order."""
    library, log, root = folder / "librecord.so", folder / "log", folder / "root"
    root.mkdir()
    flags = ["-std=c++20", "-O1", "-g", "-fPIC", "-shared", "-Wall", "-Wextra"]
    built = subprocess.run([compiler() or "c++", *flags, str(HERE / "recorder.cpp"), "-o", str(library), "-ldl"],
                           capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    done = subprocess.run(
        [sys.executable, "-m", module, str(root)], cwd=ROOT, capture_output=True, text=True, timeout=60,
        env={**os.environ, "LD_PRELOAD": str(library), "RECORD_ROOT": str(root), "RECORD_LOG": str(log),
             "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"})
    assert done.returncode == 0, done.stderr
    return read_log(log.read_bytes(), root)


def mark(text: str) -> None:
    """In the recorded program: what was done so far must survive from here on."""
    function = ctypes.CDLL(None).record_mark
    function.argtypes, function.restype = (ctypes.c_char_p,), None
    function(text.encode())


def read_log(data: bytes, root: Path) -> list[Operation]:
    def name(text: bytes) -> str:
        return os.path.relpath(text.decode(), root)

    found, at = [], 0
    while at < len(data):
        kind, file, offset, path_length, length = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        path, rest = data[at:at + path_length], data[at + path_length:at + path_length + length]
        at += path_length + length
        what = _KINDS[kind]
        if what == "mark":
            found.append(Operation(what, path.decode()))
        elif what in ("rename", "link"):
            found.append(Operation(what, name(path), name(rest)))
        else:
            found.append(Operation(what, name(path) if path else "", data=rest, file=file, offset=offset))
    return found
