"""Printed text between device and link: bounded, in its owner's hands only, collected for a state."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rgpu.server.device.cpu import printed as cpu_printed
from rgpu.server.device.cpu.printed import Printed
from rgpu.server.worker.session_text import LIMIT, PIECE, SessionText

ROOT = Path(__file__).resolve().parents[3]


class Source:
    """Prints what it was told to when it is flushed."""

    holds_stdout = False

    def __init__(self) -> None:
        self.data, self.later = b"", b""
        self.printing = True
        self.flushed = 0

    @property
    def waiting(self) -> int:
        return len(self.data)

    def flush(self) -> None:
        self.flushed += 1
        self.data, self.later = self.data + self.later, b""

    def take(self, most: int) -> bytes:
        text, self.data = self.data[:most], self.data[most:]
        return text


def attached(source: Source) -> SessionText:
    text = SessionText(source)
    text.attach("link", 0, lambda: None)
    return text


def test_a_flush_comes_before_the_pieces() -> None:
    source = Source()
    text = attached(source)
    source.later = b"x" * (PIECE + 5)
    assert list(text.pieces("link")) == [(0, b"x" * PIECE), (PIECE, b"x" * 5)]
    assert list(text.pieces("link")) == [] and source.flushed == 2


def test_only_the_owner_gets_pieces() -> None:
    source = Source()
    text = attached(source)
    source.data = b"y" * (2 * PIECE)
    pieces = text.pieces("link")
    assert next(pieces)[0] == 0
    text.attach("other", 10, lambda: None)
    assert list(pieces) == [], "the old link goes on sending"
    text.confirm("link", PIECE)  # nor does its word count any more
    assert b"".join(piece for _, piece in text.pieces("other")) == b"y" * (2 * PIECE - 10)


def test_a_kernel_that_prints_for_ever_does_not_hold_up_an_answer() -> None:
    class Endless(Source):
        def take(self, most: int) -> bytes:
            self.data += b"z" * 100
            return super().take(most)

    source = Endless()
    source.data = b"z" * 50
    assert sum(len(piece) for _, piece in attached(source).pieces("link")) == 50


def test_a_device_that_does_not_print_is_not_asked() -> None:
    source = Source()
    source.printing = False
    text = attached(source)
    source.later = b"not yet"
    assert list(text.pieces("link")) == [] and text.state() == [0, b""] and not text.crowded and not source.flushed
    assert list(SessionText(None).pieces("link")) == [] and not SessionText(None).printing


def test_text_of_a_state_is_sent_by_a_device_that_prints_nothing() -> None:
    text = SessionText(None)
    text.restore([9, b"rest\n"])
    text.attach("link", 6, lambda: None)
    assert list(text.pieces("link")) == [(6, b"st\n")]


def test_a_state_has_all_that_was_printed() -> None:
    source = Source()
    text = attached(source)
    source.later = b"abc"
    assert list(text.pieces("link")) == [(0, b"abc")]
    text.confirm("link", 1)
    source.later = b"def"
    assert text.state() == [6, b"bcdef"]
    text.restore([100, b"!"])
    assert text.state() == [100, b"!"], "what this device printed before is of no account"


def test_crowded_counts_what_is_in_the_device_and_what_is_not_confirmed() -> None:
    source = Source()
    text = attached(source)
    source.data = b"a" * LIMIT
    assert not text.crowded
    sent = sum(len(piece) for _, piece in text.pieces("link"))
    source.data = b"b"
    assert sent == LIMIT and text.crowded
    text.confirm("link", 1)
    assert not text.crowded


def test_what_nobody_gets_takes_no_room() -> None:
    source = Source()
    text = SessionText(source)
    text.discard()
    for _ in range(100):
        source.data += b"c" * PIECE
        assert not text.crowded
    assert len(source.data) <= PIECE and text.state() == [100 * PIECE, b""]


# -- the cpu device's ----------------------------------------------------------------
def test_a_launch_may_print_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_printed, "LAUNCH_LIMIT", 10)
    printed = Printed()
    for _ in range(2):
        write = printed.writer("k")
        for text in (b"12345", b"6789ab", b"cd"):
            write(text)
    assert printed.take(100) == b"123456789a" * 2 and printed.waiting == 0


def test_a_launch_begins_late_while_much_is_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_printed, "CROWDED", 10)
    printed = Printed()
    printed.writer("k")(b"x" * 11)
    began = time.monotonic()
    threading.Timer(0.1, printed.take, (1,)).start()
    printed.wait_room()
    assert 0.05 < time.monotonic() - began < cpu_printed.PATIENCE
    printed.wait_room()


# -- the cuda device's ---------------------------------------------------------------
CAPTURED = """
import ctypes, os, sys
from rgpu.server.device.cuda.work.printed import BLOCK, CapturedStdout
libc = ctypes.CDLL(None)
libc.printf(b"before\\n")
captured = CapturedStdout()
libc.printf(b"a kernel's %d\\n", 1)
print("python's")
captured.flush()
assert captured.waiting == 13, captured.waiting
assert captured.take(2) + captured.take(100) + captured.take(100) == b"a kernel's 1\\n"
line = b"x" * 1023 + b"\\n"
for round in range(20):
    for _ in range(1024):
        libc.fwrite(line, 1, 1024, ctypes.c_void_p.in_dll(libc, "stdout"))
    captured.flush()
    got = 0
    while text := captured.take(100_000):
        assert text.count(b"x") > 0.99 * len(text)
        got += len(text)
    assert got == 1 << 20, got
status = os.fstat(1)
assert status.st_size == 13 + (20 << 20) and status.st_blocks * 512 <= 4 * BLOCK, (status.st_size, status.st_blocks)
print("to whoever asked", file=captured.former)
os.write(2, b"done")
"""


def test_standard_output_becomes_memory_that_is_given_back() -> None:
    """No write waits, however much is printed at once; what was taken takes no memory."""
    pytest.importorskip("cuda.bindings")
    done = subprocess.run([sys.executable, "-c", CAPTURED], capture_output=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == b"before\nto whoever asked\n" and done.stderr.decode() == "python's\ndone"
