"""A session leaves: the source's side of a move, in the steps of :data:`rgpu.migrate.roles.SOURCE`.

Rounds of pages while the program runs; then either the last pause at once
(copy), or a cut, which streams while the program runs on, and a replay at the
destination of what it does meanwhile (replay). Which of the two ``auto`` takes
is decided by :mod:`rgpu.migrate.forecast` from what the first round measured,
and again from each sample of what the replay came to (:mod:`.probing`).

A replay that cannot be ended well raises :class:`MoveFailed` with ``replay`` in
its detail: whoever asked may try again by copying. Whatever is raised, the
session runs on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from rgpu.checkpoint import pagehash
from rgpu.checkpoint.device import PAGE, Device
from rgpu.checkpoint.frozen import HOST_LIMIT, RESERVE, FrozenPages, MomentView, freeze, look
from rgpu.checkpoint.pages import PageTable, page_size
from rgpu.checkpoint.phases import Phases
from rgpu.checkpoint.state import SessionState
from rgpu.link.faults import fault
from rgpu.link.frames import SealedConnection
from rgpu.migrate import forecast, sampling
from rgpu.migrate.wishes import Wishes
from rgpu.server import replay_stream as wire
from rgpu.server.brake import Brake
from rgpu.server.catching_up import CatchUp, replay_failed
from rgpu.server.governor import Governor
from rgpu.server.journal_tap import JournalTap
from rgpu.server.page_stream import PageSender
from rgpu.server.probing import Prober
from rgpu.session.ahead import Ahead
from rgpu.session.ahead import of as objects_ahead
from rgpu.session.errors import DeviceError, Fenced, LinkError, MoveFailed, RgpuError

if TYPE_CHECKING:
    from rgpu.server.worker import Worker
    from rgpu.server.worker_tasks import Sending

log = structlog.get_logger(__name__)

MAX_ROUNDS = 6  #: pre-copy rounds before the last one
SMALL_ROUND = 64  #: pages: copying these in the pause is cheaper than another round
SHRINK = 0.7  #: a round that is not at least this much smaller than the last one gains nothing
DRAIN_SECONDS = 10.0
SAMPLE_SECONDS = 0.1  #: between two looks at what changes
PACE_SECONDS = 0.15  #: of running that the program's own speed is taken from, before its pages are copied
ARM_SECONDS = 10.0  #: for the agent to begin a new stream
LOOKS = 3  #: tries to measure
SHORT_ROUND = 0.004  #: seconds: pages that take no longer are as well copied in the pause, over a link of any speed
MOST_ROUNDS_TOLD = 12


def last_page_hashes(table: PageTable, view: MomentView, wanted: dict[int, list[int]]) -> tuple[int, int]:
    """Tell ``table`` that the other side has the view's pages, all but those wanted; (how many these are, bytes)."""
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


class Departure:
    """One move of this worker's session. Make one for each; :meth:`run` it once."""

    def __init__(self, worker: Worker, sending: Sending, wishes: Wishes,
                 more: Callable[[], SealedConnection] | None = None, phases: Phases | None = None) -> None:
        """``more`` opens a further connection to the destination, for pages."""
        self.phases = phases or Phases()
        self.worker = worker
        self.runtime = worker.runtime
        self.sending = sending
        self.wishes = wishes
        self.sender = PageSender(sending.connection, self.runtime.device, self.runtime.hash_key, fault, more,
                                 peer=wishes.pages != "stream")
        self.mode = wishes.mode
        self.reason = f"{wishes.mode} was asked for"
        self.brownout = 0.0
        self.cut_pause = 0.0
        self.mismatched = 0  #: pages that differed in the last pause
        self.repaired = 0  #: their bytes
        self.sampled = sampling.Sampled(0, 0, 0)  #: the last sample before it
        self.call_bytes = 0
        self.expected: dict[str, Any] = {}
        self._speed = forecast.ASSUMED_SPEED  #: of the link, bytes/s
        self._first_seconds = 0.0  #: that the first round took
        self._ahead: Ahead | None = None  #: what the destination has made already
        self._governor: Governor | None = None
        self._measured: forecast.Measured | None = None  #: unless nothing but copying was asked for

    @property
    def connection(self) -> SealedConnection:
        return self.sender.connection

    def run(self, session: str) -> dict[str, Any]:
        """On return the session is paused and the destination has verified it; else it runs on, and this raises."""
        try:
            return self._run(session)
        finally:
            self.sender.close()

    def _run(self, session: str) -> dict[str, Any]:
        fault("connected")
        before = self.runtime.applied, time.monotonic()
        with self.phases.phase("begin"):
            self.sender.begin(session, self.sending.move)
            self._govern(*before)
        with self.phases.phase("first_round"):
            self._first_round()
        with self.phases.phase("choose"):
            self._choose()
        if self.mode == "replay":
            statistics = self._by_replay()
        else:
            with self.phases.phase("ahead"):
                self._make_ahead()
            with self.phases.phase("further_rounds"):
                self._further_rounds()
            self._check_promise()
            statistics = self._last_pause_of_copy()
        self.phases.add("layouts", sum(self.sender.map_seconds))  # within the rounds
        pulled = self.sender.statistics.bytes_pulled > 0
        return {**self.sender.statistics.as_dict(), "verified": True, "position": self.runtime.applied,
                "mode": self.mode, "why": self.reason, "expected": self.expected,
                "mismatched_pages": self.mismatched, "repaired_bytes": self.repaired,
                "sampled_pages": self.sampled.compared, "sampled_mismatches": self.sampled.differing,
                "brownout_ms": self.brownout * 1000, "cut_ms": self.cut_pause * 1000, "call_bytes": self.call_bytes,
                "pages_by": "peer" if pulled else "stream", "pages_why": self.sender.by_stream,
                "phases_ms": {**self.phases.ms(), **{f"destination.{name}": ms
                                                     for name, ms in self.sender.destination.items()}},
                "page_rounds": self.sender.page_rounds[:MOST_ROUNDS_TOLD],
                **statistics}

    # -- while the program runs ----------------------------------------------------
    def _govern(self, position: int, since: float) -> None:
        """From now on pages are copied no faster than the program bears. ``position``, ``since``: seen before.

        Only where copying and kernels share processors: a GPU has streams of low priority for it.
        """
        if not getattr(self.runtime.device, "shares_processors", False):
            return
        time.sleep(max(0.0, since + PACE_SECONDS - time.monotonic()))
        governor = self._governor = Governor((self.runtime.applied - position) / (time.monotonic() - since))

        def pace(busy: float) -> None:
            if not self.runtime.paused and (seconds := governor.rest(time.monotonic(), self.runtime.applied, busy)):
                time.sleep(seconds)

        self.sender.pace = pace

    def _round(self) -> int:
        dirty = self.sender.round()
        fault("round")
        if self.mode == "copy":  # what the last pause would cost if nothing more were gained
            stop = round(dirty * PAGE / self._speed * 1000, 1)
            self.expected = {"downtime_ms": stop, "brownout_ms": 0.0, "total_ms": stop}
        self._tell("copying")
        return dirty

    def _tell(self, phase: str, **values: Any) -> None:
        """For ``rgpu migrate status`` and whoever waits."""
        statistics = self.sender.statistics
        progress = {"move": self.sending.move, "phase": phase, "mode": self.mode, "round": statistics.rounds,
                    "pages_sent": statistics.pages_sent, "bytes_sent": statistics.bytes_sent,
                    "expected": self.expected, **values}
        self.worker.tasks.progress = progress
        self.worker.report("progress", **progress)

    def _first_round(self) -> None:
        began = time.monotonic()
        self._round()
        seconds = time.monotonic() - began - (self._governor.rested if self._governor else 0.0)
        sent = self.sender.statistics.bytes_sent
        if pulls := self.sender.page_rounds:  # mapping and granting are done once
            sent, seconds = self.sender.statistics.bytes_pulled, pulls[0].get("pulls_ms", 0.0) / 1000
        if sent > 1 << 20:
            self._speed = sent / max(seconds, 1e-6)
        self._first_seconds = seconds

    def _choose(self) -> None:
        """Replay or copy; ``auto`` measures and compares."""
        if self.wishes.mode == "copy":
            return
        measured = self._measured = replace(
            measure(self.runtime.device, self.sender.table, self._speed, self._first_seconds),
            mismatched=self.wishes.mismatched)
        choice = forecast.choose(measured, max_downtime=self.wishes.max_downtime,
                                 max_slowdown=self.wishes.max_slowdown)
        if self.wishes.mode == "auto":
            self.mode, self.reason = choice.mode, choice.reason
        cost = choice.replay if self.mode == "replay" else choice.copy
        self.expected = (cost or choice.copy).as_dict()
        log.info("move", mode=self.mode, reason=self.reason, expected=self.expected)
        if self.wishes.abort_on_timeout and choice.cost.downtime > self.wishes.max_downtime \
                and self.wishes.mode == "auto":
            raise MoveFailed(f"the promised {self.wishes.max_downtime:.2f} s cannot be kept: {choice.reason}; the "
                             "session runs on where it was", expected=choice.cost.downtime)
        self._tell("chosen", why=self.reason)

    def _make_ahead(self) -> None:
        """The destination makes what takes long while the session runs on. (In a replay that is all of the cut.)"""
        if not self.sender.takes_objects:
            return
        self.runtime.pause()
        try:
            ahead = objects_ahead(self.runtime.live)
        finally:
            self.runtime.resume()
        if not ahead.contents:
            return
        fault("ahead")
        self.phases.add("ahead.destination", self.sender.send_objects(ahead.encode()) / 1000)
        self._ahead = ahead
        fault("ahead.sent")

    def _further_rounds(self) -> None:
        """Until few pages are left or they do not become fewer."""
        left = self.sender.statistics.last_round_pages
        for _ in range(1, MAX_ROUNDS):
            if left <= SMALL_ROUND or left * PAGE / self._speed <= SHORT_ROUND:
                return
            dirty = self._round()
            if dirty > left * SHRINK:
                return
            left = dirty

    def _check_promise(self) -> None:
        """A stop that cannot be as short as was promised does not begin."""
        expected = self.sender.statistics.last_round_pages * PAGE / self._speed
        if self.wishes.abort_on_timeout and expected > self.wishes.max_downtime:
            raise MoveFailed(f"the stop would take about {expected:.2f} s, more than the "
                             f"{self.wishes.max_downtime:.2f} s allowed; the session runs on where it was",
                             expected=expected)

    # -- the last pause --------------------------------------------------------------
    @contextmanager
    def _standing_still(self) -> Iterator[float]:
        """Paused and drained. Resumed when something fails; afterwards it stays paused: it was offered.

        Gives the time of the pause's beginning.
        """
        with self.phases.phase("pause.drain"):
            self.runtime.quiesce(DRAIN_SECONDS)
        began = time.monotonic()
        try:
            fault("paused")
            self.connection.sock.settimeout(max(0.5, self.wishes.limit))
            yield began
            fault("sent")
            took = time.monotonic() - began
            if took > self.wishes.limit:
                raise MoveFailed(f"the stop took {took:.2f} s, more than the {self.wishes.limit:.2f} s allowed; the "
                                 "session runs on where it was")
            self.worker.offer(self.sending)
        except BaseException:
            self.runtime.resume()
            raise

    def _last_pause_of_copy(self) -> dict[str, Any]:
        with self._standing_still() as began:
            self._tell("stopped")
            with self.phases.phase("pause.hash"):
                view = look(self.runtime.device, self.runtime.hash_key)
            with self.phases.phase("pause.pages"), self._seeing(view):
                self.sender.round()
            with self.phases.phase("pause.state"):
                state = self.worker.tasks.take(view, self.sender.known)
                if self._ahead is not None:
                    state.live = self._ahead.shorten(state.live)
            with self.phases.phase("pause.verify"):
                self.sender.finish(state)
        return {"pause_ms": (time.monotonic() - began) * 1000}

    @contextmanager
    def _seeing(self, view: MomentView) -> Iterator[None]:
        """Pages are those of a moment: a view in the device's place, with all that a page stream asks for."""
        device = self.sender.device
        self.sender.device = view  # type: ignore[assignment]
        try:
            yield
        finally:
            self.sender.device = device

    # -- by replay ---------------------------------------------------------------------
    def _by_replay(self) -> dict[str, Any]:
        tap = self._open_tap()
        prober = Prober(self.runtime, tap)
        try:
            with Brake(self.runtime) as brake:
                try:
                    with self.phases.phase("cut"):
                        self._stream_cut(prober)
                    with self.phases.phase("replay"):
                        replay = self._catch_up(tap, brake, prober)
                finally:
                    prober.stop()
                    brake.stop()
                    self.brownout = brake.stood + prober.stood
            with self._standing_still() as began:
                self._tell("stopped")
                with self.phases.phase("pause.settle"):
                    self._settle(tap, replay, began)
            return {"pause_ms": (time.monotonic() - began) * 1000 + self.cut_pause * 1000}
        except MoveFailed as error:
            if self.sampled.compared:
                error.detail["mismatched"] = self.sampled.share
            raise
        except Fenced:
            raise
        except RgpuError as error:
            if self.sending.called_off:
                raise
            raise replay_failed(error.message) from error
        finally:
            self.runtime.tap = None

    def _open_tap(self) -> JournalTap:
        """What is applied from now on is kept. With a fast path that begins with the agent's next connection."""
        armed = self.runtime.fast is not None and self.worker.link is not None
        tap = JournalTap(armed=armed)
        link = self.worker.link
        self.runtime.tap = tap
        if armed and link is not None:
            link.close()
            if not tap.wait_running(ARM_SECONDS):
                self.runtime.tap = None
                raise replay_failed("the agent did not come back to begin its stream of calls anew")
        return tap

    def _stream_cut(self, prober: Prober) -> None:
        """The cut, and its pages, while the program runs on; returns when the destination has verified all of it."""
        frozen, state = self._cut()
        prober.start()
        with frozen, self._seeing(frozen):
            self._tell("cut", position=state.position)
            self.sender.round()
            fault("replay.cut.sent")
            self.sender.finish(state)
        self.connection.send(wire.REPLAY, msgspec.msgpack.encode({"position": state.position}))
        fault("replay.cut.verified")

    def _cut(self) -> tuple[FrozenPages, SessionState]:
        """One short pause: pages that changed are copied aside on the device, the session's state is taken."""
        runtime = self.runtime
        runtime.quiesce(DRAIN_SECONDS)
        began = time.monotonic()
        try:
            fault("replay.cut")
            frozen = freeze(runtime.device, self.sender.table)
            try:
                return frozen, self.worker.tasks.take(frozen)
            except BaseException:
                frozen.release()
                raise
        finally:
            runtime.resume()
            self.cut_pause = time.monotonic() - began

    def _catch_up(self, tap: JournalTap, brake: Brake, prober: Prober) -> CatchUp:
        """Ship the calls since the cut until the destination is close behind."""
        def check() -> None:
            if prober.error is not None:
                raise replay_failed(prober.error.message)
            if self.runtime.executor.error:
                raise MoveFailed("the session has failed on its own: the program has the error")

        replay = CatchUp(self.connection, tap, self.wishes.limit, check=check, tell=self._tell,
                         judge=lambda compared, differing, behind: self._judge(
                             sampling.Sampled(compared, differing, prober.pages), behind))
        brake.share = self.wishes.max_slowdown
        fault("replay")
        replay.run()
        fault("replay.caught_up")
        return replay

    def _judge(self, sampled: sampling.Sampled, behind: float) -> str:
        """Why a replay with such a sample is to be given up; empty: it goes on."""
        self.sampled = sampled
        assert self._measured is not None
        why = forecast.given_up(self._measured, sampled, behind=behind, limit=self.wishes.limit,
                                max_slowdown=self.wishes.max_slowdown, asked=self.wishes.mode == "replay")
        cost = forecast.replaying(replace(self._measured, mismatched=sampled.share), self.wishes.max_slowdown)
        if cost is not None:
            self.expected = {**self.expected, "downtime_ms": cost.as_dict()["downtime_ms"]}
        log.info("replay sampled", compared=sampled.compared, differing=sampled.differing, pages=sampled.pages,
                 behind_ms=round(behind * 1000), given_up=why)
        return why

    def _settle(self, tap: JournalTap, replay: CatchUp, began: float) -> None:
        """In the last pause: the last calls, then hashes of all pages, then what differs."""
        while (piece := tap.take(0.0)) is not None:
            if not piece.mark:  # all pages are compared now
                replay.send(piece)
        self.call_bytes = replay.call_bytes
        self.runtime.tap = None
        view = look(self.runtime.device, self.runtime.hash_key)
        state = self.worker.tasks.take(view)
        state.live = {"digest": wire.objects_digest(state.live)}
        fault("replay.last")
        for last, data in wire.pieces(state):
            self.connection.send(wire.LAST, last, data)
        wanted = replay.wanted(began + self.wishes.limit)
        self.mismatched, self.repaired = last_page_hashes(self.sender.table, view, wanted)
        left = self.wishes.limit - (time.monotonic() - began)
        if not forecast.repair_fits(self.mismatched, self._speed, left):
            raise replay_failed(f"{self.mismatched} pages differ after the replay, more than can be sent in what is "
                                f"left of the promised {self.wishes.max_downtime:.2f} s")
        with self._seeing(view):
            fault("replay.repair")
            self.sender.round()
            state.regions = []
            state.live = state.answers = state.printed = None
            self.sender.finish(state)


def measure(device: Device, table: PageTable, speed: float, since_seconds: float) -> forecast.Measured:
    """How much changes, and how much differs from what was sent; the session runs meanwhile.

    ``table``: what the other side has, since ``since_seconds``.
    """
    for _ in range(LOOKS):
        try:
            seconds, pages, differing, moved = _compare_twice(device, table)
            break
        except DeviceError as error:  # memory went away between two questions
            log.info("could not measure what changes", reason=error.message)
    else:
        return forecast.Measured(pages=0, differing=0, changed=(), speed=speed, free_pages=0,
                                 replay_refused="the session's memory changes too fast to be measured")
    room = max(0, device.free_memory() - RESERVE) + HOST_LIMIT
    pins = device.pins()
    return forecast.Measured(
        pages=pages, differing=differing, changed=((seconds, moved), (since_seconds + seconds, differing)), speed=speed,
        free_pages=room // PAGE, settle_seconds=0.02, replay_refused="; ".join(pins))


def _compare_twice(device: Device, table: PageTable) -> tuple[float, int, int, int]:
    """(seconds between two looks, pages in all, pages that differ from what was sent, pages that changed)."""
    first = look(device, table.key)
    began = time.monotonic()
    time.sleep(SAMPLE_SECONDS)
    second = look(device, table.key)
    seconds = time.monotonic() - began
    table.follow(second.regions())
    pages = differing = moved = 0
    before = {(region.address, region.size): first.hash_pages(region, table.key) for region in first.regions()}
    for region in second.regions():
        hashes = second.hash_pages(region, table.key)
        pages += len(hashes)
        differing += len(table.dirty(region, hashes))
        known = before.get((region.address, region.size))
        moved += len(hashes) if known is None else int(pagehash.differ(known, hashes).sum())
    return seconds, pages, differing, moved
