"""A session from a pool that may have to be waited for: asked for again and again, until there is a place.

The pool keeps a request only as long as its client asks. What it answers (position and reason) is
told to the user when it changes; a pool that does not answer for a while is told as well, and
asked on: the request stands in its registry. Who gives up withdraws the request, which names the
program that it was for, so that nobody else's session of that name is meant.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any

from rgpu.client.run.pool_desk import Desk
from rgpu.session.errors import Corrupt, Fenced, PoolUnavailable, Refused, TimedOut, UnknownOutcome

ANSWER_SECONDS = 10.0  #: the pool answers after so long, if there is nothing new before
CREATE_TIMEOUT = 60.0  #: a start may begin just then
LOOK_SECONDS = 0.1  #: between two looks whether the program still wants a session
AGAIN_SECONDS = 1.0  #: after an answer that was lost
REPEAT_SECONDS = 30.0  #: that a start is asked for whose answers get lost, by who does not wait for a place
END_TIMEOUT = 5.0


def create_session(desk: Desk, args: dict[str, Any], *, tell: Callable[[str], None],
                   given_up: Callable[[], str]) -> dict[str, Any]:
    """The answer to ``session.create``, after waiting if it was asked for with ``options.queue``.

    ``given_up()``: why nobody wants the session any more; empty while somebody does. The pool is
    told then, and :class:`Refused` raised. Raises what the pool answers with.
    """
    try:
        waits = _may_wait(args["options"])
        return _wait(desk, args, tell, given_up) if waits else _now(desk, args, tell, given_up)
    except _GivenUp as error:
        why = f"nobody waits for a place any longer: {error}"
        desk.quietly("session.withdraw", {"session": args["name"], "program": args["program"], "reason": why},
                     END_TIMEOUT)
        raise Refused(why) from None


def _may_wait(options: dict[str, Any]) -> bool:
    """Whether it was asked to wait, or waits for other runs of its gang."""
    gang = options.get("gang") or {}
    return bool(options.get("queue")) or gang.get("ranks") != gang.get("of")


def _now(desk: Desk, args: dict[str, Any], tell: Callable[[str], None], given_up: Callable[[], str]) -> dict[str, Any]:
    """Asked again where the coordinator changed before it answered: the program gets the session made for it."""
    until, said = time.monotonic() + REPEAT_SECONDS, False
    while True:
        try:
            return _ask(desk, args, given_up)
        except (UnknownOutcome, Fenced) as error:
            if time.monotonic() > until:
                raise
            if not said:
                tell(f"rgpu: {args['name']} is asked for again ({error.message})")
            said = True
            _rest(AGAIN_SECONDS, given_up)


def _wait(desk: Desk, args: dict[str, Any], tell: Callable[[str], None], given_up: Callable[[], str]) -> dict[str, Any]:
    known = said = ""
    while True:
        try:
            reply = _ask(desk, {**args, "wait": ANSWER_SECONDS, "known": known}, given_up)
        except (PoolUnavailable, UnknownOutcome, TimedOut, Fenced) as error:
            line = f"rgpu: {args['name']} waits; the pool does not answer ({error.message})"
            if line != said:
                tell(line)
                said, known = line, ""
            _rest(AGAIN_SECONDS, given_up)
            continue
        queued = reply.get("queued")
        if queued is None:
            return reply
        known, line = _line(str(args["name"]), queued)
        if line != said:
            tell(line)
            said = line


def _ask(desk: Desk, args: dict[str, Any], given_up: Callable[[], str]) -> dict[str, Any]:
    """One question, whose answer nobody waits for any more than for a session."""
    _check(given_up)
    answer: Future[Any] = Future()

    def ask() -> None:
        try:
            answer.set_result(desk.call("session.create", args, CREATE_TIMEOUT + ANSWER_SECONDS))
        except BaseException as error:  # noqa: BLE001 - whoever waits for the answer raises it
            answer.set_exception(error)

    # Not one of the desk's few threads: sessions that run need those, and it may be left behind.
    threading.Thread(target=ask, name="waits-for-place", daemon=True).start()
    while True:
        try:
            return dict(answer.result(LOOK_SECONDS))
        except NotYet:
            if answer.done():
                raise TimedOut("the pool did not answer in time") from None
            _check(given_up)


class _GivenUp(Exception):
    """Nobody wants the session any more."""


def _check(given_up: Callable[[], str]) -> None:
    why = given_up()
    if why:
        raise _GivenUp(why)


def _rest(seconds: float, given_up: Callable[[], str]) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        _check(given_up)
        time.sleep(LOOK_SECONDS)


def _line(name: str, queued: Any) -> tuple[str, str]:
    """(reason, what the user reads). Raises :class:`Corrupt`."""
    if not isinstance(queued, dict):
        raise Corrupt("the pool's answer about a waiting request cannot be read", reason="reply")
    reason, position = str(queued.get("reason") or ""), queued.get("position") or 0
    where = f" at position {position} of {queued.get('waiting') or position}" if position else ""
    return reason, f"rgpu: {name} waits{where}: {reason}"

