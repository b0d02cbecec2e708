"""The gate of a worker, with a session that applies calls in a thread: where it stands, and that it always opens."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rgpu.server.collectives.given import Given
from rgpu.server.worker.apply.boundary import Boundary
from rgpu.server.worker.collectives import cut_gate
from rgpu.server.worker.collectives.cut_gate import CutGate
from rgpu.session.errors import Refused
from rgpu.session.objects.collectives import Kind
from tests.support.collectives.ranks import operation
from tests.support.eventually import eventually

MEMBERS = ["a", "b"]


class Session:
    """Applies a call whenever it may: each tenth is a collective. Does what :class:`.cut_gate.Gated` promises."""

    def __init__(self) -> None:
        self.given, self.position, self.busy = Given("a"), 0, False
        self.given.created(40, b"unique", 0, MEMBERS)
        self._interrupts = 0
        self.boundary = Boundary(self._interrupt)
        self.gate = CutGate(self, self.given)
        self.device: Any = self
        self._over = False
        self._thread = threading.Thread(target=self._apply, daemon=True)
        self._thread.start()

    def _interrupt(self, on: bool) -> None:
        self._interrupts += 1 if on else -1

    def _apply(self) -> None:
        self.boundary.enter()
        while not self._over:
            if self._interrupts:
                self.boundary.leave()
                self.boundary.enter()
                continue
            self.position += 1
            if self.position % 10 == 0:
                self.given.gave([replace(operation(0, Kind.ALL_REDUCE), number=self.position // 10 - 1)])
                self.gate.gave()
            time.sleep(0.0005)
        self.boundary.leave()

    def drain(self, seconds: float) -> bool:
        time.sleep(min(seconds, 0.01) if self.busy else 0.0)
        return not self.busy

    def hold(self) -> None:
        self.boundary.hold()

    def stands(self, seconds: float) -> bool:
        return self.boundary.stands(seconds)

    def pause(self) -> None:
        self.boundary.pause()

    def resume(self) -> None:
        self.boundary.resume()

    def runs(self) -> bool:
        """Whether calls are applied."""
        before = self.position
        return eventually(lambda: self.position > before, "it stands still", 5)

    def close(self) -> None:
        self._over = True
        self._thread.join(5)


@pytest.fixture
def session() -> Iterator[Session]:
    made = Session()
    yield made
    made.close()


def number(said: dict[str, Any]) -> int:
    (row,) = said["given"].values()
    return int(row[0])


def test_it_goes_on_to_exactly_where_it_is_told(session: Session) -> None:
    said = session.gate.told("hold", "c", "c/1", seconds=30, wait=5)
    assert said["stands"] and not said["open"] and not said["drained"]
    position = session.position
    (name,) = said["given"]
    target = {name: number(said) + 3}
    said = session.gate.told("hold", "c", "c/1", target, seconds=30, wait=5, drain=True)
    assert said["stands"] and said["drained"] and number(said) == target[name]
    assert session.position == 10 * target[name] > position, "in front of the next call"
    assert session.gate.told("hold", "c", "c/1", target, seconds=30, wait=5)["given"] == said["given"]
    session.gate.told("open", "c", "c/1")
    assert session.runs()
    late = session.gate.told("hold", "c", "c/1", seconds=30, wait=0.1)
    assert late["open"] and not late["stands"] and session.runs(), "an attempt that is over closes it no more"


def test_it_opens_by_itself(session: Session) -> None:
    assert session.gate.told("hold", "c", "c/1", seconds=0.2, wait=5)["stands"]
    assert session.runs()
    with pytest.raises(Refused, match="has opened by itself"):
        session.gate.told("take", "c", "c/1")
    assert session.gate.told("hold", "c", "c/2", seconds=30, wait=5)["stands"], "a further attempt"
    session.gate.told("open", "c", "c/2")


def test_a_snapshot_is_taken_where_it_stands(session: Session) -> None:
    taken: list[tuple[int, bool]] = []
    may_end = threading.Event()

    def snapshot() -> None:
        with session.gate.standing_still("c", lambda: ""):
            taken.append((session.position, session.stands(0)))
            may_end.wait(10)

    thread = threading.Thread(target=snapshot)
    thread.start()
    assert session.gate.told("look", "c", wait=5)["ready"] and session.runs(), "until then the session runs"
    assert not session.gate.told("look", "d")["ready"]
    said = session.gate.told("hold", "c", "c/1", seconds=30, wait=5)
    session.gate.told("take", "c", "c/1")
    eventually(lambda: taken, "no snapshot was taken")
    assert taken == [(session.position, True)] and number(said) == session.position // 10
    assert not session.gate.told("open", "d", "d/1")["open"], "another cut's word"
    may_end.set()
    thread.join(5)
    assert session.runs()


@pytest.mark.parametrize("why", ["gave way", "another", "unheard"])
def test_a_checkpoint_that_waits_ends_with_its_cut(session: Session, why: str,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    gave_way, found = [""], []
    monkeypatch.setattr(cut_gate, "UNHEARD_SECONDS", 0.3 if why == "unheard" else 30.0)

    def wait(cut: str) -> None:
        try:
            with session.gate.standing_still(cut, lambda: gave_way[0] if cut == "c" else "over"):
                found.append("taken")
        except Refused as refused:
            found.append(refused.message)

    threads = [threading.Thread(target=wait, args=("c",))]
    threads[0].start()
    assert session.gate.told("look", "c", wait=5)["ready"]
    if why == "another":
        threads.append(threading.Thread(target=wait, args=("d",)))
        threads[1].start()
    elif why == "gave way":
        gave_way[0] = "it gave way"
    for thread in threads:
        thread.join(10)
    assert {"gave way": "it gave way", "another": "another checkpoint of the members together has begun",
            "unheard": "nothing was heard of the leader for 0 s"}[why] in found
    assert session.runs()
