"""The node's cache of module binaries: bounded, shared by processes, never believed without its hash."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from blake3 import blake3

from rgpu.server import module_cache
from rgpu.server.module_cache import ModuleCache

ROOT = Path(__file__).resolve().parents[2]
KIB = 1024


def binary(number: int, size: int = 20 * KIB) -> bytes:
    return random.Random(number).randbytes(size)


def digest(data: bytes) -> bytes:
    return blake3(data).digest()


def names(cache: ModuleCache) -> set[str]:
    return {path.name for path in cache.directory.iterdir()} - {"lock"}


def age(cache: ModuleCache, data: bytes, seconds: int) -> None:
    """As if it had been used that long ago."""
    path = cache.directory / digest(data).hex()
    then = os.stat(path).st_mtime_ns - seconds * 10**9
    os.utime(path, ns=(then, then))


@pytest.fixture
def cache(tmp_path: Path) -> ModuleCache:
    return ModuleCache(tmp_path / "modules", 100 * KIB)


def test_keeps_and_gives_back(cache: ModuleCache) -> None:
    assert cache.get(digest(binary(1))) is None and not cache.has(digest(binary(1)))
    assert cache.put(binary(1)) and cache.put(binary(1))
    assert cache.get(digest(binary(1))) == binary(1) and cache.has(digest(binary(1)))
    assert names(cache) == {digest(binary(1)).hex()}
    assert cache.statistics() == {"hits": 1, "misses": 1, "saved": 20 * KIB, "stored": 1, "evicted": 0, "damaged": 0}
    assert os.stat(cache.directory).st_mode & 0o777 == 0o700
    assert os.stat(cache.directory / digest(binary(1)).hex()).st_mode & 0o777 == 0o600


def test_least_recently_used_goes_first(cache: ModuleCache) -> None:
    for number in range(5):
        assert cache.put(binary(number))
        age(cache, binary(number), 100 - number)
    assert cache.get(digest(binary(0))) == binary(0)  # used: 1 is the oldest now
    assert cache.has(digest(binary(2)))  # and asked for
    assert cache.put(binary(9, 30 * KIB))
    assert {number for number in range(5) if cache.has(digest(binary(number)))} == {0, 2, 4}
    assert cache.counters.evicted == 2


def test_what_is_too_large_evicts_nothing(cache: ModuleCache) -> None:
    assert cache.put(binary(1))
    assert not cache.put(binary(2, 101 * KIB))
    assert cache.has(digest(binary(1)))


def test_no_cache_at_all(tmp_path: Path) -> None:
    cache = ModuleCache(tmp_path / "none", 0)
    cache.keep(binary(1))
    assert not cache.put(binary(1)) and cache.get(digest(binary(1))) is None and not (tmp_path / "none").exists()


@pytest.mark.parametrize("damage", ["changed", "cut", "empty", "longer"])
def test_a_damaged_file_is_absent_and_goes(cache: ModuleCache, damage: str) -> None:
    cache.put(binary(1))
    path = cache.directory / digest(binary(1)).hex()
    data = {"changed": binary(1)[:-1] + bytes([binary(1)[-1] ^ 1]), "cut": binary(1)[:-1], "empty": b"",
            "longer": binary(1) + b"x"}[damage]
    path.write_bytes(data)
    assert cache.get(digest(binary(1))) is None and not path.exists() and cache.counters.damaged == 1
    assert cache.put(binary(1)) and cache.get(digest(binary(1))) == binary(1)


def test_no_link_is_followed(cache: ModuleCache, tmp_path: Path) -> None:
    cache.put(binary(2))
    (tmp_path / "elsewhere").write_bytes(binary(1))
    os.symlink(tmp_path / "elsewhere", cache.directory / digest(binary(1)).hex())
    assert cache.get(digest(binary(1))) is None


def test_leftovers_of_a_crash_go_those_of_the_living_stay(cache: ModuleCache) -> None:
    """A writer that was killed holds no lock any more; one that writes does, and its room is counted."""
    code = ("import sys, time; from pathlib import Path; from rgpu.server.module_cache import ModuleCache\n"
            "cache = ModuleCache(Path(sys.argv[1]), 100 * 1024)\n"
            "with cache._locked(): path, fd = cache._reserve(60 * 1024)\n"
            "print(path.name, flush=True); time.sleep(60)")
    with subprocess.Popen([sys.executable, "-c", code, str(cache.directory)], stdout=subprocess.PIPE, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}) as writer:
        assert writer.stdout is not None
        name = writer.stdout.readline().strip()
        assert cache.put(binary(1)) and cache.put(binary(2))
        assert names(cache) == {name, digest(binary(1)).hex(), digest(binary(2)).hex()}
        assert not cache.put(binary(3, 50 * KIB))  # 60 KiB of the 100 are promised
        writer.kill()
        writer.wait()
    assert cache.put(binary(3, 50 * KIB)) and name not in names(cache)


@pytest.mark.parametrize("where", ["ftruncate", "fsync", "rename"])
def test_a_full_disk(cache: ModuleCache, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache.put(binary(1))
    with monkeypatch.context() as patch:
        patch.setattr(module_cache.os, where, fail)
        assert not cache.put(binary(2))
    assert names(cache) == {digest(binary(1)).hex()} and cache.get(digest(binary(1))) == binary(1)
    assert cache.put(binary(2))


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = ModuleCache(tmp_path / "file" / "modules", KIB * KIB)
    assert not cache.put(binary(1)) and cache.get(digest(binary(1))) is None and not cache.has(digest(binary(1)))


def test_written_by_and_by(cache: ModuleCache) -> None:
    cache.keep(binary(1))
    cache.keep(binary(2, 100))  # too small to be worth it
    assert cache.flush(10)
    assert names(cache) == {digest(binary(1)).hex()}


def test_a_slow_disk_does_not_fill_the_memory(cache: ModuleCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_cache, "PENDING", 50 * KIB)
    gate = threading.Event()
    monkeypatch.setattr(cache, "put", lambda data: gate.wait(10))
    for number in range(5):
        cache.keep(binary(number))
    assert cache._pending == 40 * KIB and not cache.flush(0.01)
    gate.set()
    assert cache.flush(10)


def test_many_processes(tmp_path: Path) -> None:
    """Writers and readers of the same module binaries in a directory that holds half of them: right content or none."""
    code = f"""
import random, sys
from pathlib import Path
from blake3 import blake3
from rgpu.server.module_cache import ModuleCache
cache = ModuleCache(Path(sys.argv[1]), 10 * 20 * 1024)
chance = random.Random(int(sys.argv[2]))
binaries = [random.Random(n).randbytes({20 * KIB}) for n in range(20)]
for _ in range(150):
    data = chance.choice(binaries)
    if chance.random() < 0.5:
        cache.put(data)
    else:
        assert cache.get(blake3(data).digest()) in (None, data)
assert cache.counters.damaged == 0, cache.counters
print(cache.counters.hits)
"""
    directory = tmp_path / "modules"
    running = [subprocess.Popen([sys.executable, "-c", code, str(directory), str(seed)], stdout=subprocess.PIPE,
                                env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True) for seed in range(4)]
    hits = [int(process.communicate(timeout=120)[0]) for process in running]
    assert all(process.returncode == 0 for process in running) and sum(hits) > 0
    left = [path for path in directory.iterdir() if path.name != "lock"]
    assert sum(path.stat().st_size for path in left) <= 10 * 20 * KIB
    assert all(blake3(path.read_bytes()).hexdigest() == path.name for path in left)
