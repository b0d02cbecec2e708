"""Shares of a device's time: who may have how much, and that sessions are held to it and to no more."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from rgpu.api.settings import POLICIES, Settings
from rgpu.server.device.spec import make_device
from rgpu.server.node.workers.compute import LEAST, ComputeShares, limits
from rgpu.server.worker import limiter
from rgpu.server.worker.allowance import MOST_OWED, SAVED, Allowance
from rgpu.server.worker.limiter import Limiter
from rgpu.session.errors import LinkError, NotFound, Refused, RgpuError, UsageError
from tests.support.eventually import eventually

AHEAD = 0.02  #: seconds of work that stand in a device's queues when a session is told to stand still


# -- who may have how much ------------------------------------------------------------


@pytest.mark.parametrize(("promised", "policy", "expected"), [
    ({"a": 25}, "shared", {"a": 0}),
    ({"a": 25}, "always", {"a": 0.25}),
    ({"a": 25, "b": 75}, "shared", {"a": 0.25, "b": 0.75}),
    ({"a": 25, "b": 75}, "never", {"a": 0, "b": 0}),
    ({"a": 0, "b": 0}, "always", {"a": 0, "b": 0}),  # nobody was promised anything
    ({"a": 60, "b": 0, "c": 0}, "shared", {"a": 0.6, "b": 0.2, "c": 0.2}),
    ({"a": 100, "b": 0}, "shared", {"a": 0, "b": LEAST / 100}),  # 100 % needs no limit
])
def test_limits(promised: dict[str, int], policy: str, expected: dict[str, float]) -> None:
    assert limits(promised, policy) == pytest.approx(expected)


@given(some.dictionaries(some.text(max_size=3), some.integers(0, 50), max_size=5), some.sampled_from(POLICIES))
def test_shares_keep_every_promise(promised: dict[str, int], policy: str) -> None:
    while sum(promised.values()) > 100:
        promised.popitem()
    found = limits(promised, policy)
    assert found.keys() == promised.keys()
    for session, share in found.items():
        assert share == 0 or share >= promised[session] / 100 > 0 or not promised[session]
    held = [share for share in found.values() if share]
    assert sum(held) <= 1 + LEAST / 100 + 1e-9


def test_a_policy_that_does_not_exist_is_refused() -> None:
    assert Settings({}, {"RGPU_ENFORCE_COMPUTE": "always"}).enforce_compute == "always"
    with pytest.raises(UsageError, match="shared, always, never"):
        Settings({}, {"RGPU_ENFORCE_COMPUTE": "sometimes"})


# -- the allowance ------------------------------------------------------------------------


def played(share: float, wish: Callable[[float], float], seconds: float, look: float = 0.02) -> float:
    """The share that a program got that works for ``wish(now)`` of each look's time when it may."""
    allowance, now, busy, owed = Allowance(share), 0.0, 0.0, 0.0
    while now < seconds:
        if owed > 0:
            elapsed, worked = min(owed, look), 0.0
        else:
            elapsed, worked = look, look * wish(now)
        now, busy = now + elapsed, busy + worked
        owed = allowance.spend(elapsed, worked)
    return busy / now


@given(some.floats(0.01, 0.99))
def test_who_always_wants_more_gets_its_share(share: float) -> None:
    assert played(share, lambda now: 1.0, 60.0 + 2 / share) == pytest.approx(share, abs=0.01, rel=0.05)


@given(some.floats(0.05, 0.9), some.floats(0.0, 0.9))
def test_who_wants_less_is_not_held(share: float, part: float) -> None:
    assert played(share, lambda now: share * part, 30.0) == pytest.approx(share * part, abs=0.002)


def test_what_was_not_used_is_not_kept_for_later() -> None:
    allowance = Allowance(0.5)
    assert allowance.spend(3600.0, 0.0) == 0 and allowance.saved == SAVED


def test_one_long_kernel_is_not_held_against_it_for_ever() -> None:
    assert Allowance(0.25).spend(100.0, 100.0) == pytest.approx(MOST_OWED / 0.25)


# -- a session is held ------------------------------------------------------------------------


class Program:
    """A runtime whose program has work for its device whenever it does not stand still.

    ``waits``: its work waits on the device for a call that is still to be applied: ``applied`` counts these.
    """

    def __init__(self, waits: bool = False) -> None:
        self.device = self
        self.busy, self.applied, self._waits = 0.0, 0, waits
        self._pauses, self._over = 0, False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        last, paused_at = time.monotonic(), 0.0
        while not self._over:
            time.sleep(0.001)
            now = time.monotonic()
            with self._lock:
                if self._pauses:
                    paused_at = paused_at or now
                else:
                    self.applied, paused_at = self.applied + 1, 0.0
                if not paused_at or self._waits or now - paused_at < AHEAD:
                    self.busy += now - last
            last = now

    def busy_seconds(self) -> float:
        with self._lock:
            return self.busy

    def pause(self, brief: bool) -> None:
        assert brief
        with self._lock:
            self._pauses += 1

    def resume(self, brief: bool) -> None:
        assert brief
        with self._lock:
            self._pauses -= 1

    def close(self) -> None:
        self._over = True
        self._thread.join()


@pytest.fixture
def limited() -> Iterator[Callable[..., tuple[Program, Limiter]]]:
    made: list[Any] = []

    def make(**values: Any) -> tuple[Program, Limiter]:
        program = Program(**values)
        made.extend((found := Limiter(program), program))
        return program, found

    yield make
    for one in made:
        one.close()


def share_of(program: Program, seconds: float) -> float:
    busy, began = program.busy_seconds(), time.monotonic()
    time.sleep(seconds)
    return (program.busy_seconds() - busy) / (time.monotonic() - began)


def test_held_to_its_share_and_let_go(limited: Callable[..., tuple[Program, Limiter]]) -> None:
    program, found = limited()
    assert share_of(program, 0.3) > 0.9 and found.describe()["limit"] is None
    found.limit(0.25)
    time.sleep(0.5)
    assert 0.1 < share_of(program, 3.0) < 0.35  # a fifth of a second at a time: the machine may be busy
    said = found.describe()
    assert said["limit"] == 0.25 and said["held_s"] > 1.0 and said["busy_s"] > 0.5
    found.limit(0.0)
    time.sleep(0.1)
    assert share_of(program, 0.3) > 0.9


def test_work_that_waits_for_a_call_gets_it(limited: Callable[..., tuple[Program, Limiter]],
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """SEMANTICS 19: the device is busy with what only the next call ends."""
    monkeypatch.setattr(limiter, "STUCK", 0.2)
    program, found = limited(waits=True)
    found.limit(0.1)
    time.sleep(0.5)
    before = program.applied
    time.sleep(2.0)
    assert program.applied > before


def test_ends_in_the_middle_of_a_hold(limited: Callable[..., tuple[Program, Limiter]]) -> None:
    program, found = limited()
    found.limit(0.01)
    eventually(lambda: program._pauses, within=10)
    found.close()
    assert program._pauses == 0


# -- the device's clock ---------------------------------------------------------------------------


def test_a_device_counts_what_it_works() -> None:
    device = make_device("cpu:0", 64 << 20)
    try:
        device.create_context(1, 0, False)
        device.create_stream(7, 1, 0, 0)
        assert device.busy_seconds() == 0
        device._streams.submit(_op(1, 0.2), 7)  # type: ignore[attr-defined]
        device._streams.submit(_op(2, 0.1), 7)  # type: ignore[attr-defined]
        time.sleep(0.1)
        assert device.busy_seconds() > 0, "while it works"
        assert device.drain(10)
        worked = device.busy_seconds()
        assert worked >= 0.3
        time.sleep(0.1)
        assert device.busy_seconds() == worked, "not while it rests"
    finally:
        device.close()


def _op(seq: int, seconds: float) -> Any:
    from rgpu.server.device.cpu.schedule import Op

    return Op(seq, lambda: time.sleep(seconds))


# -- the workers are told ---------------------------------------------------------------------------


class Handle:
    def __init__(self, session: str, device: str = "cuda:0") -> None:
        self.session, self.device = session, device
        self.told: list[float] = []
        self.fails: RgpuError | None = None

    async def request(self, do: str, *, timeout: float = 30.0, **values: Any) -> dict[str, Any]:
        assert do == "limit"
        if self.fails is not None:
            raise self.fails
        self.told.append(values["share"])
        return {}


def test_workers_are_told_what_changes() -> None:
    handles = [Handle("a"), Handle("b"), Handle("c", "cuda:1")]
    promised = {"a": 30, "b": 50, "c": 20}

    async def record(session: str) -> Any:
        if session not in promised:
            raise NotFound(f"no session is called {session}")
        return SimpleNamespace(wants=SimpleNamespace(compute=promised[session]))

    async def test() -> None:
        a, b, c = handles
        shares = ComputeShares("shared", lambda: handles, record)
        b.fails = LinkError("its worker is gone")
        await shares.look()
        assert (a.told, b.told, c.told) == ([0.3], [], [0.0])
        b.fails = None
        await shares.look()
        await shares.look()
        assert (a.told, b.told, c.told) == ([0.3], [0.5], [0.0]), "each change once"
        handles.append(late := Handle("late", "cuda:1"))
        await shares.look()
        assert c.told == [0.0] and not late.told, "not on record yet"
        promised["late"] = 0
        await shares.look()
        assert c.told == [0.0, 0.2] and late.told == [0.8]
        handles.remove(b)
        handles[0] = old = Handle("a")  # another worker of the session, of an older release
        old.fails = Refused("a worker does not know 'limit'")
        await shares.look()
        await shares.look()
        assert a.told == [0.3]

    asyncio.run(test())


def test_a_worker_on_several_devices_has_what_the_fullest_leaves_it() -> None:
    """Shares are of each device; a limit holds the worker as a whole."""
    handles = [Handle("both", "cuda:0+1"), Handle("beside", "cuda:1"), Handle("alone", "cuda:2")]
    promised = {"both": 60, "beside": 0, "alone": 50}

    async def record(session: str) -> Any:
        return SimpleNamespace(wants=SimpleNamespace(compute=promised[session]))

    asyncio.run(ComputeShares("shared", lambda: handles, record).look())
    assert [handle.told for handle in handles] == [[0.6], [0.4], [0.0]]
