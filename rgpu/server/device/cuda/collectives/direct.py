"""Direct collectives: contributions stay in GPU memory that the other workers of the node map.

When such a collective is submitted, its stream copies the contribution into a segment, tells the other ranks so by
words of their pages, and waits for the end. A second stream of the communicator waits for this worker's decision and
for all ranks' contributions, combines them, and tells the others that it has read theirs. So ranks whose programs are
ahead of their GPUs meet without the host. A thread decides (:meth:`DirectCollectives.look`), and calls no driver: what
it decides is in memory that the streams wait for and read. Where it decides for the way through the host, the same
streams copy the contribution to host memory, and the result from there.

Contributions are not kept: a rank that needs one again has the other ranks begin again at their checkpoints.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import structlog
from cuda.bindings import driver

from rgpu.server.collectives import direct_page
from rgpu.server.collectives.communicators import Communicator, Group
from rgpu.server.collectives.direct_page import BROUGHT, COMPLETE, DECIDED, GOT, Decision, Page, Post, value_of
from rgpu.server.collectives.exchange import Direct, PeerMemory
from rgpu.server.collectives.matching import Posting
from rgpu.server.collectives.shared import RankLost, SharedMeeting
from rgpu.server.device.cuda.collectives import combine
from rgpu.server.device.cuda.collectives.direct_memory import BLOCK, BLOCKS, DirectMemory, Segment
from rgpu.server.device.cuda.errors import check
from rgpu.session.errors import Corrupt, DeviceError
from rgpu.session.objects.collectives import Kind, Operation

log = structlog.get_logger(__name__)

SMALLEST = 1 << 18  #: bytes of a contribution that is worth it: shorter ones are kept, for ranks that replay
MOST_UNDER_WAY = 12  #: less than half of a page's slots
PART = 32 << 20  #: bytes of a contribution from which on it becomes ready in parts
MOST_PARTS = 4
PATIENCE, PROBES = 1.0, 5.0  #: seconds until it is asked what has become of a rank, and until it is asked again
LOST = 0.05  #: seconds between two looks whether other ranks' workers are still those
SETTLED = 10.0  #: seconds after which a communicator's streams have written their last words
PAUSE = 0.0001  #: seconds between two looks at a word
PARTS, RESULT = range(2)  #: parameter blocks: of the kernels that combine parts, and of the one behind BROUGHT


class Plan(Enum):
    """Why a group does not go this way now."""

    NOT = "not"
    LATER = "later"  #: it can once others are complete


class State(Enum):
    """State of one collective. After an error all states lead to FINISHED."""

    OPEN = "open"  #: it is not decided how it is exchanged
    DIRECT = "direct"  #: the streams do it
    HOST = "host"  #: a thread does it
    ENDING = "ending"  #: the streams come to its end, whoever waits
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class _Rank:
    """One rank of a communicator here. ``stream``: the one that combines; ``slots``: by slot, what used it last."""

    rank: int
    meeting: SharedMeeting
    page: Page
    direct: Direct
    stream: Any
    slots: dict[int, Work] = field(default_factory=dict)
    known: dict[int, tuple[PeerMemory, Page]] = field(default_factory=dict)  #: other ranks' pages, by rank


@dataclass(eq=False, slots=True)
class Work:
    """One collective that was submitted this way."""

    rank: _Rank
    operation: Operation
    pages: dict[int, Page]  #: of all ranks
    peers: dict[int, PeerMemory]
    segment: Segment
    block: int  #: number of its two parameter blocks
    host: int  #: address of pinned memory for the way through the host
    reads: int
    writes: int
    group: Group | None = None
    seq: int = 0
    state: State = State.OPEN
    staged: bool = False  #: its contribution is in the segment
    since: float = field(default_factory=time.monotonic)
    looked: float = 0.0  #: when other ranks' workers were looked for, monotonic s
    probed: float = 0.0  #: when it was last asked what has become of them

    @property
    def finished(self) -> bool:
        """Whether this worker's streams have come to its end."""
        return self.state is State.FINISHED

    @property
    def number(self) -> int:
        """Number of the collective."""
        return self.operation.number

    def read_by_all(self) -> bool:
        """Whether no rank will read its segment any more."""
        page, direct = self.rank.page, self.rank.direct
        return self.finished and all(
            page.done(self.number, rank) or direct.over(peer) or direct.gone(peer.session)
            or (self.pages[rank].given(self.number) and self.pages[rank].post(self.number) is None)
            for rank, peer in self.peers.items())


class Hooks(Protocol):
    """What :meth:`DirectCollectives.look` needs of its caller."""

    def cancelled(self) -> bool:
        """Whether the device has an error, or stops."""

    def rest(self, work: Work, resting: bool) -> None:
        """Note that the stream waits for other ranks, or does not any more."""

    def failed(self, work: Work, error: Exception) -> None:
        """Note an error of a work as the device's."""

    def through_host(self, work: Work) -> None:
        """Have a thread call :meth:`DirectCollectives.through_host`, and then :meth:`DirectCollectives.end`."""


class DirectCollectives:
    """See the module docstring. On one GPU. Called by the applying thread, unless a method says otherwise."""

    def __init__(self, ordinal: int) -> None:
        self._memory = DirectMemory(ordinal)
        self._ordinal = ordinal
        self._kernel: combine.Combine | None = None
        self._ranks: dict[int, _Rank] = {}
        self._works: list[Work] = []  #: whose segments may be read yet
        self._blocks = (0, 0)
        self._ended: list[tuple[float, list[Page]]] = []  #: when, and the pages that its streams may write yet
        self.under_way: deque[Work] = deque()  #: for :meth:`look`

    def create(self, number: int, member: Communicator, direct: Direct | None) -> None:
        """Note a rank. Its driver objects are made at the same call in every worker of the session."""
        meeting = member.meeting
        if not isinstance(meeting, SharedMeeting) or meeting.ranks > direct_page.MOST_RANKS \
                or len(set(meeting.members)) < meeting.ranks:
            return
        try:
            if self._kernel is None:
                self._kernel = combine.Combine(self._ordinal)
                self._blocks = self._memory.blocks()
            stream = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING), "cuStreamCreate")
        except DeviceError as error:
            log.warning("no direct collectives", reason=str(error))
            return
        page = direct.page(member.unique, member.rank) if direct is not None else None
        if page is None or direct is None:
            driver.cuStreamDestroy(stream)
            return
        self._ranks[number] = _Rank(member.rank, meeting, page, direct, stream)

    def destroy(self, number: int) -> None:
        """Note that a rank ended; what it gave goes on."""
        if (rank := self._ranks.pop(number, None)) is not None:
            driver.cuStreamDestroy(rank.stream)
            rank.direct.ended(rank.meeting.unique)
            self._ended.append((time.monotonic(), [rank.page, *(page for _, page in rank.known.values())]))

    def trim(self) -> None:
        """Forget the pages of ranks that ended long ago; no stream waits for other ranks."""
        while self._ended and not self._works and time.monotonic() > self._ended[0][0] + SETTLED:
            for page in self._ended.pop(0)[1]:
                self._memory.drop(page.memory)

    def passes(self, group: Group) -> None:
        """Note that a group takes the way through the host."""
        for _, operation in group.operations:
            if not operation.kind.paired and (rank := self._ranks.get(operation.communicator)) is not None:
                rank.page.gives(operation.number, None)

    def plan(self, group: Group) -> Work | Plan:
        """Return a group's work, if it can go this way; else why not. The context is current."""
        self._collect()
        if len(group.operations) != 1:
            return Plan.NOT
        (_, op), (_, reads, writes) = group.operations[0], group.extents()[0]
        rank = self._ranks.get(op.communicator)
        if rank is None or not combine.supports(op) or reads < SMALLEST:
            return Plan.NOT
        peers = self._peers(rank)
        if not peers:
            return Plan.NOT
        last = rank.slots.get(op.number % direct_page.SLOTS)
        if len(self._works) >= MOST_UNDER_WAY or last in self._works:
            return Plan.LATER
        segment = self._memory.take(reads, rank.direct)
        if segment is None:
            return Plan.LATER if self._works else Plan.NOT
        used = {work.block for work in self._works}
        block = next(at for at in range(BLOCKS // 2) if at not in used)
        pages = {other: rank.known[other][1] for other in peers}
        return Work(rank, op, {**pages, rank.rank: rank.page}, peers, segment, block, 0, reads, writes)

    def _peers(self, rank: _Rank) -> dict[int, PeerMemory]:
        """Return the other ranks' memory, all of it mapped; none where any of it cannot be."""
        meeting = rank.meeting
        peers = rank.direct.peers(meeting.unique, meeting.members, meeting.members[rank.rank])
        try:
            for other, peer in peers.items():
                self._page(rank, other, peer)
            if any(self._memory.known(peer) < 0 for peer in peers.values()):
                return {}
            self._memory.page(rank.page.memory)
        except (DeviceError, Corrupt) as error:
            log.info("a collective takes the way through the host", reason=str(error))
            return {}
        return peers

    def _page(self, rank: _Rank, other: int, peer: PeerMemory) -> Page:
        if other not in rank.known or rank.known[other][0] is not peer:
            meeting = rank.meeting
            page = Page.read(peer.pages[direct_page.digest_of(meeting.unique)], meeting.ranks)
            if page.rank != other:
                raise Corrupt(f"the page of rank {other} says that it is of rank {page.rank}", reason="rank")
            self._memory.page(page.memory)
            rank.known[other] = peer, page
        return rank.known[other][1]

    def submit(self, work: Work, stream: Any, host: int) -> None:
        """Give it to its streams. ``host``: pinned memory for the larger of what it reads and writes.

        Raises :class:`DeviceError`; then it takes the other way.
        """
        work.host = host
        rank, me, number = work.rank, work.rank.rank, work.number
        words = {other: self._memory.page(page.memory) for other, page in work.pages.items()}
        parts = self._parts(work)
        self._works.append(work)
        rank.slots[number % direct_page.SLOTS] = work
        for which in (PARTS, RESULT):
            self._write(work, which, combine.nothing())
        try:
            for begin, end, value in parts:
                check(driver.cuMemcpyDtoDAsync(work.segment.address + begin, work.operation.send + begin, end - begin,
                                               stream), "cuMemcpyDtoDAsync")
                for other in words:
                    _set(stream, words[other] + direct_page.offset_of_ready(number, me), value)
            self._combine(work, parts, words)
            _await(stream, words[me] + direct_page.offset_of_word(number, COMPLETE), value_of(number))
        except DeviceError:
            self.end(work)
            rank.page.release(number, own=True)  # its blocks are not used again: a stream may have a part of it
            rank.page.gives(number, None)
            raise
        rank.page.gives(number, Post(
            number, direct_page.called_of((work.operation.kind, work.operation.data_type, work.operation.reduction,
                                           work.operation.count)), work.segment.number, 0, work.reads, len(parts),
            tuple(work.pages[other].identity for other in sorted(work.pages)),
            tuple(0 if other == me else self._memory.known(work.peers[other]) for other in sorted(work.pages))))

    def _parts(self, work: Work) -> list[tuple[int, int, int]]:
        """Return begin and end of each part, and the value of its words."""
        size, most = work.reads, MOST_PARTS if work.operation.kind is not Kind.REDUCE_SCATTER else 1
        step = max(-(-size // most), PART) + 255 & ~255
        return [(begin, begin + step, value_of(work.number, part)) if begin + step < size
                else (begin, size, value_of(work.number)) for part, begin in enumerate(range(0, size, step))]

    def _combine(self, work: Work, parts: Sequence[tuple[int, int, int]], words: dict[int, int]) -> None:
        """Submit what follows the decision to the communicator's stream."""
        me, number, stream = work.rank.rank, work.number, work.rank.stream
        own, kernel = words[me], self._kernel
        assert kernel is not None
        host, device = (start + 2 * BLOCK * work.block for start in self._blocks)
        _await(stream, own + direct_page.offset_of_word(number, DECIDED), value_of(number))
        check(driver.cuMemcpyHtoDAsync(device, host, combine.BYTES, stream), "cuMemcpyHtoDAsync")
        for begin, end, value in parts:
            for other in words:
                _await(stream, own + direct_page.offset_of_ready(number, other), value)
            kernel.launch(stream, device, begin, end)
        _set(stream, own + direct_page.offset_of_word(number, GOT), value_of(number))
        _await(stream, own + direct_page.offset_of_word(number, BROUGHT), value_of(number))
        check(driver.cuMemcpyHtoDAsync(device + BLOCK, host + BLOCK, combine.BYTES, stream), "cuMemcpyHtoDAsync")
        kernel.launch(stream, device + BLOCK, 0, work.writes)
        _set(stream, own + direct_page.offset_of_word(number, COMPLETE), value_of(number))
        for other in work.peers:
            _set(stream, words[other] + direct_page.offset_of_done(number, me), value_of(number))

    def _collect(self) -> None:
        for work in [work for work in self._works if work.read_by_all()]:
            self._works.remove(work)
            work.segment.used = False
        if not self._works:
            self._memory.forget(peer for peer in self._memory.mapped if not any(
                rank.direct.over(peer) for rank in self._ranks.values()))

    # -- in threads of their own, without the driver ----------------------------------------
    def begin(self, work: Work, group: Group, seq: int) -> None:
        """Take part: :meth:`look` is called from now on, until it is finished."""
        work.group, work.seq = group, seq
        meeting, (posting,) = work.rank.meeting, group.postings
        meeting.begins_direct(posting, lambda: [other for other, page in work.pages.items() if page.given(work.number)])
        self.under_way.append(work)

    def look(self, hooks: Hooks) -> bool:
        """See all works under way on; return whether any went on. Called by one thread."""
        moved = False
        for work in list(self.under_way):
            before = work.state
            try:
                self._step(work, hooks)
            except Exception as error:  # the error before the streams go on: nothing behind it may count
                hooks.failed(work, error)
                self.end(work)
            moved |= work.state is not before
            if work.finished:
                self.under_way.remove(work)
                hooks.rest(work, False)
        return moved

    def _step(self, work: Work, hooks: Hooks) -> None:
        rank, number = work.rank, work.number
        if hooks.cancelled():
            if work.state is not State.HOST:  # else its thread ends it
                self.end(work)
                work.state = State.FINISHED
            return
        if not work.staged and rank.page.ready(number, rank.rank) >= value_of(number):
            work.staged = True
            hooks.rest(work, True)
        if work.state is State.OPEN:
            self._decide(work, hooks)
        elif work.state is State.DIRECT:
            if rank.page.word(number, COMPLETE):
                self._meeting(work).ends_direct(self._posting(work), work.seq)
                work.state = State.FINISHED
            elif self._meeting(work).aborted:
                self.end(work)
            elif self._due(work):
                self._check_peers(work)
        elif work.state is State.ENDING and rank.page.word(number, COMPLETE):
            work.state = State.FINISHED  # its parameter blocks were read, and may be used again

    def _decide(self, work: Work, hooks: Hooks) -> None:
        decision, why = Decision.OPEN, ""
        if all(page.given(work.number) for page in work.pages.values()):
            decision, why = direct_page.decide(work.number, work.pages)
        elif self._meeting(work).aborted:
            decision, why = Decision.HOST, "the communicator is aborted"
        elif self._due(work):
            self._probe(work, [other for other in work.peers if not work.pages[other].given(work.number)])
            if over := [other for other, peer in work.peers.items() if self._over(work, peer)]:
                decision, why = Decision.HOST, f"other workers serve ranks {over}, or none"
        if decision is Decision.DIRECT:
            self._directly(work)
            work.state = State.DIRECT
        elif decision is Decision.HOST:
            log.info("a collective takes the way through the host", call=work.seq, reason=why)
            work.state = State.HOST
            hooks.through_host(work)

    def _due(self, work: Work) -> bool:
        if (now := time.monotonic()) < work.looked + LOST:
            return False
        work.looked = now
        return True

    def _probe(self, work: Work, ranks: Sequence[int]) -> None:
        """Have it found out what has become of ranks that have been waited for long."""
        now = time.monotonic()
        if now < max(work.since + PATIENCE, work.probed + PROBES):
            return
        work.probed = now
        for rank in ranks:
            work.rank.direct.probe(work.peers[rank].session)

    def _meeting(self, work: Work) -> SharedMeeting:
        return work.rank.meeting

    def _posting(self, work: Work) -> Posting:
        assert work.group is not None
        return work.group.postings[0]

    def _directly(self, work: Work) -> None:
        rank, number = work.rank, work.number
        sources = []
        for other, page in sorted(work.pages.items()):
            post = page.post(number)
            assert post is not None, "a post does not change while its collective is under way"
            sources.append(work.segment.address if other == rank.rank else self._memory.address(
                work.peers[other], post.segment, post.offset, work.reads))
        self._write(work, PARTS, combine.work_of(work.operation, rank.rank, sources))
        rank.page.set(number, DECIDED, BROUGHT)

    def _check_peers(self, work: Work) -> None:
        """Go back where a worker that was to bring something is not there any more. Raises :class:`RankLost`."""
        missing = [other for other in work.peers if work.rank.page.ready(work.number, other) < value_of(work.number)]
        self._probe(work, missing)
        for other in missing:
            peer = work.peers[other]
            if work.rank.direct.gone(peer.session):
                raise RankLost(f"{work.operation}: rank {other} ({peer.session}) brings nothing to it: it is over")
            if work.rank.direct.over(peer):
                work.rank.direct.go_back(f"another worker serves session {peer.session}, and the one before it had not "
                                         f"brought all to collective {work.number}")

    def _over(self, work: Work, peer: PeerMemory) -> bool:
        return work.rank.direct.over(peer) or work.rank.direct.gone(peer.session)

    def through_host(self, work: Work, cancelled: Callable[[], bool]) -> None:
        """Exchange it through the host, in a thread of its own; :meth:`end` has to follow.

        Raises :class:`RankLost`, :class:`DeviceError`.
        """
        page, number = work.rank.page, work.number
        assert work.group is not None
        self._write(work, PARTS, combine.copy_of(work.host, work.segment.address, work.reads))
        page.release(number)
        page.set(number, DECIDED)
        while not page.word(number, GOT):
            if cancelled():
                return
            time.sleep(PAUSE)
        work.group.run(work.seq, cancelled)
        self._write(work, RESULT, combine.copy_of(work.operation.receive, work.host, work.writes))
        page.set(number, BROUGHT)

    def end(self, work: Work) -> None:
        """Let the streams come to the end, whatever was decided; an error is noted already. In any thread."""
        page = work.rank.page
        if not page.word(work.number, DECIDED) or not page.word(work.number, BROUGHT):
            page.set(work.number, DECIDED, BROUGHT)
        page.release(work.number)
        if work.group is not None:
            self._meeting(work).gives_up(self._posting(work))
        work.state = State.ENDING

    def _write(self, work: Work, which: int, block: bytes) -> None:
        """Write one of a work's parameter blocks: :data:`PARTS`, or :data:`RESULT`."""
        ctypes.memmove(self._blocks[0] + (2 * work.block + which) * BLOCK, block, len(block))

    def close(self) -> None:
        """Free everything; no stream waits any more. The context is current."""
        for rank in self._ranks.values():
            driver.cuStreamDestroy(rank.stream)
        self._ranks, self._works = {}, []
        if self._kernel is not None:
            self._kernel.close()
        self._memory.close()


def _set(stream: Any, address: int, value: int) -> None:
    check(driver.cuStreamWriteValue64(stream, address, value,
                                      driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT),
          "cuStreamWriteValue64")


def _await(stream: Any, address: int, value: int) -> None:
    check(driver.cuStreamWaitValue64(stream, address, value, driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ),
          "cuStreamWaitValue64")
