"""The gate of a worker: where its session stands still for a checkpoint of all members of a gang.

The leader closes the gates of all members, has those that are behind apply calls up to the furthest, and when all have
given the same collectives and have them complete, has each take its snapshot there. A gate opens by itself after the
time that it was closed for: leaders and daemons may be lost, the program goes on.

========  ==========================  ==========================================================================
state     on                          what follows
========  ==========================  ==========================================================================
open      hold                        closed: no call is applied from the next boundary on
closed    hold, target not reached    passing: calls are applied up to it, one collective at a time
passing   target reached              closed, by the applying thread itself
closed    take                        taken: the checkpoint that waits stands still here, and opens it when it has it
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

TAKE_SECONDS = 10.0  #: from the leader's word until the snapshot has begun
UNHEARD_SECONDS = 30.0  #: without a word of the cut's leader after which a checkpoint that waits for it is given up
MOST_SECONDS = 60.0  #: that a leader may have a gate closed
MOST_OVER = 64  #: attempts that are over and remembered
LOOK = 0.05  #: seconds between two looks whether a checkpoint that waits was given up


class Gated(Protocol):
    """The session, as far as it is needed here."""

    @property
    def device(self) -> Device:
        """What it runs on."""

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
        self._heard = 0.0  #: when its leader said something, monotonic s
        self._watching = False

    # -- the leader -----------------------------------------------------------------
    def told(self, word: str, cut: str, attempt: str = "", target: Mapping[str, int] | None = None,
             seconds: float = 0.0, wait: float = 0.0, drain: bool = False) -> dict[str, Any]:
        """Do what the leader says, and answer {ready, open, stands, drained, given}.

        ``word``: look, hold, take, open. ``target``: to be given by communicator, as :meth:`Given.rows` names them.
        ``seconds``: after which the gate opens by itself. ``wait``: seconds that the answer may take, for what was
        asked for to become true. ``drain``: work that was given is to be complete, too. Raises :class:`Refused`.
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
        """Raises :class:`Refused` where the gate opened meanwhile."""
        if self._attempt != attempt or self._state not in ("closed", "taken") or not self._session.stands(0.0):
            raise Refused("the gate of the session has opened by itself: the leader took too long")
        self._state, self._until = "taken", time.monotonic() + TAKE_SECONDS
        self._changed.notify_all()

    def _stands(self, attempt: str, until: float) -> bool:
        """Whether the session stands at the target, by then."""
        with self._changed:
            self._changed.wait_for(lambda: self._attempt != attempt or self._state != "passing",
                                   max(0.0, until - time.monotonic()))
            if self._attempt != attempt or self._state not in ("closed", "taken"):
                return False
        return self._session.stands(max(0.0, until - time.monotonic()))

    # -- the applying thread ----------------------------------------------------------
    def gave(self) -> None:
        """A group of collectives was given: stop in front of the next call where that is what was waited for."""
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
        """Stand still where all members do, once the leader says so. ``gave_way``: why the checkpoint is given up.

        Raises :class:`Refused` where it is, or nothing is heard of the leader.
        """
        try:
            self._await_take(cut, gave_way)
            self._session.pause()
            try:
                with self._changed:
                    if self._state != "taken":  # its time was over before this thread came to it
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
