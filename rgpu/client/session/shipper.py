"""One session's event loop: journal → worker, answers → program, and the attachment's commands.

One thread does all of it and never blocks on a single peer: the shim's
eventfd and socket, the data link, helper threads (connecting, control calls,
spilling) that post their results here. The steps of an awaited call are: eventfd,
walk, seal, send; receive, open into the answer ring.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import time
from collections.abc import Callable
from typing import Any

from rgpu.client.data_link.bulk import SameHost
from rgpu.client.data_link.connection import DataLink
from rgpu.client.data_link.incoming import Incoming
from rgpu.client.data_link.module_ship import ModuleShip
from rgpu.client.journal.cursor import Cursor
from rgpu.client.journal.kept import Journal
from rgpu.client.journal.recorder import Recorder
from rgpu.client.run.pool_requests import Grant, PoolRequests
from rgpu.client.session import attachment as at
from rgpu.client.session.asking import Asking
from rgpu.client.session.attaching import Attempt
from rgpu.client.session.delivery import Deliveries
from rgpu.client.session.exchanging import POLL_AWAITED, POLL_IDLE, Exchanging
from rgpu.client.session.identity import Identity
from rgpu.client.session.leaving import Leaving
from rgpu.client.session.loop import Loop
from rgpu.client.session.shipping import Shipping
from rgpu.client.session.upkeep import Upkeep
from rgpu.client.shim_link import local
from rgpu.client.shim_link.answer_ring import AgentPage, AnswerRing
from rgpu.client.shim_link.returns import Returns
from rgpu.client.shim_link.usage_page import Usage
from rgpu.link import effects
from rgpu.link.data.frames import SealedConnection
from rgpu.link.loggers import get_logger
from rgpu.link.messages.data import BYE
from rgpu.session.effects import Kind
from rgpu.session.errors import Corrupt, LinkError, RgpuError
from rgpu.session.journal.record import AWAITED

log = get_logger(__name__)

PROGRAM_ENDED = "the program ended"
SLEEP = 0.05  #: longest sleep, seconds, while something is under way or was a moment ago: a lost wake-up costs no more
REST = 1.0  #: longest sleep, seconds, after that, where only upkeep is due
RESTLESS = 0.5  #: seconds after the last call or answer in which the shorter limit holds
FULL_SLEEP = 0.0001  #: seconds between two checks of an answer ring that is full
SILENCE_ASK = 2.0  #: seconds of silence after which the pool is asked for the owner
SILENCE_LIMIT = 10.0  #: seconds of silence after which the link is taken for broken
UPKEEP_INTERVAL = 1.0
LOOK_INTERVAL = 0.002  #: seconds between two checks of timers while the loop is busy
#: Whether the loop polls without sleeping after the last call or answer: not where the program needs the processor.
POLLING = len(os.sched_getaffinity(0)) >= 4
UNSUPPORTED_LIMIT = 256  #: names of refused functions that are kept


class Shipper:
    """Event loop of one session; :meth:`run` returns when the session is over."""

    def __init__(self, identity: Identity, peer: local.LocalPeer, page: AgentPage, eventfd: int,
                 journal: Journal, requests: PoolRequests, owner: at.Owner, grant: Grant,
                 end: Callable[[], tuple[int | None, str]] = lambda: (None, ""), ring: AnswerRing | None = None,
                 counts: Callable[[Usage], None] = lambda usage: None, recorder: Recorder | None = None,
                 takes_text: bool = False, area: bool = False, same_host: bool = False) -> None:
        """``end``: returns the program's exit code, and why it was ended if not by itself.

        ``counts``: called with the page where the shim counts the bytes it uses. ``recorder``: `rgpu run --record`.
        ``takes_text``: the shim accepts text that kernels print.
        ``area``: the shim can read answers from an area; ``same_host``: share memory with a worker on this host.
        """
        self._loop = Loop()
        self.identity = identity
        self.peer, self.page, self.journal, self.requests = peer, page, journal, requests
        self.grant = grant
        self.attachment = at.Attachment()
        self.recorder = recorder
        self.deliveries = Deliveries(journal.policy.recover) if recorder is None else \
            Deliveries(True, recorder.answered)
        self.returns = Returns(identity.session, peer, ring, self.deliveries, area)
        self._takes_text = takes_text
        self._same_host = same_host
        self.bulk = SameHost(identity.session, journal, self._loop.forget)
        self.effects = effects.open_log("agent", identity.session)
        if self.effects is not None:
            self.deliveries.given = lambda seq: self.effect(Kind.ACCEPTED, seq)
        self.awaited = 0
        self.usage: Usage | None = None  #: the shim's counters, once it has sent their page
        self.over = ""  #: why the loop ends
        self._lost = False
        self._end, self._counts = end, counts
        #: driver functions that the program called and the shim refuses, in the order of the calls
        self.unsupported: dict[str, None] = {}
        self._first_owner = owner
        self._eventfd = eventfd
        self.link: DataLink | None = None
        self._attempt: Attempt | None = None
        self.cursor: Cursor | None = None
        self._leaving = Leaving(journal, peer)
        self.incoming = Incoming(self, takes_text)
        self._asking = Asking(requests, identity.session, lambda: self.attachment.highest, self.post, self.feed)
        self._next_upkeep = self._next_look = 0.0
        self._active = 0.0  #: monotonic seconds; when calls or answers last arrived
        self._worked = 0.0  #: the same, without the worker's signs of life
        self.modules = ModuleShip(journal)
        self.shipping = Shipping(journal, self.returns, self.bulk, self.modules, self._open_lanes, self.down)
        self.upkeep = Upkeep(self)
        self.exchanging = Exchanging(self, page, ring, eventfd, self._loop.fileno(), POLLING)

    @property
    def ended_well(self) -> bool:
        """Whether the program ended the session, not an error of the session or its journal."""
        return not self._lost and self.over == PROGRAM_ENDED

    # -- the loop -------------------------------------------------------------------
    def run(self) -> None:
        """Ship until the program or the session ends. Raises nothing."""
        pidfd = self._watch_process()
        for fd in (self._eventfd, self.peer.fileno(), pidfd):
            self._loop.watch(fd, select.EPOLLIN)
        try:
            self.feed(at.OwnerKnown(self._first_owner, time.monotonic()))
            self._socket_ready()  # messages that arrived with HELLO
            while not self.over:
                self._round(pidfd)
        except RgpuError as error:
            self.over = f"the program's side of the journal is broken: {error.message}"
            log.error("session given up", session=self.identity.session, reason=self.over, error=error.code)
        except Exception as error:  # noqa: BLE001 - the program has to notice: its calls fail once the socket closes
            self.over = f"the agent failed: {error}"
            log.exception("agent loop failed", session=self.identity.session)
        finally:
            self._finish()
            if pidfd >= 0:
                os.close(pidfd)

    def _watch_process(self) -> int:
        """Return a pidfd of the program, or -1. A forked child may keep the socket open, so it is watched too."""
        try:
            return os.pidfd_open(self.peer.pid)
        except OSError:
            return -1

    def _round(self, pidfd: int) -> None:
        self.shipping.round_begins(time.monotonic())
        # Where the native end of the link may run, it reads the calls itself, and sends long ones as it receives them.
        busy = False if self.exchanging.possible() else self.take_calls()
        link = self.link
        if link is not None:
            if self.returns.areas.pending:
                self._step_area(link)
            busy = self._ship() or busy
            if self.incoming.blocked or self.incoming.unread or link.lanes.awaited:
                self.incoming.take(link)
        now = time.monotonic()
        if busy:
            self._active = self._worked = now
        if now >= self._next_look or self.peer.wants_write or self.incoming.blocked or \
                link is not None and link.wants_write:
            self._next_look = now + LOOK_INTERVAL
            self._timers(now)
            self._update_masks()
        ready = self._wait(busy, now)
        for fd, mask in ready:
            if fd == self._eventfd:
                os.eventfd_read(fd)
            elif fd == self._loop.wake:
                self._active = time.monotonic()  # mostly a lane's message that was received or sent
                self._loop.take_posted()
            elif fd == pidfd:
                self._socket_ready()
                self.over = self.over or PROGRAM_ENDED
            elif fd == self.peer.fileno():
                if mask & select.EPOLLOUT:
                    self.peer.flush()
                if mask & ~select.EPOLLOUT:
                    self._socket_ready()
            elif fd == self.bulk.fileno():
                self.bulk.ready()
            elif self.link is not None and fd == self.link.fileno():
                self._active = time.monotonic()
                self.incoming.take(self.link)
            if self.over:
                return

    def _wait(self, busy: bool, now: float) -> list[tuple[int, int]]:
        """Return ready descriptors: at once if there is work, after polling if there was some, else after a sleep."""
        poll = self._loop.poll
        if self.incoming.blocked:  # no event signals that the program has read on
            time.sleep(FULL_SLEEP if now - self._active < 0.1 else 50 * FULL_SLEEP)
        if self.incoming.blocked or self.incoming.unread:
            return poll(0)
        if self.exchanging.possible():
            return self._exchange(busy, now)
        if busy:
            return poll(0)
        until = self._active + (POLL_AWAITED if self.deliveries.pending else POLL_IDLE) if POLLING else 0.0
        has_more = self.journal.walker.has_more
        while now < until:
            if ready := poll(0):
                return ready
            if not self.journal.stalled and has_more():
                return []
            now = time.monotonic()
        self._update_masks()
        self.page.set_sleeping(True)
        # The shim reads `sleeping` after it published; the agent looks for calls after it set `sleeping`.
        with self._loop.fence:
            more = not self.journal.stalled and has_more()
        seconds = 0 if more else self._longest(now)
        self.shipping.rests(seconds)
        ready = poll(seconds)
        self.page.set_sleeping(False)
        return ready

    def _exchange(self, busy: bool, now: float) -> list[tuple[int, int]]:
        """As :meth:`_wait`, by the native end of the link, which passes short calls and answers on meanwhile."""
        self._update_masks()
        first = sleep = 0.0
        if not busy:
            first = max(0.0, self._active + POLL_IDLE - now) if POLLING else 0.0
            sleep = self._longest(now)
            self.shipping.rests(sleep)
        link = self.link
        try:
            found = self.exchanging.run(first, sleep)
        except LinkError as error:
            if link is not None:
                self.down(link, error)
            return []
        if found:
            self._active = time.monotonic()
            if self.exchanging.worked:  # not for a sign of life
                self._worked = self._active
            if link is not None and link.opener.pending:
                self.incoming.take(link)
        return self._loop.poll(0)

    def _longest(self, now: float) -> float:
        """Return the seconds to sleep at most: longer while the session is idle, which saves processor time."""
        link = self.link
        if link is None or self._attempt is not None or now - self._worked < RESTLESS or self.journal.stalled or \
                self.deliveries.pending or self._leaving or self.returns.areas.pending or self.returns.full or \
                link.lanes.awaited or self.peer.wants_write or link.wants_write or self.shipping.unanswered:
            return SLEEP
        return max(SLEEP, min(REST, self._next_upkeep - now))

    def post(self, function: Callable[..., None], *args: Any) -> None:
        """Have ``function`` called by the loop; from any thread."""
        self._loop.post(function, *args)

    def stop(self, reason: str) -> None:
        """End the session; from any thread."""
        self.post(self._stop, reason)

    def _stop(self, reason: str) -> None:
        self.over = self.over or reason

    def _update_masks(self) -> None:
        self._loop.watch(self.peer.fileno(), select.EPOLLIN | (select.EPOLLOUT if self.peer.wants_write else 0))
        if self.link is not None:
            receive = 0 if self.incoming.blocked or self.returns.full or self.link.lanes.awaited else select.EPOLLIN
            self._loop.watch(self.link.fileno(), receive | (select.EPOLLOUT if self.link.wants_write else 0))
            self._loop.watch(self.bulk.fileno(), select.EPOLLIN)

    def effect(self, kind: Kind, position: int, note: str = "") -> None:
        """Record an effect, where a test requests it: at the open link's epoch, else the highest seen."""
        if self.effects is not None:
            epoch = self.attachment.highest if self.link is None else self.link.epoch
            self.effects.note(kind, epoch, position, note)

    # -- the program's side -----------------------------------------------------------
    def _socket_ready(self) -> None:
        for message in self.peer.receive():
            if isinstance(message, local.NewSegment):
                self.bulk.announce(self.journal.offer(message))
            elif isinstance(message, local.AreaMapped):
                self.returns.areas.mapped(message.number)
            elif isinstance(message, local.Goodbye):
                self.over = PROGRAM_ENDED
            elif isinstance(message, local.UsagePage):
                self.usage = Usage(message.fd)
                self._counts(self.usage)
            elif isinstance(message, local.Unsupported):
                self._unsupported(message.name)
            elif isinstance(message, local.Observe | local.Gather | local.ListDevices | local.Choose):
                raise Corrupt("a message that begins a connection, on one of a session", reason="protocol")
            else:
                message.close()
                raise Corrupt("a second HELLO on one connection", reason="protocol")
        if self.peer.eof:
            self.over = self.over or PROGRAM_ENDED

    def _step_area(self, link: DataLink) -> None:
        try:
            self.returns.areas.step(link)
        except LinkError as error:
            self.down(link, error)

    def _unsupported(self, name: str) -> None:
        if name not in self.unsupported and len(self.unsupported) < UNSUPPORTED_LIMIT:
            self.unsupported[name] = None
            log.warning("the program called a function that is not supported", session=self.identity.session,
                        function=name)

    def take_calls(self) -> bool:
        """Read the calls that were published. Raises :class:`Corrupt`."""
        before = self.journal.last_seq
        calls = self.journal.advance()
        if self.journal.last_seq > before:
            self.shipping.published(before)
        return self._taken(calls)

    def take_shipped(self, place: int) -> None:
        """Read the calls up to ``place`` in the journal's current segment, which were shipped. Raises
        :class:`Corrupt`."""
        self._taken(self.journal.advance_to(place))

    def _taken(self, calls: list[tuple[int, int, int]]) -> bool:
        sent = self.deliveries.sent
        for seq, call, flags in calls:
            if sent(seq, call, flags):
                self.awaited += 1
                self.effect(Kind.WANTED, seq)
        if calls and self.recorder is not None:
            self.recorder.take(self.journal)
        if self.journal.news_closed:
            self.journal.news_closed = False
            self.journal.applied(self.shipping.acknowledged, self.cursor)
            self.release()
            self.upkeep.spill()
            self.upkeep.tell_state()
        return bool(calls)

    # -- the worker's side --------------------------------------------------------------
    def _ship(self) -> bool:
        link, cursor = self.link, self.cursor
        return link is not None and cursor is not None and self.shipping.ship(link, cursor)

    def _open_lanes(self, link: DataLink) -> None:
        """Have a helper thread connect the link's lanes."""
        count, owner = link.lanes.claim(), self.attachment.owner or self._first_owner
        self.requests.submit(lambda: self.post(self._lanes_opened, link, link.lanes.open(
            count, owner, link.epoch, self.grant, self.identity.session)))

    def _lanes_opened(self, link: DataLink, connections: list[SealedConnection]) -> None:
        link.lanes.opened(connections, lambda: self.post(_nothing))
        if link is not self.link:
            link.lanes.close()

    def release(self) -> None:
        """Give the shim back the segments that nothing needs any more."""
        if self.exchanging.defers():
            return
        self._leaving.release(self.link.lanes if self.link is not None else None)
        self.bulk.flush()

    def lose(self, reason: str) -> None:
        """End the session because of ``reason``, not by its program: its journal is kept."""
        self._lost, self.over = True, reason

    def down(self, link: DataLink, error: RgpuError | struct.error) -> None:
        """Drop a link that broke or violated the protocol, and give the attachment the event."""
        log.info("data link lost", session=self.identity.session, epoch=link.epoch, reason=str(error))
        self._drop_link()
        self.feed(at.LinkDown(link.number, str(error), time.monotonic()))

    def _drop_link(self) -> None:
        link, self.link, self.cursor = self.link, None, None
        self.incoming.detached()
        self.exchanging.detached()
        if link is not None:
            self._loop.forget(link.fileno())
            self._loop.forget(self.bulk.fileno())
            self.bulk.detached()
            link.close()

    # -- the attachment's commands --------------------------------------------------------
    def feed(self, event: at.Event) -> None:
        """Give the attachment an event and carry out its commands."""
        for command in self.attachment.handle(event):
            if isinstance(command, at.Open):
                self._attempt = Attempt(command.link, command.owner, self.identity, self.grant, self.journal.last_seq,
                                        self.requests, self._opened, self.post,
                                        self.returns.text.confirm() if self._takes_text else None, self._same_host,
                                        self.shipping.usual, self.deliveries.placements.as_rows())
            elif isinstance(command, at.Close):
                if self._attempt is not None:
                    self._attempt.cancel()
                    self._attempt = None
                self._drop_link()
                self.feed(at.LinkClosed(command.link, time.monotonic()))
            elif isinstance(command, at.Find):
                self._asking.due = time.monotonic() + command.delay
            elif isinstance(command, at.Ship):
                self._start_shipping(command.next)
            elif isinstance(command, at.Report):
                self.requests.submit(self.requests.quietly, "session.unreachable",
                                     {"session": self.identity.session, "epoch": command.owner.epoch,
                                      "host": command.owner.host, "seconds": command.seconds})
            else:
                self.lose(command.reason)

    def _opened(self, attempt: Attempt, link: DataLink | None, wanted: int, error: str) -> None:
        """Take the result of a helper thread's attempt to attach."""
        if attempt is not self._attempt:
            if link is not None:
                link.close()
            return
        self._attempt = None
        if attempt.hopeless:
            self.lose(error)
            return
        if link is None:
            log.info("attachment failed", session=self.identity.session, host=attempt.owner.host, reason=error)
            if attempt.refused:
                self.upkeep.renew_now(time.monotonic())
            self.feed(at.LinkDown(attempt.number, error, time.monotonic()))
            return
        self.link = link
        link.on_sent(lambda: self.post(_nothing))
        self.upkeep.tell_anew()
        self.feed(at.Attached(attempt.number, link.epoch, wanted, time.monotonic()))

    def _start_shipping(self, wanted: int) -> None:
        assert self.link is not None
        self.take_calls()
        try:
            self.cursor = self.journal.cursor(wanted)
        except Corrupt as error:
            self.lose(f"the session cannot be continued: {error.message}")
            return
        log.info("attached", session=self.identity.session, epoch=self.link.epoch, next=wanted,
                 reships=max(0, self.journal.last_seq + 1 - wanted))
        self.effect(Kind.ATTACHED, wanted)
        self.returns.reattached()
        self.bulk.attached(self.link.host)
        self.returns.areas.attached(self.link.host.take_area())
        self.shipping.begin(wanted)
        self.journal.applied(wanted - 1, self.cursor)
        self.release()
        try:
            self.modules.attached(self.link, self.cursor)
        except LinkError as error:
            self.down(self.link, error)
            return
        self.exchanging.attached()
        self.incoming.take(self.link)  # messages that arrived together with ATTACHED

    # -- timers -----------------------------------------------------------------------------
    def _timers(self, now: float) -> None:
        if self._leaving:
            self.release()
        if self.attachment.state is at.State.FINDING:
            if now >= self._asking.due:
                self._asking.ask(now + SILENCE_LIMIT)
        elif now >= self._asking.due and self._silent_since(now) > SILENCE_ASK:
            self._asking.ask(now + SILENCE_ASK)
        link = self.link
        if link is not None and self._unheard_since(link) > SILENCE_LIMIT:
            self.incoming.take(link)  # this process may have been suspended for so long
            if self.link is link and self._unheard_since(link) > SILENCE_LIMIT:
                self.down(link, LinkError("the worker says nothing any more"))
        if now >= self._next_upkeep:
            self._next_upkeep = now + UPKEEP_INTERVAL
            self.upkeep.run(now)

    def _silent_since(self, now: float) -> float:
        """Return the seconds that an answer has been outstanding without a message from the owner; 0: none is."""
        if self._attempt is not None:
            return now - self._attempt.started
        asked = self.shipping.unanswered
        if self.link is None or not asked or self.incoming.blocked:  # blocked by the program
            return 0.0
        return now - max(self.link.heard, asked)

    def _unheard_since(self, link: DataLink) -> float:
        """Return the seconds without a message from the owner, which sends a sign of life every two seconds.

        Also with nothing outstanding: a program may wait for an answer, or a watermark, of calls that are long known
        to be applied, and the frame that carries it may be the one that is never complete.
        """
        if self.incoming.blocked or self.returns.full or link.lanes.awaited:  # a lane's message has its own time limit
            return 0.0
        return time.monotonic() - link.heard

    # -- the end ------------------------------------------------------------------------------
    def _finish(self) -> None:
        reason, code = self.over, None
        self._count_rest()
        self.effect(Kind.ENDED, self.journal.last_seq, "" if self.ended_well else reason)
        self.peer.close()
        if not self._lost:
            (code, why), statistics = self._end(), self.upkeep.statistics()
            reason = why if why and reason == PROGRAM_ENDED else reason
            link, self.link = self.link, None
            self.exchanging.detached()
            if link is not None:
                self._say_bye(link, {"reason": reason, "exit_code": code, "statistics": statistics})
        self._feed_quietly_shutdown()
        self.journal.close(keep_files=self._lost)
        if self.recorder is not None:
            self.recorder.close()
        if not self._lost:
            self.requests.quietly("session.end", {"session": self.identity.session, "reason": reason,
                                                  "exit_code": code, "statistics": statistics}, 5.0)
        self._loop.close()
        os.close(self._eventfd)
        self.returns.close()
        self.page.close()
        if self.effects is not None:
            self.effects.close()
        log.info("session over", session=self.identity.session, reason=reason, calls=self.journal.last_seq,
                 awaited_calls=self.awaited)

    def _count_rest(self) -> None:
        """Count the calls that the program published before its end and that were not read yet, for its figures."""
        with contextlib.suppress(RgpuError):  # the calls themselves are needed by nobody any more
            while calls := self.journal.advance():
                self.awaited += sum(bool(flags & AWAITED) for _, _, flags in calls)

    def _say_bye(self, link: DataLink, last: dict[str, Any]) -> None:
        try:
            link.drain()
            if link.ready:
                link.send_map(BYE, last)
            link.finish()
        except LinkError:
            link.close()

    def _feed_quietly_shutdown(self) -> None:
        if self._attempt is not None:
            self._attempt.cancel()
            self._attempt = None
        self._drop_link()
        self.attachment.handle(at.Shutdown(time.monotonic()))


def _nothing() -> None:
    """Do nothing: posted to have the loop run a round."""
