"""The address allocator and the checksum, without a session."""

from __future__ import annotations

import ctypes as c
import random
import subprocess
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
SHIM = ROOT / "rgpu" / "client" / "shim"
ROOMS = [f"-I{room}" for room in SHIM.iterdir()]
GRANULE = 2 << 20
BASE = 0x2000_0000_0000


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> c.CDLL:
    library = tmp_path_factory.mktemp("parts") / "parts.so"
    subprocess.run(["c++", "-std=c++20", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", *ROOMS, "-o", str(library),
                    str(Path(__file__).with_name("parts.cpp")), str(SHIM / "memory/allocator.cpp"),
                    str(SHIM / "core/crc32.cpp")],
                   check=True)
    loaded = c.CDLL(str(library))
    u64, pointer = c.c_uint64, c.c_void_p
    for name, result, arguments in (
            ("allocator_new", pointer, [u64] * 4), ("allocator_delete", None, [pointer]),
            ("allocator_allocate", u64, [pointer, u64, u64, pointer, pointer]),
            ("allocator_free", c.c_int, [pointer, u64, pointer, pointer]),
            ("allocator_base", u64, [pointer, u64]), ("allocator_available", u64, [pointer]),
            ("allocator_consistent", c.c_int, [pointer]), ("crc", c.c_uint32, [c.c_uint32, c.c_char_p, u64])):
        getattr(loaded, name).restype, getattr(loaded, name).argtypes = result, arguments
    return loaded


class Allocator:
    def __init__(self, parts: c.CDLL, quota: int, size: int = 1 << 40, largest: int = 1 << 30) -> None:
        self.parts, self.ranges, self.count = parts, (c.c_uint64 * 128)(), c.c_uint64()
        self.it = parts.allocator_new(BASE, size, quota, largest)

    def _ranges(self) -> list[tuple[int, int]]:
        return [(self.ranges[2 * i], self.ranges[2 * i + 1]) for i in range(self.count.value)]

    def allocate(self, size: int, alignment: int = 0) -> tuple[int, list[tuple[int, int]]]:
        address = self.parts.allocator_allocate(self.it, size, alignment, self.ranges, c.byref(self.count))
        return address, self._ranges()

    def free(self, address: int) -> tuple[bool, list[tuple[int, int]]]:
        freed = self.parts.allocator_free(self.it, address, self.ranges, c.byref(self.count))
        return bool(freed), self._ranges()

    @property
    def available(self) -> int:
        return self.parts.allocator_available(self.it)

    def check(self) -> None:
        assert self.parts.allocator_consistent(self.it)


@pytest.mark.parametrize("seed", range(6))
def test_random_use_keeps_every_promise(parts, seed):
    """Against a model: no overlap, everything inside mapped memory, the quota exact, mappings undone as made."""
    chance = random.Random(seed)
    quota = 64 * GRANULE
    allocator = Allocator(parts, quota, largest=8 * GRANULE)
    live: dict[int, int] = {}
    mapped: dict[int, int] = {}
    for step in range(3000):
        if live and chance.random() < 0.48:
            address = chance.choice(sorted(live))
            freed, unmap = allocator.free(address)
            assert freed
            del live[address]
            for start, size in unmap:
                assert mapped.pop(start) == size  # cut as it was mapped
        else:
            size = chance.choice((1, 511, 512, 513, 4096, 70000, 1 << 20, (1 << 20) + 1, GRANULE, 3 * GRANULE + 5,
                                  chance.randrange(1, 20 * GRANULE)))
            asked = size
            before = allocator.available
            alignment = chance.choice((0, 0, 4096))  # managed memory has pages of its own
            address, new = allocator.allocate(size, alignment)
            for start, length in new:
                assert start not in mapped and start % GRANULE == 0 and length % GRANULE == 0
                assert length <= 8 * GRANULE
                mapped[start] = length
            if not address:
                assert not new and before < -(-size // GRANULE) * GRANULE
                continue
            assert address % 512 == 0
            assert all(address + size <= other or other + length <= address for other, length in live.items())
            if alignment:
                assert address % alignment == 0
                size = -(-size // alignment) * alignment  # nothing else lies in its last page
                assert all(address + size <= other or other <= address for other in live)
            live[address] = size
            assert parts.allocator_base(allocator.it, address + asked - 1) == address
        assert allocator.available == quota - sum(mapped.values())
        for address in chance.sample(sorted(live), min(3, len(live))):
            at = address  # covered from end to end by mappings
            while at < address + live[address]:
                start = max((s for s in mapped if s <= at), default=0)
                assert start and at < start + mapped[start]
                at = start + mapped[start]
        if step % 50 == 0:
            allocator.check()
    for address in live:
        assert allocator.free(address)[0]
    allocator.check()
    assert allocator.available == quota
    parts.allocator_delete(allocator.it)


def test_edges(parts):
    allocator = Allocator(parts, 3 * GRANULE + 1)
    assert allocator.available == 3 * GRANULE
    assert allocator.allocate(0)[0] == 0
    assert allocator.allocate((1 << 64) - 1)[0] == 0
    a, mapped = allocator.allocate(3 * GRANULE)
    assert a == BASE and mapped == [(BASE, 3 * GRANULE)]
    assert allocator.allocate(1)[0] == 0
    assert not allocator.free(a + 512)[0]
    assert allocator.free(a) == (True, mapped)
    assert not allocator.free(a)[0]
    assert allocator.allocate(1)[0] == BASE  # only now is it handed out again


def test_crc_is_zlibs(parts):
    data = random.Random(1).randbytes(100_003)
    for size in [*range(300), 4095, 65536, 100_000]:
        for start in (0, 1, 3):
            piece = data[start:start + size]
            assert parts.crc(0, piece, len(piece)) == zlib.crc32(piece)
            assert parts.crc(zlib.crc32(data[:77]), piece, len(piece)) == zlib.crc32(piece, zlib.crc32(data[:77]))
