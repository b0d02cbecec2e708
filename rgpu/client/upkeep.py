"""What a session's loop does once a second: statistics, tickets, journal limits, checkpoints."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import structlog

from rgpu.client import local
from rgpu.client.data_link import STATS
from rgpu.client.desk import Grant
from rgpu.client.journal import SpillJob
from rgpu.client.spill import SpillFile, write_segment
from rgpu.session.errors import LinkError

if TYPE_CHECKING:
    from rgpu.client.shipper import Shipper

log = structlog.get_logger(__name__)

RENEW_BEFORE = 1800.0  #: seconds before a ticket expires
RENEW_RETRY = 30.0
FULL_SECONDS = 1.0  #: a journal that is full for less is not worth a word
CHECKPOINT_INTERVAL = 10.0  #: between two requests for one
CHECKPOINT_TIMEOUT = 300.0


class Upkeep:
    """All methods run in the shipper's loop; what takes long goes to the desk's threads."""

    def __init__(self, shipper: Shipper) -> None:
        self._shipper = shipper
        self._state = (local.RUNNING, "")
        self._last_stats: dict[str, Any] = {}
        self._full_since = 0.0  #: monotonic; 0: the journal is not full
        self._renewing = self._checkpointing = False
        self._next_renewal = self._next_checkpoint = 0.0

    def run(self, now: float) -> None:
        self._shipper.release()
        self.spill()
        self.tell_state()
        self._send_statistics()
        self._renew(now)
        self._ask_for_checkpoint(now)

    # -- the journal's limit ----------------------------------------------------------
    def spill(self) -> None:
        """Have the oldest calls written to a file, if memory nears the limit."""
        shipper = self._shipper
        job = shipper.journal.spill_job()
        if job is not None:
            session = shipper.identity.session
            shipper.desk.submit(lambda: shipper.post(self._spilled, job, *write_segment(job, session)))

    def _spilled(self, job: SpillJob, file: SpillFile | None, error: str) -> None:
        if error:
            log.error("the journal cannot be spilled", session=self._shipper.identity.session, reason=error)
        self._shipper.journal.spilled(job, file, error)
        self._shipper.release()
        self.spill()
        self.tell_state()

    def tell_state(self) -> None:
        """Tell the shim when it shall stop publishing, and when it may go on."""
        shipper = self._shipper
        journal = shipper.journal
        reason = journal.block_reason()
        if not reason:
            self._full_since = 0.0
        elif not self._full_since:
            self._full_since = time.monotonic()
        if time.monotonic() - self._full_since < FULL_SECONDS:
            reason = ""  # ordinary back-pressure: nothing to tell
        if reason and journal.policy.recover and journal.protected and journal.policy.on_full == "unprotected":
            journal.unprotect()
            journal.applied(shipper.acknowledged, shipper.cursor)
            shipper.release()
            reason = ""
        if not reason and journal.policy.recover and not journal.protected:
            state = (local.UNPROTECTED, "the journal was full: the session can be moved, but not recovered")
        else:
            state = (local.BLOCK if reason else local.RUNNING, reason)
        if state != self._state:
            self._state = state
            shipper.peer.state(*state)

    def _ask_for_checkpoint(self, now: float) -> None:
        if self._shipper.journal.wants_checkpoint and not self._checkpointing and now >= self._next_checkpoint \
                and self._shipper.link is not None:
            self._checkpointing, self._next_checkpoint = True, now + CHECKPOINT_INTERVAL
            self._shipper.desk.submit(self._checkpoint)

    def _checkpoint(self) -> None:
        session = self._shipper.identity.session
        log.info("the journal reached its limit: asking for a checkpoint", session=session)
        self._shipper.desk.quietly("session.checkpoint", {"session": session, "reason": "journal limit"},
                                   CHECKPOINT_TIMEOUT)
        self._shipper.post(self._checkpointed)

    def _checkpointed(self) -> None:
        self._checkpointing = False

    # -- tickets ------------------------------------------------------------------------
    def _renew(self, now: float) -> None:
        shipper = self._shipper
        if not self._renewing and now >= self._next_renewal and shipper.grant.expires - time.time() < RENEW_BEFORE:
            self._renewing, self._next_renewal = True, now + RENEW_RETRY
            shipper.desk.submit(lambda: shipper.post(self._renewed, shipper.desk.renew(shipper.identity.session)))

    def _renewed(self, grant: Grant | None) -> None:
        self._renewing = False
        self._shipper.grant = grant or self._shipper.grant

    # -- statistics ---------------------------------------------------------------------
    def statistics(self) -> dict[str, Any]:
        """What ``rgpu ps`` shows of the client's side."""
        shipper, journal = self._shipper, self._shipper.journal
        return {"calls": journal.last_seq, "awaited_calls": shipper.awaited, "bytes": journal.total_bytes,
                "pid": shipper.identity.pid, "command": shipper.identity.command, "journal_bytes": journal.kept_bytes,
                "blocked_reason": self._state[1], "divergences": len(shipper.deliveries.divergences),
                "unsupported_calls": list(shipper.unsupported), **shipper.modules.statistics()}

    def tell_anew(self) -> None:
        """Another worker is attached, which knows nothing yet."""
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
