"""Answers to monitors (NVML) about the sessions of the agent's program, without making one.

A process with a session sees that session's devices. One without sees those of
the run's first live session; before there is any, those of the session that was
made for the program before it started, or else the device that the pool would
choose now, without a promise. All processes of a gang's run see the run's list of devices, as the driver shows it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rgpu.client.run.pool_requests import PoolRequests
from rgpu.link import versions
from rgpu.link.loggers import get_logger
from rgpu.session.errors import Corrupt, NotFound, RgpuError
from rgpu.session.facts import SessionFacts

if TYPE_CHECKING:
    from rgpu.client.shim_link.usage_page import Usage
    from rgpu.session.observed import Observation

log = get_logger(__name__)

CANDIDATE_SECONDS = 10.0  #: how long a candidate's facts are given out before the pool is asked again
UNKNOWN_SECONDS = 2.0  #: how long a refusal is given out
CANDIDATE_TIMEOUT = 5.0
USAGE_SECONDS = 0.5  #: how long a request waits for the page of a session that has just begun


@dataclass(frozen=True, slots=True)
class Candidate:
    """A device that a session would get, as the pool describes it."""

    facts: SessionFacts
    release: str


@dataclass
class _Seen:
    pid: int
    facts: SessionFacts
    release: str
    first: int = 0  #: its first device among those of the run's list
    usage: Usage | None = None
    waited: bool = False  #: for the page, which is done once


class Observer:
    """Facts of the live sessions, in the order in which they were made; thread-safe."""

    def __init__(self, requests: PoolRequests, wanted: Callable[[], dict[str, Any]]) -> None:
        """``wanted()``: the arguments of ``session.candidate``."""
        self._requests, self._wanted = requests, wanted
        self._lock = threading.Lock()
        self._counted = threading.Condition(self._lock)
        self._asking = threading.Lock()
        self._sessions: dict[str, _Seen] = {}
        self._candidate: Candidate | RgpuError | None = None
        self._list: Candidate | None = None  #: the devices of a gang's run
        self._fresh_until = 0.0

    # -- the agent's reports ------------------------------------------------------------
    def began(self, session: str, pid: int, facts: SessionFacts, release: str, first: int = 0) -> None:
        """Note that a process has a session from now on. ``first``: in a gang, its first device in the run's list."""
        with self._lock:
            self._sessions[session] = _Seen(pid, facts, release, first)

    def listed(self, facts: SessionFacts, release: str) -> None:
        """Note the devices of a gang's run: monitors see all of them from now on."""
        self._list = Candidate(facts, release)

    def placed(self, facts: SessionFacts, release: str) -> None:
        """Note that a session waits for the program's first process: the pool is not asked for a device any more."""
        with self._asking:
            self._candidate, self._fresh_until = Candidate(replace(facts, number=0), release), float("inf")

    def counts(self, session: str, usage: Usage) -> None:
        """Note the page on which the session's shim keeps its figures."""
        with self._lock:
            if session in self._sessions:
                self._sessions[session].usage = usage
                self._counted.notify_all()

    def ended(self, session: str) -> None:
        """Note that a session ended."""
        with self._lock:
            self._sessions.pop(session, None)
            self._counted.notify_all()

    # -- requests of monitors --------------------------------------------------------------
    def answer(self, pid: int) -> Observation:
        """Answer the process ``pid``. Raises :class:`RgpuError` when the pool has no place, or does not answer."""
        from rgpu.session.observed import Observation

        with self._lock:
            mine = self._session_for(pid)
            if mine is not None and mine.usage is None and not mine.waited:
                # Its shim has sent the page before cuInit returned: the session's thread is about to read it.
                self._counted.wait(USAGE_SECONDS)
                mine.waited = True
            seen = list(self._sessions.values())
        if self._list is not None:
            return self._observed(self._list.facts, self._list.release, seen)
        if mine is None:
            found = self.candidate()
            return Observation(found.facts, False, found.release, (0,) * len(found.facts.devices))
        return self._observed(mine.facts, mine.release, [mine])

    @staticmethod
    def _observed(facts: SessionFacts, release: str, sessions: Sequence[_Seen]) -> Observation:
        from rgpu.session.observed import Observation, Process

        used = [0] * len(facts.devices)
        processes = []
        for one in sessions:
            count = len(one.facts.devices)
            figures = one.usage.used(count) if one.usage is not None else (0,) * count
            for device, figure in enumerate(figures, one.first):
                # The shim's figure is not trusted; only the program's own tools see it.
                bytes_used = min(figure, one.facts.quota or figure)
                used[device] += bytes_used
                processes.append(Process(one.pid, device, bytes_used))
        return Observation(facts, bool(sessions), release, tuple(used), tuple(processes))

    def session_of(self, pid: int) -> str:
        """Return the name of the session that the process ``pid`` has. Raises :class:`NotFound`."""
        with self._lock:
            for name, seen in self._sessions.items():
                if seen.pid == pid:
                    return name
        raise NotFound(f"process {pid} has no session: it has to call cuInit first")

    def _session_for(self, pid: int) -> _Seen | None:
        seen = list(self._sessions.values())
        return next((one for one in seen if one.pid == pid), seen[0] if seen else None)

    def candidate(self) -> Candidate:
        """Return the device that a session would get now. Raises :class:`RgpuError`. Both are kept for a while."""
        with self._asking:
            if time.monotonic() >= self._fresh_until:
                try:
                    self._candidate, lasting = self._ask(), CANDIDATE_SECONDS
                except RgpuError as error:
                    self._candidate, lasting = error, UNKNOWN_SECONDS
                self._fresh_until = time.monotonic() + lasting
            found = self._candidate
        assert found is not None
        if isinstance(found, RgpuError):
            raise found
        return found

    def _ask(self) -> Candidate:
        reply = self._requests.call("session.candidate", self._wanted(), CANDIDATE_TIMEOUT)
        try:
            versions.check(reply.get("versions"), "the pool")
            return Candidate(replace(SessionFacts.from_dict(reply["facts"]), number=0),
                             str(reply.get("driver_release") or ""))
        except (KeyError, TypeError, AttributeError) as error:
            raise Corrupt(f"the pool's reply to session.candidate cannot be read: {error!r}",
                          reason="reply") from error
