"""Collectives of the cuda device: its streams stand at gates, data goes through host memory."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from cuda.bindings import driver as cuda

from rgpu.server.device.cuda.collectives import groups, staging
from rgpu.server.device.cuda.collectives.gates import GATES, Gates
from rgpu.session.errors import DeviceError
from rgpu.session.objects.collectives import DataType, Kind, Operation, Reduction
from tests.support.collectives.ranks import PART as EACH
from tests.support.collectives.ranks import RECEIVE, Gang, Member, contents, operation
from tests.support.collectives.ranks import SEND as SENT
from tests.support.collectives.session import (
    COUNT,
    PART,
    RANKS,
    SEND,
    Session,
    check_every_kind,
    check_waiting_is_no_work,
)
from tests.support.collectives.session import operation as own_operation
from tests.support.eventually import eventually
from tests.support.fake_driver.support import BASE, BINARY, driver


@pytest.fixture
def session(device: Any) -> Iterator[Session]:
    made = Session(device)
    yield made
    made.runtime.stop()


class DeviceMember(Member):
    """A session whose ranks' memory and streams are the device's."""

    device: Any = None

    def _open(self) -> None:
        self.device.map(BASE, 16 << 20)
        self.device.allocate(BASE, 16 << 20)
        self.device.reach_ranks(self.ranks)
        self.communicators = self.device._collectives.communicators
        for rank in [rank for rank, name in enumerate(self.gang.members) if name == self.name]:
            self.device.create_stream(18 + rank, 16, 1, 0)
            self.device.create_communicator(40 + rank, 16, len(self.gang.members), rank, b"u" * 128,
                                            self.gang.members)

    def _write(self, rank: int, data: bytes) -> None:
        self.device.copy_in(self.seq, 18 + rank, BASE + SENT + rank * EACH, len(data), len(data), 1, data)
        self.device.fill(self.seq, 18 + rank, BASE + RECEIVE + rank * EACH, len(data), len(data), 1, 1, 0)

    def _group(self, *operations: Operation) -> None:
        self.device.collectives(self.seq, [
            replace(one, send=BASE + one.send, receive=BASE + one.receive) for one in operations])

    def read(self, rank: int, size: int) -> bytes:
        assert self.device.drain(20) and not self.device.error, self.device.error_detail()
        return bytes(self.device.read(BASE + RECEIVE + rank * EACH, size))

    def close(self) -> None:
        self.streams.close(5)
        for link in [*self.ranks._asking._links.values(), *(one.connection for one in self.ranks._answering._clients)]:
            link.close()


@pytest.fixture
def gang(device: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gang]:
    """Rank 1 of three is on the device, the others in sessions of their own elsewhere."""
    made = Gang(["a", "b", "c"])
    lost = made.lose("b")
    monkeypatch.setattr(DeviceMember, "device", device)
    made.sessions["b"] = member = DeviceMember(made, "b", 2)
    for name, args in lost.journal:
        member.call(name, *args)
    yield made
    made.close()


def test_every_kind(session: Session) -> None:
    check_every_kind(session)
    assert not session.device._collectives._coming


def test_ranks_that_differ_are_named_and_abort_ends_it(session: Session) -> None:
    session.fill()
    session.group(own_operation(0, Kind.ALL_REDUCE))
    session.group(own_operation(1, Kind.ALL_REDUCE, count=COUNT - 1))
    eventually(lambda: len(session.device.communicators()[0]["last"]) == 2)
    first, second = session.device.communicators()[0]["last"]
    assert first["missing"] == [2] and first["differs"] == {1: second["call"]}
    session.group(own_operation(2, Kind.ALL_REDUCE))
    assert not session.device.drain(0.3), "as NCCL does"
    assert "all_reduce" in (session.device.unfinished() or (0, ""))[1]
    session("communicator_destroy", communicator=40, abort=1)
    assert session.device.drain(10) and not session.device.error


def test_a_factor_in_device_memory(session: Session) -> None:
    """What it is when the streams come to the group, not when the group is given."""
    values = session.fill()
    operations = [replace(own_operation(rank, Kind.ALL_REDUCE, reduction=Reduction.PREMULSUM), on_device=True,
                          scalar=SEND + 4 * PART) for rank in range(RANKS)]
    session.device.write(SEND + 4 * PART, bytes(4))
    session("memset", stream=18, destination=SEND + 4 * PART, pitch=4, width=4, height=1, element=4, value=0x40000000)
    session.group(*operations)
    total = (values[0] + values[1] + values[2])[:COUNT] * 2
    assert [session.result(rank, COUNT) for rank in range(RANKS)] == [total.tolist()] * RANKS


def test_many_groups_are_given_ahead(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than have room at once: the next is given when others are complete; buffers are used again."""
    monkeypatch.setattr(groups, "MOST_STAGED", 1 << 19)
    session.fill()
    chain = [replace(own_operation(rank, Kind.ALL_REDUCE, reduction=Reduction.MAX), send=SEND + rank * PART,
                     receive=SEND + rank * PART) for rank in range(RANKS)]
    for _ in range(300):
        session.group(*chain)
    largest = max(float(value) for value in session.fill()[2][:COUNT])
    assert session.device.drain(20) and session.device._collectives._staging.used <= 1 << 20
    session.group(*(own_operation(rank, Kind.ALL_REDUCE, reduction=Reduction.MAX) for rank in range(RANKS)))
    assert max(session.result(0, COUNT)) == largest and not session.runtime.executor.bugs


def test_a_rank_whose_group_comes_behind_what_has_no_room(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks in one journal: what completes the groups that take the room is given after the one that wants some."""
    monkeypatch.setattr(groups, "MOST_STAGED", 1 << 18)
    monkeypatch.setattr(groups, "PATIENCE", 0.1)
    values = session.fill()
    for rank in range(RANKS):
        for _ in range(4):
            session.group(own_operation(rank, Kind.ALL_REDUCE))
    total = (values[0] + values[1] + values[2])[:COUNT].tolist()
    assert [session.result(rank, COUNT) for rank in range(RANKS)] == [total] * RANKS


def fill_gang(gang: Gang, seed: int) -> None:
    """Write a part for each of three ranks."""
    for rank, part in enumerate(contents(3, COUNT * 4, seed, DataType.FLOAT32)):
        gang.of(rank).call("write", rank, part)


def check_goes_on(gang: Gang, waits: Callable[[], object], what: str) -> None:
    """Have rank 1 give its group, and a thread be inside the driver, which waits for it: the group goes on."""
    gang.of(1).group(operation(1, Kind.ALL_REDUCE))
    waiting = threading.Thread(target=waits)
    waiting.start()
    time.sleep(0.1)
    assert waiting.is_alive(), f"nothing waits: {what}"
    for rank in (0, 2):
        gang.of(rank).group(operation(rank, Kind.ALL_REDUCE))
    waiting.join(20)
    assert not waiting.is_alive(), what
    driver().fake_queue(0)
    assert gang.of(0).read(0, COUNT * 4) == gang.of(2).read(2, COUNT * 4) != bytes(COUNT * 4)


def test_ranks_elsewhere_and_a_driver_that_waits(gang: Gang, device: Any) -> None:
    """The applying thread is inside the driver, which waits for the stream that stands at the group."""
    fill_gang(gang, 1)
    driver().fake_loads_wait(1)
    check_goes_on(gang, lambda: device.load(30, BINARY, b"", False), "the load")
    assert gang.of(1).read(1, COUNT * 4) == gang.of(0).read(0, COUNT * 4)


def test_ranks_elsewhere_and_a_queue_that_is_full(gang: Gang) -> None:
    """Whoever gives the stream more waits in the driver, also with the engine's lock: the group still goes on."""
    for most in range(12, 46):  # a marker, which is given with the lock, is one of some thirty calls
        fill_gang(gang, most)
        driver().fake_queue(most)
        check_goes_on(gang, lambda: [gang.of(1).call("write", 1, bytes(4)) for _ in range(40)], f"a queue of {most}")


def test_what_a_lost_worker_brought_is_had_again(gang: Gang) -> None:
    """The others go on; the one that replays gets theirs out of their logs."""
    for step in range(3):
        for rank, part in enumerate(contents(3, COUNT * 4, step, DataType.FLOAT32)):
            gang.of(rank).call("write", rank, part)
            gang.of(rank).group(operation(rank, Kind.ALL_REDUCE))
    before = [gang.of(rank).read(rank, COUNT * 4) for rank in range(3)]
    again = gang.recover(gang.lose("a"), 3)
    assert again.read(0, COUNT * 4) == before[0] == before[1] == before[2]


def test_a_rank_that_is_lost_for_good(gang: Gang, device: Any) -> None:
    gang.of(1).group(operation(1, Kind.ALL_REDUCE))
    gang.of(2).group(operation(2, Kind.ALL_REDUCE))
    gang.over["a"] = "its program ended"
    for member in gang.sessions.values():
        member.ranks.gone("a", "its program ended")
    eventually(lambda: device.error == 911, lambda: device.error_detail())
    assert "its program ended" in device.error_detail() and device.drain(10)


def test_a_device_that_closes_does_not_wait_for_ranks(session: Session) -> None:
    session.group(own_operation(0, Kind.ALL_REDUCE))
    began = time.monotonic()
    session.runtime.stop()
    session.device._collectives.stop()
    assert session.device.drain(5) and time.monotonic() - began < 20


def check_a_sum(session: Session) -> None:
    """Compare one collective's result."""
    values = session.fill()
    session.group(*(own_operation(rank, Kind.ALL_REDUCE) for rank in range(RANKS)))
    assert session.result(0, COUNT) == (values[0] + values[1] + values[2])[:COUNT].tolist()


@pytest.mark.parametrize(("where", "result"), [("bring", 1), ("deliver", 1), ("deliver", 2)])
def test_what_the_driver_refused_half_way_is_used_again(session: Session, monkeypatch: pytest.MonkeyPatch,
                                                        where: str, result: int) -> None:
    """Gates and buffers of such groups come back when the streams are past what they were given of them; also of
    one that is tried again since memory was made (2).
    """
    own = session.device._collectives
    session.fill()
    session.group(*(own_operation(rank, Kind.ALL_REDUCE) for rank in range(RANKS)))
    assert session.device.drain(10)
    own._await_room([])
    monkeypatch.setattr(own._gates, "_free", deque(range(4)))
    real, calls = getattr(groups.Staged, where), itertools.count(1)

    def refused(staged: groups.Staged, stream: Any) -> None:
        if next(calls) % 2 == 0:  # the second of a group's three
            raise DeviceError("refused", result)
        real(staged, stream)

    tried: list[int] = []
    session.runtime.executor.make_room = lambda: bool(tried.append(1)) or len(tried) < 6
    with monkeypatch.context() as patched:
        patched.setattr(groups.Staged, where, refused)
        for number in range(12):
            session.group(*(own_operation(rank, Kind.ALL_REDUCE) for rank in range(RANKS)))
            assert session.runtime.executor.bugs == (number + 1) * (result == 1) and session.device.drain(10)
    check_a_sum(session)
    own._await_room([])
    assert own._staging.used == 0 and sorted(own._gates._free) == list(range(4))


def test_gates_that_are_all_taken() -> None:
    made = Gates()
    taken = {made.take() for _ in range(GATES)}
    assert len(taken) == GATES and made.full
    with pytest.raises(DeviceError, match="all 2048 gates .* synchronize"):
        made.take()
    made.give(5)
    assert made.take() == 5


class Pinned:
    """The driver, with the bytes of host memory that were allocated and not freed."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(cuda, name)

    @property
    def bytes(self) -> int:
        """Of all."""
        return sum(self.sizes.values())

    def cuMemHostAlloc(self, size: int, flags: int) -> Any:  # noqa: N802 - the driver's name
        """Count it."""
        result, address = cuda.cuMemHostAlloc(size, flags)
        self.sizes[int(address)] = size
        return result, address

    def cuMemFreeHost(self, address: int) -> Any:  # noqa: N802 - the driver's name
        """Count it."""
        del self.sizes[address]
        return cuda.cuMemFreeHost(address)


def test_pinned_memory_has_a_bound(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where sizes change and one group is always given: a receive whose message comes late."""
    monkeypatch.setattr(staging, "MOST_HELD", 16 << 20, raising=False)
    monkeypatch.setattr(groups, "MOST_STAGED", 4 << 20)
    pinned = Pinned()
    monkeypatch.setattr(staging, "driver", pinned)
    session.fill()
    session.group(own_operation(0, Kind.RECEIVE, 1))
    for size in [*range(1 << 16, 1 << 20, 1 << 14), *range(1 << 20, 1 << 16, -(1 << 15))]:
        session.group(*(replace(own_operation(rank, Kind.ALL_REDUCE, count=size // 4), send=SEND, receive=SEND,
                                stream=19 + rank % 2, communicator=40 + rank) for rank in range(RANKS)))
        assert pinned.bytes <= 16 << 20, size
    assert session.device._collectives._given, "the receive stands there"
    session.group(own_operation(1, Kind.SEND, 0))
    assert session.device.drain(20) and not session.device.error and not session.runtime.executor.bugs
    session.device._collectives.close()
    assert pinned.bytes == 0


def test_buffers_do_not_overlap_and_are_joined_again(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken and given in any order; what fits is within the bound, what does not is had beyond it."""
    device.gpus.use()
    monkeypatch.setattr(staging, "MOST_HELD", 4 << 20)
    made, dice = staging.Staging(), random.Random(7)
    taken: list[list[staging.Buffer]] = []
    beyond = 0
    for step in range(800):
        if taken and dice.random() < (0.45 if step < 400 else 0.6):
            made.give(taken.pop(dice.randrange(len(taken))))
            continue
        sizes = [dice.choice([1, 4096, 5000, 1 << 17, dice.randrange(1, 1 << 20)]) for _ in range(dice.randrange(4))]
        fits, before = made.fits(sizes), made.held
        taken.append(made.take(sizes))
        assert [buffer.bytes.size >= size for buffer, size in zip(taken[-1], sizes, strict=True)] == [True] * len(sizes)
        assert made.held <= max(4 << 20, before) or not fits
        beyond += not fits
        places = sorted((one.address, one.address + one.bytes.size) for group in taken for one in group)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(places))
        assert made.used == sum(end - begin for begin, end in places)
    for group in taken:
        made.give(group)
    assert beyond and made.used == 0 and all(chunk.free == [(0, chunk.size)] for chunk in made._chunks)
    made.trim()
    assert 0 < made.held <= 4 << 20
    made.trim([9 << 20])
    assert made.held == 0, "one that alone needs more gets all room"
    made.give(made.take([9 << 20]))
    assert 9 << 20 <= made.held < 12 << 20
    made.close()
    assert made.held == 0


def test_what_is_no_memory_of_the_session(session: Session) -> None:
    session.group(replace(own_operation(0, Kind.ALL_REDUCE), send=BASE - 4096))
    assert session.runtime.executor.bugs == 1
    assert session.device.drain(5) and not session.device.error
    session.group(*(own_operation(rank, Kind.ALL_REDUCE) for rank in range(RANKS)))
    assert session.device.drain(5), "the refused one took no part"


def test_a_rank_that_waits_for_others_has_no_share_of_the_gpu(session: Session) -> None:
    check_waiting_is_no_work(session)
