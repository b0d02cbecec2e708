"""What NVRTC compiled is kept on disk: the table by itself, and NVRTC that asks it."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from zlib import crc32

import pytest

from rgpu.client.run import compile_cache
from tests.client.shim.handshake.conftest import Stage

HEADER = struct.Struct("<8sIIQQ")
COVERED = 16  #: where the bytes begin that the checksum covers

TABLE = r"""
import ctypes as c, sys
d = c.CDLL("libcuda.so.1")
words = c.POINTER(c.c_void_p)()
assert d.cuGetExportTable(c.byref(words), bytes.fromhex("da9151d33ae6cc41a5c04f26d533e328")) == 0
P, B, I, U = c.c_void_p, c.c_char_p, c.c_int, c.c_uint
def slot(index, *kinds): return c.CFUNCTYPE(I, *kinds)(words[index])
make, end, find = slot(1, c.POINTER(P), I, B, U, B, B, B, I, I), slot(2, P), slot(3, P, I, c.POINTER(P), c.POINTER(U))
keep, end_data = slot(4, P, I, B, U), slot(6, P)
def key(source=b"source\0more", options=b"-arch=sm_90", kind=2, version=b"Aug 20", a=0, b=1):
    made = P()
    return made if make(c.byref(made), kind, source, len(source), options, b"HOST64", version, a, b) == 0 else None
def found(k):
    data, size = P(), U()
    if find(k, 0, c.byref(data), c.byref(size)): return None
    bytes_ = c.string_at(data, size.value)
    assert end_data(data) == 0
    return bytes_
"""

COMPILES = r"""
import sys
from cuda.bindings import nvrtc
def check(result):
    assert int(result[0]) == 0, result
    return result[1] if len(result) == 2 else None
program = check(nvrtc.nvrtcCreateProgram(b'extern "C" __global__ void k(float* p) { *p = 2.5f; }', b"k.cu", 0, [], []))
check(nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=compute_75"]))
text = b" " * check(nvrtc.nvrtcGetPTXSize(program))
check(nvrtc.nvrtcGetPTX(program, text))
print("changed by the test" if b"// CHANGED" in text else "as compiled")
"""


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "rgpu-nvrtc").glob("*")) if folder.exists() else []


def test_the_table_by_itself(stage: Stage, tmp_path: Path) -> None:
    stage.run(TABLE + r"""
k = key()
assert words[0] == 56 and found(k) is None
assert keep(k, 0, b"machine\0code", 12) == 0 and found(k) == b"machine\0code"
for other in (dict(source=b"source\0mora"), dict(options=b""), dict(kind=1), dict(version=b"Aug 21"), dict(a=1),
              dict(b=2), dict(source=b"source\0mor", options=b"e-arch=sm_90")):
    assert found(key(**other)) is None, other
assert found(key()) == b"machine\0code" and end(k) == 0
assert find(None, 0, None, None) and keep(None, 0, b"x", 1) and make(None, 1, b"x", 1, b"", b"", b"", 0, 0)
""", CUDA_CACHE_PATH=str(tmp_path))
    (file,) = kept(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    whole = file.read_bytes()
    magic, version, crc, key, data = HEADER.unpack_from(whole)
    assert (magic, version, data) == (b"RGPUNVC1", 1, 12) and crc == crc32(whole[COVERED:])
    assert compile_cache.survey(file.parent) == compile_cache.Survey(1, len(whole), {})
    for broken in (whole[:-1], whole + b"x", whole[:40] + b"?" + whole[41:], whole[:8] + b"\2" + whole[9:], b"",
                   HEADER.pack(magic, version, crc, 1 << 60, data) + whole[32:]):
        file.write_bytes(broken)
        looked = compile_cache.survey(file.parent)
        assert looked.files == 0 and looked.size == len(broken) and looked.damaged[file], "what the library rejects"
        stage.run(TABLE + "assert found(key()) is None", CUDA_CACHE_PATH=str(tmp_path))
    file.unlink()
    file.symlink_to("/etc/passwd")
    stage.run(TABLE + "assert found(key()) is None", CUDA_CACHE_PATH=str(tmp_path))


def test_it_is_bounded_and_can_be_switched_off(stage: Stage, tmp_path: Path) -> None:
    stage.run(TABLE + r"""
for number in range(20):
    assert keep(key(source=b"%d" % number), 0, bytes(10000), 10000) == 0
assert found(key(source=b"19")) == bytes(10000), "the newest is there"
assert keep(key(source=b"large"), 0, bytes(70000), 70000) != 0
""", CUDA_CACHE_PATH=str(tmp_path), CUDA_CACHE_MAXSIZE="65536")
    assert sum(file.stat().st_size for file in kept(tmp_path)) <= 65536
    nowhere = tmp_path / "nowhere"
    stage.run(TABLE + "assert key() is None", CUDA_CACHE_PATH=str(nowhere), CUDA_CACHE_DISABLE="1")
    stage.run(TABLE + "assert key() is None", CUDA_CACHE_PATH=None, HOME=None)
    assert not nowhere.exists()


def test_a_folder_that_cannot_be_written_is_no_cache(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    stage.run(TABLE + 'k = key(); assert keep(k, 0, b"x", 1) != 0 and found(k) is None',
              CUDA_CACHE_PATH=str(tmp_path / "file"))


def test_nvrtc_takes_what_is_kept(stage: Stage, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    environment = {"CUDA_CACHE_PATH": str(tmp_path), "LD_PRELOAD": str(stage.shim / "libcuda.so.1")}
    assert stage.run(COMPILES, **environment).out == "as compiled\n"
    (file,) = kept(tmp_path)
    whole = bytearray(file.read_bytes())
    at = whole.index(b"// Compiler Build ID")
    whole[at:at + 10] = b"// CHANGED"
    file.write_bytes(bytes(whole))
    assert stage.run(COMPILES, **environment).out == "as compiled\n", "damaged: compiled anew"
    assert file.read_bytes().count(b"// CHANGED") == 0, "and kept again"
    whole[12:16] = crc32(whole[COVERED:]).to_bytes(4, "little")
    file.write_bytes(bytes(whole))
    os.utime(file, (1, 1))
    assert stage.run(COMPILES, **environment).out == "changed by the test\n"
    assert file.stat().st_mtime > 1, "the oldest by use go first"
    assert stage.run(COMPILES, **environment, CUDA_CACHE_DISABLE="1").out == "as compiled\n"
