"""Waiting for a place in the pool: asked again until there is one, told when something changes, given up in time."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from rgpu.client.run import waiting
from rgpu.client.run.waiting import create_session
from rgpu.session.errors import AlreadyExists, Fenced, PoolUnavailable, Refused, RgpuError, UnknownOutcome


class Pool:
    """Answers in order; the last one again and again. An event is waited for before the answer."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def call(self, verb: str, args: dict[str, Any], timeout: float) -> Any:
        self.asked.append((verb, args))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, threading.Event):
            answer.wait(10)
            return {"session": args["name"]}
        if isinstance(answer, RgpuError):
            raise answer
        return answer

    def quietly(self, verb: str, args: dict[str, Any], timeout: float) -> bool:
        self.asked.append((verb, args))
        return True


def ask(pool: Pool, given_up: Any = lambda: "", queue: bool = True) -> tuple[dict[str, Any], list[str]]:
    said: list[str] = []
    args = {"name": "s", "program": {"pid": 3}, "options": {"queue": True} if queue else {}}
    return create_session(pool, args, tell=said.append, given_up=given_up), said  # type: ignore[arg-type]


def queued(position: int, reason: str) -> dict[str, Any]:
    return {"queued": {"position": position, "waiting": 3, "reason": reason}}


def test_without_the_queue_it_is_asked_once() -> None:
    pool = Pool(Refused("no place for s"))
    with pytest.raises(Refused, match="no place"):
        ask(pool, queue=False)
    assert [verb for verb, _ in pool.asked] == ["session.create"]


def test_a_start_whose_coordinator_changed_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same program gets the session that was made for it."""
    monkeypatch.setattr(waiting, "AGAIN_SECONDS", 0.01)
    pool = Pool(Fenced("node-a was told something newer of s"), UnknownOutcome("the coordinator changed"),
                {"session": "s"})
    reply, said = ask(pool, queue=False)
    assert reply == {"session": "s"} and len(said) == 1 and "told something newer" in said[0]
    assert len({str(asked) for asked in pool.asked}) == 1, "the same question each time"
    monkeypatch.setattr(waiting, "REPEAT_SECONDS", 0.05)
    with pytest.raises(UnknownOutcome):
        ask(Pool(UnknownOutcome("the coordinator changed")), queue=False)
    pool = Pool(UnknownOutcome("the coordinator changed"))
    with pytest.raises(Refused, match="the program ended"):
        ask(pool, lambda: "the program ended", queue=False)
    assert pool.asked[-1][0] == "session.withdraw"


def test_the_user_reads_each_change_once() -> None:
    pool = Pool(queued(2, "b waits before it"), queued(2, "b waits before it"), queued(1, "80 MiB fits nowhere"),
                {"session": "s"})
    reply, said = ask(pool)
    assert reply == {"session": "s"}
    assert said == ["rgpu: s waits at position 2 of 3: b waits before it",
                    "rgpu: s waits at position 1 of 3: 80 MiB fits nowhere"]
    assert [args["known"] for _, args in pool.asked] == ["", "b waits before it", "b waits before it",
                                                         "80 MiB fits nowhere"]
    assert all(args["wait"] > 0 for _, args in pool.asked)


def test_a_pool_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "AGAIN_SECONDS", 0.01)
    pool = Pool(queued(1, "full"), PoolUnavailable("nobody there"), PoolUnavailable("nobody there"),
                UnknownOutcome("lost"), queued(1, "full"), {"session": "s"})
    reply, said = ask(pool)
    assert reply == {"session": "s"}
    assert [line.split(": ", 1)[1] for line in said] == [
        "s waits at position 1 of 3: full", "s waits; the pool does not answer (nobody there)",
        "s waits; the pool does not answer (lost)", "s waits at position 1 of 3: full"]


@pytest.mark.parametrize("error", [Refused("s can never fit"), AlreadyExists("taken")])
def test_what_no_waiting_helps_ends_it(error: RgpuError) -> None:
    pool = Pool(queued(1, "full"), error)
    with pytest.raises(type(error)):
        ask(pool)
    assert all(verb == "session.create" for verb, _ in pool.asked), "somebody else's session may have the name"


def test_whoever_gives_up_tells_the_pool_at_once() -> None:
    """Also while an answer is awaited that does not come."""
    never = threading.Event()
    pool, why = Pool(queued(1, "full"), never), [""]

    def interrupt() -> None:
        time.sleep(0.3)
        why[0] = "interrupted"

    threading.Thread(target=interrupt).start()
    began = time.monotonic()
    with pytest.raises(Refused, match="interrupted"):
        ask(pool, lambda: why[0])
    assert time.monotonic() - began < 3
    never.set()
    assert pool.asked[-1] == ("session.withdraw", {"session": "s", "program": {"pid": 3}, "reason": (
        "nobody waits for a place any longer: interrupted")})
