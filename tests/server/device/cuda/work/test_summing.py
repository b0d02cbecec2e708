"""Checksums of long payloads by several threads: zlib's, however the bytes are shared out."""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from tests.support.pools.pool import ROOT

NATIVE = ROOT / "rgpu/server/device/cuda/native"
SHIM = ROOT / "rgpu/client/shim/core"
SIZES = (0, 1, 4095, 524287, 524288, 524289, 600_000, 1 << 20, (1 << 20) + 13, 3 << 20, (5 << 20) + 1)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("summing")
    (folder / "abi.cpp").write_text('''#include "summing.hpp"
extern "C" uint32_t joined(uint32_t a, uint32_t b, uint64_t size) { return rgpu::crc32_joined(a, b, size); }
extern "C" uint32_t summed(uint32_t crc, const void *data, uint64_t size) { return rgpu::crc32_long(crc, data, size); }
''')
    target = folder / "summing.so"
    subprocess.run(["c++", "-std=c++20", "-O2", "-shared", "-fPIC", f"-I{NATIVE / 'host'}", f"-I{SHIM}",
                    str(folder / "abi.cpp"), str(NATIVE / "host" / "summing.cpp"), str(SHIM / "crc32.cpp"),
                    str(SHIM / "helpers.cpp"), "-o", str(target), "-lpthread"], check=True)
    return target


@pytest.mark.parametrize("helpers", [0, 1, 3])
def test_sums_are_zlibs(library: Path, helpers: int) -> None:
    """In a process of its own: the number of helpers is asked for once."""
    subprocess.run([sys.executable, __file__, str(library)], check=True, timeout=60,
                   env={"RGPU_SUM_THREADS": str(helpers), "PYTHONPATH": str(ROOT)})


def main(path: str) -> None:
    library, chance = ctypes.CDLL(path), random.Random(3)
    library.joined.restype = library.summed.restype = ctypes.c_uint32
    library.joined.argtypes = ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint64
    library.summed.argtypes = ctypes.c_uint32, ctypes.c_char_p, ctypes.c_uint64
    first = chance.randbytes(1000)
    for size in SIZES:
        second = chance.randbytes(size)
        assert library.joined(zlib.crc32(first), zlib.crc32(second), size) == zlib.crc32(first + second), size
        for _ in range(20 if size > 500_000 else 2):
            assert library.summed(zlib.crc32(first), second, size) == zlib.crc32(first + second), size


if __name__ == "__main__":
    main(sys.argv[1])
