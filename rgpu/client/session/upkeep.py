"""Tasks of a session's loop once a second: statistics, tickets, journal limits, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from rgpu.client.journal.keeping import ApplyRate, Exposure, Facts, decide, full_reason
from rgpu.client.journal.spill import SpillFile, SpillJob, write_segment
from rgpu.client.run.pool_requests import Grant
from rgpu.client.session.exchanging import Exchanging
from rgpu.client.session.parts import Parts
from rgpu.client.shim_link.local import LocalPeer
from rgpu.client.shim_link.usage_page import Usage
from rgpu.link.loggers import get_logger
from rgpu.link.messages.data import STATS
from rgpu.link.messages.shim import JOURNAL_FULL, RUNNING, UNPROTECTED
from rgpu.session.calls.wire import BY_ID
from rgpu.session.errors import LinkError, RgpuError

log = get_logger(__name__)

_STATES = {Exposure.RUNNING: RUNNING, Exposure.BLOCK: JOURNAL_FULL, Exposure.UNPROTECTED: UNPROTECTED}
_EXPOSURES = {state: exposure.value for exposure, state in _STATES.items()}
RENEW_BEFORE = 1800.0  #: seconds before a ticket expires
RENEW_RETRY = 30.0
WAITS = 8  #: wire calls whose waits are reported
CHECKPOINT_TIMEOUT = 1800.0  #: s; a store may be slow, or limited in bandwidth


def longest_waits(usage: Usage | None) -> dict[str, tuple[int, float]]:
    """Return the wire calls that the program awaited longest in all, the longest first: (times, seconds) by name."""
    known = [] if usage is None else [row for row in usage.awaited() if row[0] in BY_ID]
    known.sort(key=lambda row: -row[2])
    return {BY_ID[number].name: (count, round(spent / 1e9, 6)) for number, count, spent in known[:WAITS]}


class Session(Parts, Protocol):
    """The part of the session's loop that this module uses."""

    grant: Grant
    peer: LocalPeer
    awaited: int
    exchanging: Exchanging
    usage: Usage | None
    unsupported: dict[str, None]

    def post(self, function: Callable[..., None], *args: Any) -> None:
        """Have the loop call ``function`` with these arguments."""


class Upkeep:
    """Upkeep of one session. All methods run in the shipper's loop; long tasks run on the requests's threads."""

    def __init__(self, shipper: Session) -> None:
        self._shipper = shipper
        self._state = (RUNNING, "")
        self._kept_reason = ""  #: for `ps`
        self._last_stats: dict[str, Any] = {}
        self._full_since = 0.0  #: monotonic; 0: the journal is not full
        self._renewing = self._checkpointing = False
        self._next_renewal = 0.0
        self._requested = float("-inf")  #: monotonic; when a checkpoint was requested last
        self._store_error = ""  #: why that request failed
        self._covered = 0  #: a durable checkpoint covers every call ≤ it
        self._covered_at = time.monotonic()
        self._rate = ApplyRate()
        self._same_host = "not attached"  #: state of sharing memory in this attachment, or the last one

    def run(self, now: float) -> None:
        """Do what is due once a second. ``now``: monotonic seconds."""
        self._shipper.release()
        self.spill()
        self._rate.sample(self._shipper.shipping.acknowledged, now)
        self.tell_state()
        self._send_statistics()
        self._renew(now)
        requests = self._shipper.requests
        if requests.nodes.refresh_due(now):  # an undisturbed session makes no other call to the pool for days
            requests.submit(requests.ask_nodes)

    def covered(self, position: int) -> None:
        """Note that a durable checkpoint covers every call up to ``position``."""
        if position > self._covered:
            self._covered, self._covered_at, self._store_error = position, time.monotonic(), ""

    # -- the journal's limit ----------------------------------------------------------
    def spill(self) -> None:
        """Have the oldest calls written to a file, if memory nears the limit."""
        shipper = self._shipper
        job = shipper.journal.spill_job()
        if job is not None:
            session = shipper.identity.session
            shipper.requests.submit(lambda: shipper.post(self._spilled, job, *write_segment(job, session)))

    def _spilled(self, job: SpillJob, file: SpillFile | None, error: str) -> None:
        if error:
            log.error("the journal cannot be spilled", session=self._shipper.identity.session, reason=error)
        self._shipper.journal.spilled(job, file, error)
        self._shipper.release()
        self.spill()
        self.tell_state()

    def facts(self, now: float) -> Facts:
        """Return the state of the journal, for :func:`rgpu.client.journal.keeping.decide`."""
        journal = self._shipper.journal
        calls = max(0, journal.last_seq - self._covered)
        if not calls:
            self._covered_at = now  # nothing is exposed
        full = now - (self._full_since or now)
        held = journal.held_bytes
        return Facts(held, held + journal.filed_bytes, calls, journal.protected, full,
                     now - self._covered_at, self._rate.predict(calls), journal.spill_error, self._store_error,
                     now - self._requested, self._checkpointing, self._shipper.link is not None,
                     given_up=journal.given_up)

    def tell_state(self) -> None:
        """Tell the shim to stop publishing calls, or to go on; request a checkpoint when one is due."""
        shipper, now = self._shipper, time.monotonic()
        journal = shipper.journal
        rules = journal.policy.rules
        facts = self.facts(now)
        if not full_reason(rules, facts):
            self._full_since = 0.0
        elif not self._full_since:
            self._full_since = now
        decision = decide(rules, facts)
        if decision.checkpoint:
            self._ask_for_checkpoint(now, decision.why)
        if decision.exposure is Exposure.UNPROTECTED and journal.protected:
            journal.unprotect()
            journal.applied(shipper.shipping.acknowledged, shipper.cursor)
            shipper.release()
        self._kept_reason = decision.reason
        state = _STATES[decision.exposure], decision.reason
        if state[0] == RUNNING:
            state = RUNNING, ""
        if state != self._state:
            self._state = state
            shipper.peer.state(*state)

    def shared(self, peer: str) -> None:
        """Keep no journal from now on: device memory is shared with session ``peer``, which a replay cannot restore."""
        shipper, journal = self._shipper, self._shipper.journal
        if journal.given_up or not journal.policy.recover:
            return
        journal.unprotect(f"it shares device memory with session {peer}: it can be neither moved nor recovered")
        journal.applied(shipper.shipping.acknowledged, shipper.cursor)
        shipper.release()
        self.tell_state()

    def _ask_for_checkpoint(self, now: float, why: str) -> None:
        self._checkpointing, self._requested = True, now
        self._shipper.requests.submit(self._checkpoint, why)

    def _checkpoint(self, why: str) -> None:
        session = self._shipper.identity.session
        log.info("asking for a checkpoint", session=session, reason=why)
        error = ""
        try:
            self._shipper.requests.call("session.checkpoint", {"session": session, "reason": why}, CHECKPOINT_TIMEOUT)
        except RgpuError as failure:
            error = failure.message
            log.warning("no checkpoint was written", session=session, error=failure.code, reason=error)
        self._shipper.post(self._checkpointed, error)

    def _checkpointed(self, error: str) -> None:
        self._checkpointing, self._store_error = False, error
        self.tell_state()

    # -- tickets ------------------------------------------------------------------------
    def _renew(self, now: float) -> None:
        if now >= self._next_renewal and self._shipper.grant.seconds_left < RENEW_BEFORE:
            self._next_renewal = now + RENEW_RETRY
            self.renew_now(now)

    def renew_now(self, now: float) -> None:
        """Request another ticket, unless a request is under way: the present one is old, or a node refused it."""
        shipper = self._shipper
        if not self._renewing:
            self._renewing = True
            session = shipper.identity.session
            shipper.requests.submit(lambda: shipper.post(self._renewed, shipper.requests.renew(session)))

    def _renewed(self, grant: Grant | None) -> None:
        self._renewing = False
        self._shipper.grant = grant or self._shipper.grant

    # -- statistics ---------------------------------------------------------------------
    def statistics(self) -> dict[str, Any]:
        """Return what ``rgpu ps`` shows of the client's side."""
        shipper, journal = self._shipper, self._shipper.journal
        if shipper.link is not None:
            self._same_host = shipper.link.host.state
        faults, waiting = shipper.usage.managed() if shipper.usage is not None else (0, 0)
        return {"calls": journal.last_seq, "awaited_calls": shipper.awaited,
                "exchanged_calls": shipper.exchanging.answered, "bytes": journal.total_bytes,
                "pid": shipper.identity.pid, "asked_pid": shipper.identity.asked_pid,
                "command": shipper.identity.command, "journal_bytes": journal.kept_bytes,
                "blocked_reason": self._kept_reason, "exposure": _EXPOSURES[self._state[0]],
                "divergences": len(shipper.deliveries.divergences),
                "divergence": shipper.deliveries.divergences[0].what if shipper.deliveries.divergences else "",
                "unsupported_calls": list(shipper.unsupported), **shipper.modules.statistics(),
                "shared_bytes_to_device": shipper.bulk.named_bytes,
                "shared_bytes_from_device": shipper.returns.areas.bytes,
                "managed_faults": faults, "managed_waiting": waiting, "waits": longest_waits(shipper.usage),
                "same_host": self._same_host}

    def tell_anew(self) -> None:
        """Send all statistics again: another worker is attached."""
        self._last_stats = {}

    def _send_statistics(self) -> None:
        statistics = self.statistics()
        link = self._shipper.link
        if link is not None and link.ready and statistics != self._last_stats:
            try:
                link.send_map(STATS, statistics)
                self._last_stats = statistics
            except LinkError as error:
                self._shipper.down(link, error)
