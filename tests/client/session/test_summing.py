"""Digests of long answers in compiled code: those of xxhash, by every kind of processor and any number of threads."""

from __future__ import annotations

import ctypes
import os
import random
import threading

import pytest
import xxhash

from rgpu.client.exchange import library, summing
from rgpu.session import answers
from rgpu.session.answers import LEAF
from tests.support.building import libraries

BEST, KINDS = 0xFFFFFFFF, 3


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    monkeypatch.setenv("RGPU_SHIM_DIR", str(libraries()))
    library._library.cache_clear()
    found = library.native()
    assert found is not None
    return found


@pytest.mark.parametrize("kind", [*range(KINDS), BEST])
def test_of_every_length(native: ctypes.CDLL, kind: int) -> None:
    chance, found = random.Random(kind), ctypes.create_string_buffer(16)
    odd = [chance.randrange(241, 9000) for _ in range(99)]
    for size in [241, 255, 256, 1023, 1024, 1025, 1087, 1088, 1089, LEAF, *odd]:
        data = chance.randbytes(size)
        assert native.rgx_sum(data, size, found, kind) == 1
        assert found.raw == xxhash.xxh3_128_digest(data), size
    assert native.rgx_sum(bytes(240), 240, found, kind) == 0


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_of_several_callers(native: ctypes.CDLL, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summing, "_THREADS", threads)
    wrong: list[int] = []

    def call(number: int) -> None:
        data = memoryview(os.urandom(9 * LEAF))
        for count in [1, 2, 9, 8, 3] * 20:
            if summing.of_leaves(data[:count * LEAF]) != answers.of_leaves(data[:count * LEAF]):
                wrong.append(number)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong
    assert summing.of_leaves(memoryview(b"")) == b""


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_library", lambda: None)
    data = os.urandom(3 * LEAF)
    assert summing.of_leaves(memoryview(data)) == answers.of_leaves(data)
