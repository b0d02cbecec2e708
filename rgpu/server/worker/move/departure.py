"""A session leaves: the shell around :data:`rgpu.migrate.move.source.SOURCE`, in its worker.

Every command of the table is one method here. Nothing is decided in this file:
a method carries out its command and returns what it found. If
:meth:`Departure.run` raises, the session runs on; an error with ``replay`` in its
detail means that copying may work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import msgspec
import structlog

from rgpu.checkpoint.manifest.state import SessionState
from rgpu.checkpoint.pages import pagehash
from rgpu.checkpoint.pages.frozen import FrozenPages, MomentView, freeze, look
from rgpu.checkpoint.pages.pages import PageTable, page_size
from rgpu.checkpoint.phases import Phases
from rgpu.link.data.frames import SealedConnection
from rgpu.link.faults import fault
from rgpu.link.messages.pages import LAST, REPLAY
from rgpu.migrate.move.machine import Command, Event
from rgpu.migrate.move.options import MoveOptions
from rgpu.migrate.move.source import SOURCE, Compared, Round, SourceRole, role_for
from rgpu.migrate.transfer import replay_link as wire
from rgpu.migrate.transfer.sender import PageSender
from rgpu.server.collectives.contributions import MOST_SENT
from rgpu.server.worker import session_state
from rgpu.server.worker.agent.agent_link import AgentLink
from rgpu.server.worker.apply.journal_tap import JournalTap
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.server.worker.copy_throttle import CopyThrottle
from rgpu.server.worker.move.catching_up import CatchUp
from rgpu.server.worker.move.measuring import measure
from rgpu.server.worker.move.probing import Prober
from rgpu.server.worker.move.role_shell import RoleShell
from rgpu.server.worker.move.throttle import SessionThrottle
from rgpu.session.errors import Fenced, LinkError, MoveFailed, RgpuError
from rgpu.session.objects.ahead import Ahead
from rgpu.session.objects.ahead import of as objects_ahead

log = structlog.get_logger(__name__)

DRAIN_SECONDS = 10.0  #: for the session's work to finish (SEMANTICS 19)
PACE_SECONDS = 0.15  #: time over which the program's own speed is measured, before its pages are copied
ARM_SECONDS = 10.0  #: for the agent to begin a new stream
MOST_ROUNDS_TOLD = 12
SLEEP_SECONDS = 60.0  #: at most, between two looks at the clock


def last_page_hashes(table: PageTable, view: MomentView, wanted: dict[int, list[int]]) -> tuple[int, int]:
    """Note in ``table`` that the other side has the view's pages except the wanted ones.

    ``wanted``: page indices by region address; emptied. Return (number of wanted pages, bytes). Raises
    :class:`LinkError` for pages that do not exist.
    """
    table.follow(view.regions())
    count = size = 0
    for region in view.regions():
        table.assume(region, view.hash_pages(region, table.key))
        for index in wanted.pop(region.address, []):
            if not 0 <= index < pagehash.page_count(region.size):
                raise LinkError(f"page {index} of {region.address:#x} is wanted, which is not there")
            table.forget(region, index)
            count += 1
            size += page_size(region, index)
    if wanted:
        raise LinkError(f"pages of {next(iter(wanted)):#x} are wanted, where the session has none")
    return count, size


class SourceWorker(Protocol):
    """The part of the source's worker that a departure uses."""

    progress: dict[str, Any]  #: of the move, as the worker describes itself

    @property
    def runtime(self) -> SessionRuntime:
        """Runtime of the session that leaves."""

    @property
    def link(self) -> AgentLink | None:
        """The attached agent."""

    def report(self, event: str, **values: Any) -> None:
        """Send the daemon an event."""

    def offer(self, leaving: Departure) -> None:
        """Keep the session paused until the record decides: the copy is complete. Raises :class:`Fenced`."""

    def go_on(self) -> None:
        """Apply calls again: the move is aborted."""

    def leave(self, reason: str) -> None:
        """End the worker: another one has the session."""


class Departure(RoleShell[SourceRole]):
    """One move of this worker's session. Make one for each; :meth:`run` it once."""

    def __init__(self, worker: SourceWorker, move: str, connection: SealedConnection, options: MoveOptions,
                 more: Callable[[], SealedConnection] | None = None, phases: Phases | None = None) -> None:
        """Prepare it. ``more()`` opens a further connection to the destination, for pages."""
        super().__init__(SOURCE, role_for(options), worker.runtime.session, "source")
        self.phases = phases or Phases()
        self.worker = worker
        self.runtime = worker.runtime
        self.move = move
        self.connection = connection
        self.called_off = ""  #: why the move was aborted from outside, before anything was offered
        self.sender = PageSender(connection, self.runtime.device, self.runtime.hash_key, fault, more,
                                 peer=options.pages != "stream")
        self.result: dict[str, Any] | None = None  #: statistics of the offered copy
        self.refusal: RgpuError | None = None  #: or why nothing was offered
        self.cut_pause = 0.0  #: seconds of the pause for the consistent snapshot
        self.repaired = 0  #: bytes of pages that differed in the last pause
        self._cut_began = self._since = 0.0
        self._ahead: Ahead | None = None  #: objects that the destination has made already, or is to make
        self._copying: CopyThrottle | None = None
        self._tap = JournalTap()
        self._prober = Prober(self.runtime, self._tap)
        self._throttle = SessionThrottle(self.runtime)
        self._replay: CatchUp | None = None
        self._cut: tuple[FrozenPages, SessionState] | None = None
        self._last: tuple[MomentView, SessionState] | None = None  #: the view and the state of the last pause

    def run(self) -> dict[str, Any]:
        """Send the session away: on return the session is paused and the destination has verified it; else it runs on,
        and this raises the refusal, or :class:`Fenced` where the session is not here any more.
        """
        try:
            self.drive("send")
        finally:
            self.sender.close()
        if self.called_off:  # between the offer and here
            self.tell("reconcile_resume", self.called_off)
        if self.result is None:
            raise self.refusal or Fenced(f"the session is not here any more: {self.role.reason}")
        return self.result

    def call_off(self, reason: str) -> None:
        """Abort the move, as its record says. The driving thread finds its connection closed."""
        with self.lock:
            if self.driving:
                self.called_off = reason or "the move was aborted"
                self.connection.close()
                return
        self.tell("reconcile_resume", reason)

    def _failed(self, command: Command, error: RgpuError) -> Event:
        failed = super()._failed(command, error)
        if not self.called_off:
            return failed
        self.error = Fenced(f"the move was called off: {self.called_off}; the session runs on here")
        return self.event("reconcile_resume", reason=self.called_off)

    # -- progress ---------------------------------------------------------------------
    def stepped(self, event: Event) -> None:
        """Note a step for ``rgpu migrate status`` and for waiting callers."""
        if event.kind == "round_done":
            self._tell("copying")
        elif event.kind == "measured":
            self._tell("chosen", why=self.role.why)
        elif event.kind == "drained" and event.now == self.role.paused_at and self.role.state != "cutting":
            self._tell("stopped")

    def _tell(self, phase: str, **values: Any) -> None:
        statistics = self.sender.statistics
        expected = self.role.expected
        progress = {"move": self.move, "phase": phase, "mode": self.role.mode, "round": statistics.rounds,
                    "pages_sent": statistics.pages_sent, "bytes_sent": statistics.bytes_sent,
                    "expected": expected.as_dict() if expected else {}, **values}
        self.worker.progress = progress
        self.worker.report("progress", **progress)

    def _statistics(self) -> dict[str, Any]:
        role = self.role
        self.phases.add("layouts", sum(self.sender.map_seconds))  # within the rounds
        pulled = self.sender.statistics.bytes_pulled > 0
        return {**self.sender.statistics.as_dict(), "verified": True, "position": self.runtime.applied,
                "mode": role.mode, "why": role.why, "expected": role.expected.as_dict() if role.expected else {},
                "mismatched_pages": role.mismatched, "repaired_bytes": self.repaired,
                "sampled_pages": role.sampled.compared, "sampled_mismatches": role.sampled.differing,
                "brownout_ms": (self._throttle.stood + self._prober.stood) * 1000, "cut_ms": self.cut_pause * 1000,
                "call_bytes": 0 if self._replay is None else self._replay.call_bytes,
                "pages_by": "peer" if pulled else "stream", "pages_why": self.sender.by_stream,
                "phases_ms": {**self.phases.ms(), **{f"destination.{name}": ms
                                                     for name, ms in self.sender.destination.items()}},
                "page_rounds": self.sender.page_rounds[:MOST_ROUNDS_TOLD],
                "pause_ms": (time.monotonic() - role.paused_at + self.cut_pause) * 1000}

    # -- while the program runs ----------------------------------------------------
    def do_begin(self, command: Command) -> Event:
        """Announce the session to the destination."""
        fault("connected")
        before = self.runtime.applied, time.monotonic()
        with self.phases.phase("begin"):
            self.sender.begin(self.runtime.session, self.move)
            self._govern(*before)
        return self.event("begun")

    def _govern(self, position: int, since: float) -> None:
        """Copy pages from now on only as fast as the program keeps its speed.

        ``position``, ``since``: an earlier position and its time (monotonic). Only where copying and kernels share
        processors: a GPU has streams of low priority for it.
        """
        if not getattr(self.runtime.device, "shares_processors", False):
            return
        time.sleep(max(0.0, since + PACE_SECONDS - time.monotonic()))
        throttle = self._copying = CopyThrottle((self.runtime.applied - position) / (time.monotonic() - since))

        def pace(busy: float) -> None:
            if not self.runtime.paused and (seconds := throttle.rest(time.monotonic(), self.runtime.applied, busy)):
                time.sleep(seconds)

        self.sender.pace = pace

    def do_send_round(self, command: Command) -> Event:
        """Send the pages that changed since the last round, while the program runs."""
        first = not self.sender.statistics.rounds
        with self.phases.phase("first_round" if first else "further_rounds"):
            began, rested = time.monotonic(), self._copying.rested if self._copying else 0.0
            before = self.sender.statistics.bytes_sent
            pages = self.sender.round()
            fault("round")
            seconds = time.monotonic() - began - ((self._copying.rested if self._copying else 0.0) - rested)
        sent = self.sender.statistics.bytes_sent - before
        if first and (pulls := self.sender.page_rounds):  # mapping and granting are done once
            sent, seconds = self.sender.statistics.bytes_pulled, pulls[0].get("pulls_ms", 0.0) / 1000
        return self.event("round_done", found=Round(pages, sent, seconds, self.sender.takes_objects))

    def do_measure(self, command: Command) -> Event:
        """Measure the input of the choice of a mode."""
        with self.phases.phase("choose"):
            return self.event("measured", found=measure(self.runtime.device, self.sender.table, self.role.speed,
                                                        self.role.first_seconds))

    def do_take_objects(self, command: Command) -> Event:
        """Collect contexts and modules, which the destination makes while the session runs.

        In a replay it makes them with the consistent snapshot.
        """
        with self.phases.phase("ahead"):
            self.runtime.pause()
            try:
                self._ahead = objects_ahead(self.runtime.live)
            finally:
                self.runtime.resume()
        return self.event("objects_taken", found=len(self._ahead.contents))

    def do_send_objects(self, command: Command) -> Event:
        """Send live objects ahead of the pause."""
        assert self._ahead is not None
        fault("ahead")
        with self.phases.phase("ahead"):
            self.phases.add("ahead.destination", self.sender.send_objects(self._ahead.encode()) / 1000)
        fault("ahead.sent")
        return self.event("objects_made")

    # -- the pause -------------------------------------------------------------------
    def do_pause(self, command: Command) -> Event:
        """Pause the session and wait for its work."""
        if self._replay is not None:
            self.phases.add("replay", time.monotonic() - self._since)
            fault("replay.caught_up")
        with self.phases.phase("pause.drain"):
            self.runtime.quiesce(DRAIN_SECONDS)
        return self.event("drained")

    def do_resume(self, command: Command) -> None:
        """Let the session run on."""
        self.worker.go_on()

    def _stopped(self) -> None:
        fault("paused")
        self.connection.sock.settimeout(max(0.5, self.role.options.limit))

    def do_send_rest(self, command: Command) -> Event:
        """Send every page that differs, and the state, in the pause."""
        self._stopped()
        with self.phases.phase("pause.hash"):
            view = look(self.runtime.device, self.runtime.hash_key)
        with self.phases.phase("pause.pages"), self._seeing(view):
            self.sender.round()
        with self.phases.phase("pause.state"):
            state = session_state.take(self.runtime, view, self.sender.known, MOST_SENT)
            if self._ahead is not None and self._ahead.contents:
                state.live = self._ahead.shorten(state.live)
        with self.phases.phase("pause.verify"):
            self.sender.finish(state)
        fault("sent")
        return self.event("verified")

    @contextmanager
    def _seeing(self, view: MomentView) -> Iterator[None]:
        """Send the pages of one moment: put a view, which has all that a page stream reads, in the device's place."""
        device = self.sender.device
        self.sender.device = view  # type: ignore[assignment]
        try:
            yield
        finally:
            self.sender.device = device

    # -- by replay ---------------------------------------------------------------------
    def do_open_tap(self, command: Command) -> Event:
        """Keep the calls applied from now on. With a fast path that begins with the agent's next connection."""
        link = self.worker.link
        armed = not self.runtime.path.every_record and link is not None
        tap = self._tap = JournalTap(armed=armed)
        self._prober = Prober(self.runtime, tap)
        self.runtime.loop.tap = tap
        if armed and link is not None:
            link.close()
            if not tap.wait_running(ARM_SECONDS):
                raise MoveFailed("the agent did not come back to begin its stream of calls anew")
        return self.event("tapped")

    def do_close_tap(self, command: Command) -> None:
        """Stop keeping calls for the destination."""
        self.runtime.loop.tap = None

    def do_pause_for_cut(self, command: Command) -> Event:
        """Pause the session for a consistent snapshot."""
        self._since = time.monotonic()
        self.runtime.quiesce(DRAIN_SECONDS)
        return self.event("drained")

    def do_take_cut(self, command: Command) -> Event:
        """Copy changed pages aside on the device, and take the session's state."""
        self._cut_began = time.monotonic()
        fault("replay.cut")
        frozen = freeze(self.runtime.device, self.sender.table)
        try:
            self._cut = frozen, session_state.take(self.runtime, frozen, contributions=MOST_SENT)
        except BaseException:
            frozen.release()
            raise
        return self.event("cut_taken")

    def do_start_samples(self, command: Command) -> None:
        """Begin to compare samples of pages with the destination's replay."""
        self.cut_pause = time.monotonic() - self._cut_began
        self._prober.start()

    def do_stop_samples(self, command: Command) -> None:
        """Stop comparing samples."""
        self._prober.stop()

    def do_send_cut(self, command: Command) -> Event:
        """Send the consistent snapshot while the program runs on; return when the destination has verified all of it.
        """
        assert self._cut is not None
        frozen, state = self._cut
        with self._seeing(frozen):
            self._tell("cut", position=state.position)
            self.sender.round()
            fault("replay.cut.sent")
            self.sender.finish(state)
        self.connection.send(REPLAY, msgspec.msgpack.encode({"position": state.position}))
        fault("replay.cut.verified")
        self.phases.add("cut", time.monotonic() - self._since)
        return self.event("cut_verified")

    def do_release_cut(self, command: Command) -> None:
        """Free the copies of the consistent snapshot."""
        assert self._cut is not None
        self._cut[0].release()

    def do_slow_down(self, command: Command) -> None:
        """Throttle the program while the destination catches up."""
        self._since = time.monotonic()
        self._throttle.share = self.role.options.max_slowdown
        self._throttle.start()

    def do_full_speed(self, command: Command) -> None:
        """End the throttle."""
        self._throttle.stop()

    def do_ship_calls(self, command: Command) -> Event:
        """Ship calls made since the snapshot point, and read how far behind the destination is."""
        if self._replay is None:
            fault("replay")
            self._replay = CatchUp(self.connection, self._tap, self._tell)
        shipped = self._replay.ship(self._prober.pages)
        trouble = self._prober.error
        for sampled, behind in shipped.samples:
            log.info("replay sampled", compared=sampled.compared, differing=sampled.differing, pages=sampled.pages,
                     behind_ms=round(behind * 1000))
        return self.event("shipped", found=replace(shipped, trouble=trouble.message if trouble else "",
                                                   broken=bool(self.runtime.executor.error)))

    def do_send_last_calls(self, command: Command) -> None:
        """Ship the last calls, in the pause."""
        assert self._replay is not None
        self._stopped()
        with self.phases.phase("pause.settle"):
            self._replay.rest()

    def do_compare(self, command: Command) -> Event:
        """Send the hashes of all pages; the destination answers which of its pages differ."""
        assert self._replay is not None
        with self.phases.phase("pause.settle"):
            view = look(self.runtime.device, self.runtime.hash_key)
            state = session_state.take(self.runtime, view)
            state.live = {"digest": wire.objects_digest(state.live)}
            self._last = view, state
            fault("replay.last")
            for last, data in wire.pieces(state):
                self.connection.send(LAST, last, data)
            wanted = self._replay.wanted(self.role.deadline)
            pages, self.repaired = last_page_hashes(self.sender.table, view, wanted)
        return self.event("compared", found=Compared(pages, self.role.deadline - time.monotonic()))

    def do_repair(self, command: Command) -> Event:
        """Send the pages that differ after the replay, in the pause."""
        assert self._last is not None
        view, state = self._last
        with self.phases.phase("pause.settle"), self._seeing(view):
            fault("replay.repair")
            self.sender.round()
            state.regions = []
            state.live = state.answers = state.printed = None
            self.sender.finish(state)
        fault("sent")
        return self.event("verified")

    # -- after the copy ------------------------------------------------------------------
    def do_offer(self, command: Command) -> Event:
        """Offer the session: from here on the record decides."""
        self.worker.offer(self)
        return self.event("promised")

    def do_report_offered(self, command: Command) -> None:
        """Keep the statistics as the result of the request."""
        self.result = self._statistics()

    def do_report_failed(self, command: Command) -> None:
        """Keep the failure as the result of the request."""
        refusal = self.error or MoveFailed(command.reason)
        if self.role.copy_may_help:
            refusal = MoveFailed(f"the replay was given up: {command.reason}", replay=True)
        if self.role.sampled.compared:
            refusal.detail["mismatched"] = self.role.sampled.share
        self.refusal = refusal

    def do_watch_deadline(self, command: Command) -> None:
        """Begin to watch the promised downtime, in a thread of its own."""
        threading.Thread(target=self._watch, name="deadline", daemon=True).start()

    def _watch(self) -> None:
        while not self.over.wait(min(max(0.0, self.role.deadline - time.monotonic()), SLEEP_SECONDS)):
            if time.monotonic() >= self.role.deadline:
                self.tell("tick")

    def do_write_abort(self, command: Command) -> None:
        """Have the daemon write the abort to the registry; it answers with ``withdrawn``.

        Nothing is lost without a daemon: the request is repeated.
        """
        fault("withdraw")
        self.worker.report("withdraw", move=self.move, reason=command.reason)

    def do_read_record(self, command: Command) -> None:
        """Have the daemon read the session's record."""
        self.worker.report("read_record", move=self.move)

    def do_forget(self, command: Command) -> None:
        """Forget the session: another owner has it."""
        self.worker.leave(command.reason)
