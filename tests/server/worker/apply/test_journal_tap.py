"""The tap: everything that was applied, in order, nothing that was not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from rgpu.server.apply_path import Came, Fed
from rgpu.server.device.cpu.device import CpuDevice
from rgpu.server.worker.apply.journal_tap import PIECE, JournalTap
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.session.journal.record import RecordReader, pack_record
from tests.support.worker.journal import Journal, opened


def drained(tap: JournalTap) -> list[tuple[bool, bytes]]:
    found = []
    while (piece := tap.take(0.0)) is not None:
        found.append((piece.fresh, piece.data))
    return found


def test_bytes_come_out_in_order_and_the_first_is_fresh() -> None:
    tap = JournalTap()
    tap.add(b"")
    tap.add(b"ab")
    tap.add(b"x" * (PIECE + 5))
    tap.stream_begins()
    tap.add(b"again")
    pieces = drained(tap)
    assert pieces[0][0] and pieces[0][1].startswith(b"ab") and pieces[-1] == (True, b"again")
    assert [fresh for fresh, _ in pieces].count(True) == 2
    assert b"".join(data for _, data in pieces) == b"ab" + b"x" * (PIECE + 5) + b"again"
    assert tap.bytes == 0 and tap.taken == PIECE + 12


def test_an_armed_tap_begins_with_a_stream() -> None:
    tap = JournalTap(armed=True)
    tap.add(b"the middle of a record")
    assert not tap.wait_running(0.01) and drained(tap) == []
    threading.Timer(0.05, tap.stream_begins).start()
    assert tap.wait_running(5.0)
    tap.add(b"whole")
    assert drained(tap) == [(True, b"whole")]


def test_a_tap_that_runs_over_holds_nothing() -> None:
    tap = JournalTap(limit=10)
    tap.add(b"12345678")
    tap.add(b"abc")
    tap.add(b"d")
    assert tap.overflowed and tap.bytes == 0 and drained(tap) == []


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(memory=64 << 20)
    yield device
    device.close()


def test_a_runtime_taps_what_it_applied(device: CpuDevice) -> None:
    """Repeated records are not tapped twice: whoever replays it would find a gap or a repetition."""
    journal, runtime = Journal(), SessionRuntime("s", 1, device)
    first = opened(journal)
    runtime.feed(first)
    tap = runtime.loop.tap = JournalTap()
    later = [journal("memset", destination=0x2000_0000_0000, pitch=4, width=4, height=1, element=1, value=n, stream=0)
             for n in range(40)]
    runtime.feed(first + later[:10])
    runtime.feed(later)
    stream = b"".join(data for _, data in drained(tap))
    assert list(RecordReader().feed(stream)) == later


class ScriptedFast:
    """A fast path that hands one record back, as the native one does."""

    applied = 0
    every_record = False

    def __init__(self, steps: list[Fed]) -> None:
        self.steps = steps

    def feed(self, data: object) -> Fed:
        return self.steps.pop(0)

    def reset(self) -> None: ...
    def passed(self, seq: int) -> None: ...
    def interrupt(self, on: bool) -> None: ...
    def usual(self, calls: int) -> None: ...


def test_a_record_that_was_handed_back_is_tapped_when_it_was_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut may come before it: what stands in the tap then ends just there, though the bytes were taken."""
    journal = Journal()
    hot, cold, late = (journal("stream_synchronize", stream=n) for n in (1, 2, 3))
    parts = [pack_record(record) for record in (hot, cold, late)]
    taken = len(parts[0]) + len(parts[1])
    fast = ScriptedFast([Fed(Came.RECORD, taken - 7, cold, applied=1),
                         Fed(Came.ALL, len(parts[2]) - 3)])
    runtime = SessionRuntime("s", 1, SimpleNamespace(fast_path=fast))  # type: ignore[arg-type]
    tap = runtime.loop.tap = JournalTap(armed=True)
    feed = runtime.open_stream()
    seen: list[bytes] = []

    def obey(*_: object) -> None:
        seen.append(b"".join(data for _, data in drained(tap)))

    monkeypatch.setattr(runtime.loop, "_obey", obey)
    # 7 bytes of the hot record came with an earlier piece, the last 3 of the late one are still to come.
    feed((parts[0] + parts[1] + parts[2])[7:-3])
    assert seen == [parts[0][7:]]
    assert b"".join(data for _, data in drained(tap)) == parts[1] + parts[2][:-3]


def test_a_mark_stands_between_what_came_before_and_after_it() -> None:
    tap = JournalTap()
    tap.add(b"before")
    tap.mark(b"here")
    tap.add(b"after")  # at once: pieces that follow each other closely are joined otherwise
    found = [tap.take(0.0) for _ in range(3)]
    assert [(piece.data, piece.mark, piece.fresh) for piece in found if piece] == [
        (b"before", False, True), (b"here", True, False), (b"after", False, False)]
    assert tap.bytes == 0 and tap.taken == len(b"beforeafter")


def test_nothing_is_marked_that_nobody_will_read() -> None:
    armed, over = JournalTap(armed=True), JournalTap(limit=1)
    over.add(b"too much")
    for tap in (armed, over):
        tap.mark(b"here")
        assert tap.take(0.0) is None
