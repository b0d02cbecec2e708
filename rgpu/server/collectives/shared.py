"""One communicator whose ranks are in several sessions, as one of these has it.

What a rank brings is read from its memory when its turn has come in its stream, and goes into the log; so does what
other sessions give. An operation is complete when everything is there, all ranks want the same, and every session that
takes part has what this one's rank brought: a program that ends behind it takes nothing away from the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from rgpu.server.collectives.contributions import Contribution, Key, key_of
from rgpu.server.collectives.exchange import Exchange
from rgpu.server.collectives.matching import Memory, Posting
from rgpu.server.collectives.moving import result_into, scalar_of
from rgpu.server.collectives.numbers import Array
from rgpu.server.collectives.reductions import copy
from rgpu.session.objects.collectives import Kind, Operation

#: CUDA_ERROR_EXTERNAL_DEVICE: an asynchronous error outside; the program's NCCL gives it ncclRemoteError
REMOTE = 911


class RankLost(Exception):
    """Nobody has what a rank brought: ``result`` becomes the device's sticky error."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.result, self.detail = REMOTE, detail


class SharedMeeting:
    """See the module docstring. It does for such a communicator what a :class:`.matching.Meeting` does for others."""

    def __init__(self, unique: bytes, members: Sequence[str], exchange: Exchange) -> None:
        """``members``: the session of each rank."""
        self.unique, self.members, self.ranks = unique, list(members), len(members)
        self.aborted = False
        self.failed = ""  #: why nothing is complete any more
        self._over: set[int] = set()  #: ranks of this session that were destroyed
        self._exchange, self._log = exchange, exchange.log
        self._open: dict[Key, list[Posting]] = {}
        #: of a rank, and of a pair: the number that comes next; a checkpoint has what was brought ahead of it
        self._next = self._log.brought(unique, [rank for rank, name in enumerate(members) if name == exchange.session])
        self._held: dict[Key, set[tuple[str, int]]] = {}  #: (session, rank here): it has what that rank brought
        self._last: dict[int, Posting] = {}
        exchange.opened(unique, self)

    # -- what the device does -----------------------------------------------------
    def post(self, rank: int, operation: Operation, memory: Memory) -> Posting:
        """Note an operation in the journal's order; it takes part from :meth:`arrive` on."""
        posting, key = Posting(rank, operation.number, operation, memory), key_of(rank, operation)
        with self._log.lock:
            first = (rank, *key[:2]) not in self._next
            self._open.setdefault(key, []).append(posting)
            self._next[rank, *key[:2]] = key[2] + 1
        if first and key[2]:  # it began at a checkpoint: what others brought ahead of that was had
            self._exchange.changed(self.unique)
        return posting

    def arrive(self, postings: list[Posting], seq: int = 0) -> None:
        """Their turn has come: what their ranks bring is read, and the others are asked for theirs."""
        for posting in postings:
            key = key_of(posting.rank, posting.operation)
            with self._log.lock:
                posting.ready, posting.since, posting.present = True, time.monotonic(), None
                self._last[posting.rank] = posting
            self._log.hold(self.unique, key)
            if posting.operation.kind is not Kind.RECEIVE:
                self._log.put(self.unique, key, {posting.rank: self._read(posting)}, seq)
            elif self._log.get(self.unique, key):  # it came ahead, and counts for who waits to hear of it from now on
                self._exchange.changed(self.unique)
            self._exchange.ask(self.unique, key, self._wanted(posting),
                               [] if posting.operation.kind is Kind.RECEIVE else [posting.rank])

    def wait(self, postings: list[Posting], cancelled: Callable[[], bool], every: float = 0.05) -> bool:
        """Until all are complete; False: aborted, or cancelled. Raises :class:`RankLost`."""
        left = list(postings)
        try:
            while left:
                with self._log.lock:
                    ready = [posting for posting in left if self._whole(posting)]
                    if not ready:
                        if self.aborted or cancelled():
                            return False
                        if self.failed:
                            raise RankLost(self.failed)
                        self._log.changed.wait(every)
                for posting in ready:
                    self._finish(posting)
                left = [posting for posting in left if not posting.complete]
            return True
        finally:
            for posting in left:
                self._close(posting)

    def begins_direct(self, posting: Posting, present: Callable[[], Collection[int]]) -> None:
        """Note that an operation takes part, whose data the device exchanges unless :meth:`arrive` follows.

        ``present``: returns the ranks that have come.
        """
        with self._log.lock:
            posting.ready, posting.since, posting.present = True, time.monotonic(), present
            self._last[posting.rank] = posting

    def ends_direct(self, posting: Posting, seq: int) -> None:
        """Note that the device has exchanged an operation's data, as call ``seq``: none of it is kept."""
        self._log.put(self.unique, key_of(posting.rank, posting.operation), {}, seq)
        with self._log.lock:
            posting.complete = True
        self._close(posting)

    def gives_up(self, posting: Posting) -> None:
        """Note that an operation takes no part any more; nothing where it is complete."""
        if not posting.complete:
            self._close(posting)

    def end(self, rank: int, abort: bool) -> None:
        """End one rank of this session; what it brought stays for the others. ``abort``: nobody waits here any more."""
        with self._log.lock:
            self._over.add(rank)
            self.aborted = self.aborted or abort
            self._log.changed.notify_all()
        self._exchange.changed(self.unique)

    # -- what the other sessions say -----------------------------------------------
    def never(self, rank: int, key: Key) -> str:
        """See :meth:`Shared.never`."""
        with self._log.lock:
            posted = any(posting.rank == rank for posting in self._open.get(key, ()))
            if rank in self._log.get(self.unique, key) or (posted and not self.aborted):
                return ""
            if self.aborted:
                return f"session {self.members[rank]} has given the communicator up"
            if key[2] < self._next.get((rank, *key[:2]), 0):
                return f"what rank {rank} brought to it is not kept any more by session {self.members[rank]}"
            return f"rank {rank} has left the communicator" if rank in self._over else ""

    def again(self, key: Key) -> bool:
        """See :meth:`Shared.again`."""
        with self._log.lock:
            ranks = [key[0]] if key[0] >= 0 else range(self.ranks)
            here = [rank for rank in ranks if self.members[rank] == self._exchange.session]
            if self.aborted or not here or all(rank in self._log.get(self.unique, key) for rank in here):
                return False
            floor = self._log.floor_of(self.unique, self._exchange.session)
            begun = all(key[2] < self._next.get((rank, *key[:2]), 0) for rank in here)
            kept = self._log.kept_from(self.unique, *key[:2])
            known = key[0] < 0 or kept is not None
            return begun and (key[2] >= max(floor if key[0] < 0 else 0, kept or 0) if known else not floor)

    def taken(self, key: Key) -> bool:
        """See :meth:`Shared.taken`."""
        with self._log.lock:
            ranks = [key[1]] if key[0] >= 0 else range(self.ranks)
            here = [rank for rank in ranks if self.members[rank] == self._exchange.session]
            return key not in self._open and all(
                rank in self._over or key[2] < self._next.get((rank, *key[:2]), 0) for rank in here)

    def held(self, key: Key, session: str, ranks: Sequence[int]) -> None:
        """See :meth:`Shared.held`."""
        with self._log.lock:
            self._held.setdefault(key, set()).update((session, rank) for rank in ranks)
            self._log.changed.notify_all()

    def renewed(self, session: str) -> list[tuple[Key, list[int]]]:
        """See :meth:`Shared.renewed`."""
        theirs = {rank for rank, member in enumerate(self.members) if member == session}
        found = []
        with self._log.lock:
            for key in self._open:
                had = {one for one in self._held.get(key, ()) if one[0] == session}
                if had and key[0] < 0 and theirs - set(self._log.get(self.unique, key)):
                    self._held[key] -= had
                    found.append((key, sorted(rank for _, rank in had)))
        return found

    def lost(self, key: Key, why: str) -> None:
        """See :meth:`Shared.lost`."""
        with self._log.lock:
            if key in self._open:
                self.failed = self.failed or f"{self._named(key)}: {why}"
            self._log.changed.notify_all()

    # -- looking --------------------------------------------------------------------
    def figures(self, now: float | None = None) -> list[dict[str, Any]]:
        """Return, for each rank of this session that came, what :meth:`.matching.Meeting.figures` does."""
        now = time.monotonic() if now is None else now
        with self._log.lock:
            return [self._figure(rank, posting, now) for rank, posting in sorted(self._last.items())]

    def _figure(self, rank: int, posting: Posting, now: float) -> dict[str, Any]:
        op, found = posting.operation, posting.figure(now)
        if posting.complete:
            return found
        if posting.present is not None:
            absent = sorted(set(range(self.ranks)) - set(posting.present()))
            return found | {"missing": absent, "waits_for": sorted({self.members[other] for other in absent}),
                            "differs": {}}
        here = self._log.get(self.unique, key_of(rank, op))
        missing = [other for other in ([op.peer] if op.kind.paired else range(self.ranks)) if other not in here]
        if op.kind is Kind.SEND:
            missing = [op.peer]
        return found | {
            "missing": missing, "waits_for": sorted({self.members[other] for other in missing}),
            "differs": {} if op.kind.paired else {
                other: str(there) for other, there in sorted(here.items()) if there.called != here[rank].called}}

    # -- with the lock ----------------------------------------------------------------
    def _whole(self, posting: Posting) -> bool:
        key = key_of(posting.rank, posting.operation)
        here = self._log.get(self.unique, key)
        op = posting.operation
        if op.kind is Kind.RECEIVE:
            return op.peer in here and len(here[op.peer].data) == op.size
        takers = {self.members[op.peer]} if op.kind is Kind.SEND else set(self.members)
        held = self._held.get(key, set())
        if any((taker, posting.rank) not in held for taker in takers - {self._exchange.session}):
            return False
        if op.kind is Kind.SEND:
            return self.members[op.peer] != self._exchange.session or self._received(key)
        return len(here) == self.ranks and all(other.called == here[0].called for other in here.values())

    def _received(self, key: Key) -> bool:
        """Whether the receiver, which is in this session, asked for it: what was sent is kept until it takes it."""
        return key[2] < self._next.get((key[1], *key[:2]), 0)

    def _named(self, key: Key) -> str:
        return str(self._open[key][0].operation)

    # -- data -------------------------------------------------------------------------
    def _wanted(self, posting: Posting) -> list[int]:
        op = posting.operation
        if op.kind is Kind.SEND:
            return []
        return [op.peer] if op.kind is Kind.RECEIVE else list(range(self.ranks))

    def _read(self, posting: Posting) -> Contribution:
        op = posting.operation
        reads = op.kind.extent(self.ranks, posting.rank, op.peer)[0] * op.size
        return Contribution(op.kind, op.data_type, op.reduction, op.peer, op.count, scalar_of(op, posting.memory),
                            self._kept(posting.memory.source(op.send, reads)) if reads else b"")

    def _kept(self, source: Array) -> bytes | memoryview:
        """A copy, where other sessions can map it if any does."""
        room = self._exchange.room(source.size)
        if room is None:
            return source.tobytes()
        copy(room, source)
        return room.data.toreadonly()

    def _finish(self, posting: Posting) -> None:
        op, rank = posting.operation, posting.rank
        here = self._log.get(self.unique, key_of(rank, op))
        if op.size and op.kind is Kind.RECEIVE:
            copy(posting.memory.target(op.receive, op.size), _bytes(here[op.peer]))
        elif op.size and op.kind is not Kind.SEND and (writes := op.kind.extent(self.ranks, rank, op.peer)[1]):
            every = [here[other] for other in range(self.ranks)]
            result_into(posting.memory.target(op.receive, writes * op.size), op, rank, [_bytes(one) for one in every],
                        [one.scalar for one in every])
        with self._log.lock:
            posting.complete = True
        self._close(posting)

    def _close(self, posting: Posting) -> None:
        key = key_of(posting.rank, posting.operation)
        with self._log.lock:
            postings = self._open.get(key, [])
            if posting in postings:
                postings.remove(posting)
            if postings:
                return
            self._open.pop(key, None)
            self._held.pop(key, None)
            self._log.release(self.unique, key)
            self._log.changed.notify_all()
        self._exchange.settle(self.unique, key)


def _bytes(contribution: Contribution) -> Array:
    return np.frombuffer(contribution.data, np.uint8)
