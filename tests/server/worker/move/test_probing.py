"""Samples during a replay: taken where the session stands still, compared where the replay stands, judged at once."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rgpu.checkpoint.device import PAGE, Region
from rgpu.link.messages.pages import CALLS, PING, PONG, PROBE, PROBE_ENTRY_LAYOUT, PROBED, WANT
from rgpu.migrate.move.sampling import Sampled
from rgpu.migrate.transfer import replay_link as wire
from rgpu.server.worker.apply.journal_tap import JournalTap
from rgpu.server.worker.move import probing
from rgpu.server.worker.move.catching_up import CatchUp
from rgpu.server.worker.move.probing import Prober, differing, hashed
from rgpu.session.errors import Corrupt, DeviceError, MoveFailed, RecoveryFailed, RgpuError
from tests.support.eventually import eventually
from tests.support.worker.pages import BASE, filled
from tests.support.worker.pages_device import PlainDevice
from tests.support.worker.pages_link import KEY, sealed


def all_of(device: PlainDevice) -> np.ndarray[Any, Any]:
    regions = device.regions()
    return hashed(device, regions, [range(-(-region.size // PAGE)) for region in regions], KEY)


# -- the messages -------------------------------------------------------------------------
def test_a_sample_comes_through_as_it_was() -> None:
    entries = all_of(filled())
    number, position, read = wire.read_probe(wire.probe(3, 99, entries))
    assert (number, position) == (3, 99) and np.array_equal(read, entries)
    assert wire.read_probed(wire.probed(3, 512, 7)) == (3, 512, 7)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_sample_or_corrupt(data: bytes) -> None:
    try:
        number, position, entries = wire.read_probe(data)
        assert wire.probe(number, position, entries) == data
    except Corrupt:
        pass
    try:
        assert wire.probed(*wire.read_probed(data)) == data
    except Corrupt:
        pass


def test_impossible_samples_are_refused() -> None:
    for row in ((BASE, 0), (BASE, PAGE + 1), (2**63 + PAGE, 1)):
        entries = np.zeros(1, PROBE_ENTRY_LAYOUT)
        entries["address"], entries["size"] = row
        with pytest.raises(Corrupt):
            wire.read_probe(wire.probe(1, 1, entries))
    with pytest.raises(Corrupt):
        wire.read_probed(wire.probed(1, 2, 3))


# -- hashing --------------------------------------------------------------------------------
def test_pages_that_differ_are_counted_wherever_they_are() -> None:
    source, replay = filled(), filled()
    entries = all_of(source)
    assert differing(replay, entries, KEY) == 0
    for region, data in list(replay.memory.values()):
        data[-1] ^= 1  # the last page of each kind of region, short or not
        assert differing(replay, entries, KEY) > 0, region
    assert differing(replay, entries, KEY) == len(replay.memory)


def test_other_memory_is_a_failed_replay() -> None:
    source, replay = filled(), filled()
    source.add(Region(BASE - 64 * PAGE, PAGE, "mapped"))
    with pytest.raises(RecoveryFailed, match="where the replay has none"):
        differing(replay, all_of(source), KEY)


# -- taking them ------------------------------------------------------------------------------
class Standing:
    """A runtime that can stand still."""

    applied, hash_key = 41, KEY

    def __init__(self, device: Any) -> None:
        self.device = device
        self.pauses = 0

    @property
    def paused(self) -> bool:
        return self.pauses > 0

    def pause(self) -> None:
        self.pauses += 1

    def resume(self) -> None:
        self.pauses -= 1


class Draining(PlainDevice):
    drains = True

    def drain(self, timeout: float) -> bool:
        return self.drains


def drainable() -> Draining:
    device = Draining()
    device.memory = filled().memory
    return device


def test_a_sample_stands_behind_the_calls_it_saw() -> None:
    runtime, tap = Standing(drainable()), JournalTap()
    tap.add(b"calls")
    prober = Prober(runtime, tap, random.Random(1))  # type: ignore[arg-type]
    assert prober.take() and runtime.pauses == 0 and prober.stood > 0
    calls, mark = tap.take(0.0), tap.take(0.0)
    assert calls is not None and calls.data == b"calls" and mark is not None and mark.mark
    number, position, entries = wire.read_probe(mark.data)
    assert (number, position) == (1, 41) and len(entries) == prober.pages
    assert differing(runtime.device, entries, KEY) == 0


def test_standing_still_is_counted_once() -> None:
    """Who stands still anyway, for the throttle, loses nothing by a sample."""
    runtime = Standing(drainable())
    prober = Prober(runtime, JournalTap())  # type: ignore[arg-type]
    runtime.pause()
    assert prober.take() and prober.stood == 0.0
    runtime.resume()
    assert prober.take() and prober.stood > 0.0


def test_a_session_that_does_not_stand_still_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    device = drainable()
    runtime, tap = Standing(device), JournalTap()
    prober = Prober(runtime, tap)  # type: ignore[arg-type]
    device.drains = False
    assert not prober.take()
    device.drains = True

    def broken(*_: object) -> None:
        raise DeviceError("the program's own", 700)

    monkeypatch.setattr(device, "hash_regions", broken)
    assert not prober.take() and runtime.pauses == 0 and tap.take(0.0) is None


def test_samples_go_on_until_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "FIRST_SECONDS", 0.005)
    monkeypatch.setattr(probing, "LONGEST_SECONDS", 0.01)
    runtime, tap = Standing(drainable()), JournalTap()
    prober = Prober(runtime, tap)  # type: ignore[arg-type]
    prober.start()
    pieces = [tap.take(5.0) for _ in range(3)]
    assert [wire.read_probe(piece.data)[0] for piece in pieces if piece] == [1, 2, 3]
    prober.stop()
    prober.stop()
    while tap.take(0.0) is not None:
        pass
    time.sleep(0.05)
    assert tap.take(0.0) is None and runtime.pauses == 0


def test_what_breaks_a_prober_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(point: str) -> str:
        raise MoveFailed(point)

    monkeypatch.setattr(probing, "FIRST_SECONDS", 0.001)
    monkeypatch.setattr(probing, "fault", broken)
    prober = Prober(Standing(drainable()), JournalTap())  # type: ignore[arg-type]
    prober.start()
    prober._thread.join(5)
    assert prober.error is not None and prober.error.message == "replay.sample"


# -- catching up ---------------------------------------------------------------------------------
class Destination(threading.Thread):
    """Answers as an arriving session does. ``says``: (pages compared, of them differ) of each sample."""

    def __init__(self, connection: Any, says: Callable[[int, int], bytes]) -> None:
        super().__init__(daemon=True)
        self.connection, self.says = connection, says
        self.stream = b""
        self.seen: list[tuple[int, int]] = []  #: number of each sample, bytes of the stream before it

    def run(self) -> None:
        try:
            while True:
                kind, body = self.connection.recv()
                if kind == CALLS:
                    self.stream += bytes(body[1:])
                elif kind == PING:
                    self.connection.send(PONG, wire.pong(wire.read_ping(body), 1))
                elif kind == PROBE:
                    number, _, entries = wire.read_probe(body)
                    self.seen.append((number, len(self.stream)))
                    self.connection.send(PROBED, self.says(number, len(entries)))
        except RgpuError:
            pass


class Replaying:
    """A catch-up against a :class:`Destination`; ``judged``: what the judge was told, ``verdict`` what it says."""

    def __init__(self, says: Callable[[int, int], bytes]) -> None:
        near, far = socket.socketpair()
        self.connection, there = sealed(near, far)
        self.destination = Destination(there, says)
        self.destination.start()
        self.tap = JournalTap()
        self.sampled: list[Sampled] = []
        self.replay = CatchUp(self.connection, self.tap, tell=lambda *_, **__: None)

    def ship(self) -> None:
        for sampled, behind in self.replay.ship(len(all_of(filled()))).samples:
            assert 0.0 <= behind < 60.0
            self.sampled.append(sampled)

    def mark(self, number: int) -> None:
        self.tap.mark(wire.probe(number, 5, all_of(filled())))


@pytest.fixture
def replaying() -> Iterator[Callable[..., Replaying]]:
    made: list[Replaying] = []

    def make(says: Callable[[int, int], bytes] = lambda number, pages: wire.probed(number, pages, 2)) -> Replaying:
        made.append(Replaying(says))
        return made[-1]

    yield make
    for one in made:
        one.connection.close()


def test_calls_and_samples_arrive_in_their_order(replaying: Callable[..., Replaying]) -> None:
    one = replaying()
    one.tap.add(b"x" * 1000)
    one.mark(1)
    one.tap.add(b"y" * 500)
    one.mark(2)
    eventually(lambda: len(one.sampled) >= 2 or one.ship(), within=5)
    one.replay.rest()
    assert one.destination.stream == b"x" * 1000 + b"y" * 500 and one.replay.call_bytes == 1500
    assert one.destination.seen == [(1, 1000), (2, 1500)]
    pages = len(all_of(filled()))
    assert one.sampled == [Sampled(pages, 2, pages)] * 2


def test_a_result_that_nobody_asked_for_is_refused(replaying: Callable[..., Replaying]) -> None:
    one = replaying(lambda number, pages: wire.probed(number + 1, pages, 0))
    one.mark(1)
    with pytest.raises(Corrupt, match="was not requested"):
        for _ in range(500):
            one.ship()


def test_late_answers_do_not_hide_what_is_wanted(replaying: Callable[..., Replaying]) -> None:
    one = replaying()
    one.mark(1)
    one.ship()
    eventually(lambda: one.destination.seen, within=5)
    import msgspec
    one.destination.connection.send(WANT, msgspec.msgpack.encode([[BASE, [1, 2]]]))
    assert one.replay.wanted(time.monotonic() + 5) == {BASE: [1, 2]}
    with pytest.raises(MoveFailed, match="promised"):
        one.replay.wanted(time.monotonic())
