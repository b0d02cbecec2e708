"""Request for a session that may have to wait: repeated until the pool has a place.

The pool keeps a request only as long as its client repeats it. The answer (position and reason) is
shown to the user when it changes; if the pool does not answer for a while, the user is told, and the
request is repeated: it is in the pool's registry. A client that gives up withdraws the request, which
names its program, so that no other session of that name is meant.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any

from rgpu.client.run.pool_requests import PoolRequests
from rgpu.session.errors import Corrupt, Fenced, PoolUnavailable, Refused, TimedOut, UnknownOutcome

ANSWER_SECONDS = 10.0  #: the pool answers after so long, if there is nothing new before
CREATE_TIMEOUT = 60.0  #: a start may begin just then
LOOK_SECONDS = 0.1  #: between two checks whether the program still needs a session
AGAIN_SECONDS = 1.0  #: after an answer that was lost
REPEAT_SECONDS = 30.0  #: for which a request that does not wait for a place is repeated while answers are lost
END_TIMEOUT = 5.0


def create_session(requests: PoolRequests, args: dict[str, Any], *, tell: Callable[[str], None],
                   given_up: Callable[[], str]) -> dict[str, Any]:
    """Return the answer to ``session.create``, after waiting if ``options.queue`` requests it.

    ``tell``: shows a line to the user. ``given_up()``: why the session is not needed any more; empty
    while it is. The request is withdrawn then, and :class:`Refused` raised. Raises the pool's errors.
    """
    try:
        waits = _may_wait(args["options"])
        return _wait(requests, args, tell, given_up) if waits else _now(requests, args, tell, given_up)
    except _GivenUp as error:
        why = f"nobody waits for a place any longer: {error}"
        requests.quietly("session.withdraw", {"session": args["name"], "program": args["program"], "reason": why},
                         END_TIMEOUT)
        raise Refused(why) from None


def _may_wait(options: dict[str, Any]) -> bool:
    """Return whether the request may wait for a place, or for other runs of its gang."""
    gang = options.get("gang") or {}
    return bool(options.get("queue")) or gang.get("ranks") != gang.get("of")


def _now(requests: PoolRequests, args: dict[str, Any], tell: Callable[[str], None],
         given_up: Callable[[], str]) -> dict[str, Any]:
    """Ask again if the coordinator changed before it answered: the program gets the session made for it."""
    until, said = time.monotonic() + REPEAT_SECONDS, False
    while True:
        try:
            return _ask(requests, args, given_up)
        except (UnknownOutcome, Fenced) as error:
            if time.monotonic() > until:
                raise
            if not said:
                tell(f"rgpu: {args['name']} is asked for again ({error.message})")
            said = True
            _rest(AGAIN_SECONDS, given_up)


def _wait(requests: PoolRequests, args: dict[str, Any], tell: Callable[[str], None],
          given_up: Callable[[], str]) -> dict[str, Any]:
    known = said = ""
    while True:
        try:
            reply = _ask(requests, {**args, "wait": ANSWER_SECONDS, "known": known}, given_up)
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


def _ask(requests: PoolRequests, args: dict[str, Any], given_up: Callable[[], str]) -> dict[str, Any]:
    """Send one request; its answer is not awaited any more once the session is given up."""
    _check(given_up)
    answer: Future[Any] = Future()

    def ask() -> None:
        try:
            answer.set_result(requests.call("session.create", args, CREATE_TIMEOUT + ANSWER_SECONDS))
        except BaseException as error:  # noqa: BLE001 - raised where the answer is awaited
            answer.set_exception(error)

    # Not one of the requests's few threads: sessions that run need those, and this one may outlast the wait.
    threading.Thread(target=ask, name="waits-for-place", daemon=True).start()
    while True:
        try:
            return dict(answer.result(LOOK_SECONDS))
        except NotYet:
            if answer.done():
                raise TimedOut("the pool did not answer in time") from None
            _check(given_up)


class _GivenUp(Exception):
    """The session is not needed any more."""


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
    """Return (reason, line for the user). Raises :class:`Corrupt`."""
    if not isinstance(queued, dict):
        raise Corrupt("the pool's answer about a waiting request cannot be read", reason="reply")
    reason, position = str(queued.get("reason") or ""), queued.get("position") or 0
    where = f" at position {position} of {queued.get('waiting') or position}" if position else ""
    return reason, f"rgpu: {name} waits{where}: {reason}"

