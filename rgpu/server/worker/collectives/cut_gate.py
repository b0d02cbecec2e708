"""The gate of a worker: it pauses the session for a checkpoint of all members of a gang.

The leader closes the gates of all members, has the members that are behind apply calls up to the furthest, and when
all have submitted the same collectives and these are complete, has each take its snapshot there. A gate opens by itself
after a time limit: leaders and daemons may be lost, and the program must go on.

========  ==========================  ==========================================================================
state     on                          what follows
========  ==========================  ==========================================================================
open      hold                        closed: no call is applied from the next boundary on
closed    hold, target not reached    passing: calls are applied up to it, one collective at a time
passing   target reached              closed, by the applying thread itself
closed    take                        taken: the waiting checkpoint pauses the session, and opens the gate after it
any       open, time over             open; that attempt closes it no more
========  ==========================  ==========================================================================
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import structlog

from rgpu.checkpoint.device import Device
from rgpu.server.collectives.given import Given
from rgpu.session.errors import Refused, TimedOut

log = structlog.get_logger(__name__)

TAKE_SECONDS = 10.0  #: from the leader's request until the snapshot has begun
UNHEARD_SECONDS = 30.0  #: without a request of the cut's leader after which a waiting checkpoint is given up
MOST_SECONDS = 60.0  #: limit of the time for which a leader may close a gate
MOST_OVER = 64  #: attempts that are over and remembered
LOOK = 0.05  #: seconds between two checks whether a waiting checkpoint was given up


class Gated(Protocol):
    """The part of the session that is needed here."""

    @property
    def device(self) -> Device:
        """Device that the session runs on."""

    def hold(self) -> None:
        """Stop applying calls at the next boundary."""

    def stands(self, seconds: float) -> bool:
        """Whether no call is being applied, and none will be, within that time."""

    def pause(self) -> None:
        """Stop applying calls; returns when none is being applied."""

    def resume(self) -> None:
        """Undo one :meth:`hold` or :meth:`pause`."""


class CutGate:
    """See the module docstring. ``cut``: names a cut; ``attempt``: one closing of the gates for it."""

    def __init__(self, session: Gated, given: Given) -> None:
        self._session, self._given = session, given
        self._changed = threading.Condition(threading.RLock())
        self._state = "open"  #: open | closed | passing | taken
        self._attempt = ""
        self._until = 0.0  #: monotonic s
        self._target: dict[str, int] = {}
        self._over: deque[str] = deque(maxlen=MOST_OVER)
        self._ready = ""  #: the cut whose checkpoint waits here
        self._heard = 0.0  #: time of its leader's last request, monotonic s
        self._watching = False

    # -- the leader -----------------------------------------------------------------
    def told(self, word: str, cut: str, attempt: str = "", target: Mapping[str, int] | None = None,
             seconds: float = 0.0, wait: float = 0.0, drain: bool = False) -> dict[str, Any]:
        """Carry out a request of the leader. Return {ready, open, stands, drained, given}.

        ``word``: look, hold, take, open. ``target``: collectives to be submitted, by communicator as :meth:`Given.rows`
        names them. ``seconds``: after which the gate opens by itself. ``wait``: seconds that the answer may take, for
        the requested state to be reached. ``drain``: submitted work is to be complete, too. Raises :class:`Refused`.
        """
        until = time.monotonic() + wait
        with self._changed:
            self._heard = time.monotonic()
            if word == "hold":
                self._hold(attempt, target or {}, seconds)
            elif word == "take":
                self._take(attempt)
            elif word == "open":
                self._over.append(attempt)
                if self._attempt == attempt:
                    self._open("the leader opens it")
            elif word != "look":
                raise Refused(f"a gate does not know {word!r}")
            if word == "look":
                self._changed.wait_for(lambda: self._ready == cut, wait)
        stands = self._stands(attempt, until) if word in ("hold", "take") else False
        drained = stands and drain and self._session.device.drain(max(0.0, until - time.monotonic()))
        with self._changed:
            closed = self._attempt == attempt and self._state in ("closed", "taken")
            return {"ready": self._ready == cut, "open": self._state == "open", "stands": stands and closed,
                    "drained": drained and closed, "given": self._given.rows()}

    def _hold(self, attempt: str, target: Mapping[str, int], seconds: float) -> None:
        if attempt in self._over or self._state == "taken":
            return
        if attempt != self._attempt:
            if self._state != "open":
                self._open("another cut begins")
            self._attempt, self._target = attempt, {}
            self._until = time.monotonic() + min(seconds, MOST_SECONDS)
            self._watch()
        elif self._state == "open":
            return  # its time is over
        self._target = {**self._target, **target}
        if self._reached():
            if self._state != "closed":
                self._close()
        elif self._state == "closed":
            self._state = "passing"
            self._session.resume()
        elif self._state == "open":
            self._state = "passing"

    def _take(self, attempt: str) -> None:
        """Let the waiting checkpoint begin. Raises :class:`Refused` where the gate opened meanwhile."""
        if self._attempt != attempt or self._state not in ("closed", "taken") or not self._session.stands(0.0):
            raise Refused("the gate of the session has opened by itself: the leader took too long")
        self._state, self._until = "taken", time.monotonic() + TAKE_SECONDS
        self._changed.notify_all()

    def _stands(self, attempt: str, until: float) -> bool:
        """Whether the session is paused at the target by ``until`` (monotonic)."""
        with self._changed:
            self._changed.wait_for(lambda: self._attempt != attempt or self._state != "passing",
                                   max(0.0, until - time.monotonic()))
            if self._attempt != attempt or self._state not in ("closed", "taken"):
                return False
        return self._session.stands(max(0.0, until - time.monotonic()))

    # -- the applying thread ----------------------------------------------------------
    def gave(self) -> None:
        """Close the gate ahead of the next call if the group of collectives just submitted reaches the target."""
        if self._state != "passing":
            return
        with self._changed:
            if self._state == "passing" and self._reached():
                self._close()

    def _reached(self) -> bool:
        rows = self._given.rows()
        return all(name in rows and rows[name][0] >= number for name, number in self._target.items())

    # -- the checkpoint -----------------------------------------------------------------
    @contextmanager
    def standing_still(self, cut: str, gave_way: Callable[[], str]) -> Iterator[None]:
        """Pause at the point where all members do, once the leader requests it.

        ``gave_way()``: why the checkpoint was given up, empty if it was not. Raises :class:`Refused` where it was, or
        the leader is silent for :data:`UNHEARD_SECONDS`; :class:`TimedOut` where work does not drain.
        """
        try:
            self._await_take(cut, gave_way)
            self._session.pause()
            try:
                with self._changed:
                    if self._state != "taken":  # its time was over before this thread got here
                        raise Refused("the gate of the session has opened by itself before its snapshot began")
                    self._until = float("inf")  # this thread opens it, whatever happens
                if not self._session.device.drain(TAKE_SECONDS):
                    raise TimedOut("work of the session was given behind the cut", seconds=TAKE_SECONDS)
                yield
            finally:
                self._session.resume()
        finally:
            with self._changed:
                self._ready = "" if self._ready == cut else self._ready
                if self._state == "taken":
                    self._open("the snapshot is taken")

    def _await_take(self, cut: str, gave_way: Callable[[], str]) -> None:
        with self._changed:
            self._ready, self._heard = cut, time.monotonic()
            self._changed.notify_all()
            while not (self._state == "taken" and self._attempt.startswith(cut + "/")):
                self._changed.wait(LOOK)
                if why := gave_way():
                    raise Refused(why)
                if self._ready != cut:
                    raise Refused("another checkpoint of the members together has begun")
                if time.monotonic() - self._heard > UNHEARD_SECONDS:
                    raise Refused(f"nothing was heard of the leader for {UNHEARD_SECONDS:.0f} s")

    # -- opening and closing: with the lock ------------------------------------------------
    def _close(self) -> None:
        self._state = "closed"
        self._session.hold()
        self._changed.notify_all()

    def _open(self, why: str) -> None:
        closed, self._state = self._state in ("closed", "taken"), "open"
        self._over.append(self._attempt)
        if closed:
            self._session.resume()
        log.debug("the gate is open", attempt=self._attempt, reason=why)
        self._changed.notify_all()

    def _watch(self) -> None:
        if not self._watching:
            self._watching = True
            threading.Thread(target=self._open_in_time, name="cut-gate", daemon=True).start()

    def _open_in_time(self) -> None:
        with self._changed:
            while self._state != "open":
                left = self._until - time.monotonic()
                if left <= 0:
                    self._open("its time is over")
                else:
                    self._changed.wait(min(left, 1.0))
            self._watching = False
