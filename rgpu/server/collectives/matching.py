"""Match the operations of a communicator's ranks, and tell who waits for whom: no device, no links.

The n-th collective of one rank belongs to the n-th of each other rank; the n-th send from a to b to the n-th receive
of b from a. Numbers are given by :meth:`Meeting.post`, which the caller calls in the order of the journal. What was
posted is complete when all who belong to it came and want the same. Where they do not, NCCL waits for ever; so does
this, until :meth:`abort`, and :meth:`figures` names the calls.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rgpu.session.objects.collectives import Kind, Operation


class Memory(Protocol):
    """What an operation reads and writes, while its turn is. Methods raise :class:`rgpu.session.errors.DeviceError`."""

    def source(self, address: int, size: int) -> np.ndarray[Any, Any]:
        """Return the ``size`` bytes (u8) that stood at ``address`` when the stream came to the operation.

        They stand there until anything of the operation's group is written.
        """

    def target(self, address: int, size: int) -> np.ndarray[Any, Any]:
        """Return ``size`` bytes (u8) to be filled, which are at ``address`` when the stream goes on."""


@dataclass(eq=False, slots=True)
class Posting:
    """What one rank brought to one collective, send or receive."""

    rank: int
    number: int  #: of the rank's collectives, or of its sends (receives) to (from) that peer
    operation: Operation
    memory: Memory
    since: float = field(default_factory=time.monotonic)
    ready: bool = False  #: its turn has come in its stream
    complete: bool = False
    present: Callable[[], Collection[int]] | None = None  #: the ranks that have come, where no log tells

    def figure(self, now: float) -> dict[str, Any]:
        """Return what it is, and since when it is there, in seconds; ``now``: monotonic."""
        op = self.operation
        return {"rank": self.rank, "number": self.number, "call": str(op), "kind": op.kind.name.lower(),
                "bytes": op.size, "complete": self.complete, "seconds": round(now - self.since, 3)}


class Meeting:
    """The ranks of one communicator. ``carry_out``: moves the data of postings that belong together.

    All methods may be called from any thread; ``carry_out`` is called by the thread that came last, without a lock.
    """

    def __init__(self, ranks: int, carry_out: Callable[[list[Posting]], None]) -> None:
        self.ranks = ranks
        self.aborted = False
        self._carry_out = carry_out
        self._changed = threading.Condition()
        self._numbers = [0] * ranks
        self._paired: dict[tuple[Kind, int, int], int] = {}  #: sends, and receives, of a pair so far
        self._collectives: dict[int, dict[int, Posting]] = {}
        self._sent: dict[tuple[int, int], deque[Posting]] = {}
        self._awaited: dict[tuple[int, int], deque[Posting]] = {}
        self._last: dict[int, Posting] = {}

    def post(self, rank: int, operation: Operation, memory: Memory) -> Posting:
        """Give an operation its number; it takes part from :meth:`arrive` on."""
        with self._changed:
            kind = operation.kind
            if kind.paired:
                pair = (rank, operation.peer) if kind is Kind.SEND else (operation.peer, rank)
                queue = (self._sent if kind is Kind.SEND else self._awaited).setdefault(pair, deque())
                posting = Posting(rank, self._paired.get((kind, *pair), 0), operation, memory)
                self._paired[kind, *pair] = posting.number + 1
                queue.append(posting)
                return posting
            posting = Posting(rank, self._numbers[rank], operation, memory)
            self._numbers[rank] += 1
            self._collectives.setdefault(posting.number, {})[rank] = posting
            return posting

    def arrive(self, postings: list[Posting], seq: int = 0) -> None:
        """Their turn has come: whatever is whole now is carried out, here. ``seq``: of their call; not used."""
        for posting in postings:
            with self._changed:
                posting.ready, posting.since = True, time.monotonic()
                self._last[posting.rank] = posting
            while together := self._next_whole(posting):  # of a pair's queue, what waited behind it is whole as well
                self._carry_out(together)
                self._finish(together)

    def wait(self, postings: list[Posting], cancelled: Callable[[], bool], every: float = 0.05) -> bool:
        """Until all are complete; False: aborted, or cancelled."""
        with self._changed:
            while not all(posting.complete for posting in postings):
                if self.aborted or cancelled():
                    return False
                self._changed.wait(every)
            return True

    def abort(self) -> None:
        """Nothing is carried out any more, and nobody waits."""
        with self._changed:
            self.aborted = True
            self._changed.notify_all()

    def figures(self, now: float | None = None) -> list[dict[str, Any]]:
        """Return, for each rank that came, its last operation (number, text, bytes), seconds, and who is missing.

        ``differs``: of ranks that want something else at the same number; then none of them goes on.
        """
        now = time.monotonic() if now is None else now
        with self._changed:
            return [self._figure(posting, now) for _, posting in sorted(self._last.items())]

    def _next_whole(self, posting: Posting) -> list[Posting]:
        with self._changed:
            return [] if self.aborted else self._whole(posting)

    # -- with the lock ------------------------------------------------------------
    def _whole(self, posting: Posting) -> list[Posting]:
        """All that belongs to it, where all is there and wants the same; else nothing."""
        if posting.operation.kind.paired:
            return self._pair(posting)
        together = self._collectives.get(posting.number, {})
        if len(together) < self.ranks or not all(other.ready for other in together.values()):
            return []
        first = together[0].operation
        if any(not alike(first, other.operation) for other in together.values()):
            return []
        del self._collectives[posting.number]
        return [together[rank] for rank in range(self.ranks)]

    def _pair(self, posting: Posting) -> list[Posting]:
        op = posting.operation
        pair = (posting.rank, op.peer) if op.kind is Kind.SEND else (op.peer, posting.rank)
        sent, awaited = self._sent.get(pair), self._awaited.get(pair)
        if not sent or not awaited or not (sent[0].ready and awaited[0].ready):
            return []
        if sent[0].operation.size != awaited[0].operation.size:
            return []
        return [sent.popleft(), awaited.popleft()]

    def _finish(self, together: list[Posting]) -> None:
        with self._changed:
            for posting in together:
                posting.complete = True
            self._changed.notify_all()

    def _figure(self, posting: Posting, now: float) -> dict[str, Any]:
        op, found = posting.operation, posting.figure(now)
        if posting.complete:
            return found
        if op.kind.paired:
            return found | {"missing": [op.peer], "differs": {}}
        here = self._collectives.get(posting.number, {})
        return found | {
            "missing": [other for other in range(self.ranks) if other not in here or not here[other].ready],
            "differs": {other: str(there.operation) for other, there in sorted(here.items())
                        if there.ready and not alike(op, there.operation)}}


def alike(one: Operation, other: Operation) -> bool:
    """Whether two ranks' collectives can be one."""
    return ((one.kind, one.data_type, one.reduction, one.peer, one.count)
            == (other.kind, other.data_type, other.reduction, other.peer, other.count))
