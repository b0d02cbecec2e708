"""Communicators of the cpu device: groups of operations as work of streams.

A group is one piece of work in all its streams: it begins when each of them has come to it, and keeps one device thread
until its operations are complete, as NCCL's kernels keep a GPU's multiprocessors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rgpu.server.collectives.exchange import Exchange
from rgpu.server.device.cpu.collectives import moving
from rgpu.server.device.cpu.collectives.matching import Meeting, Posting
from rgpu.server.device.cpu.collectives.shared import SharedMeeting
from rgpu.server.device.cpu.schedule import Op
from rgpu.server.device.cpu.streams import Streams
from rgpu.session.errors import DeviceError
from rgpu.session.objects.collectives import MOST_RANKS, Operation, Reduction

INVALID_VALUE, INVALID_HANDLE = 1, 400


@dataclass(frozen=True, slots=True)
class Communicator:
    """One rank of a communicator."""

    unique: bytes  #: the same for all its ranks, and for no other communicator
    rank: int
    context: int
    meeting: Meeting | SharedMeeting


class Communicators:
    """See the module docstring. ``memory``: as :data:`moving.Memory`; ``check``: raises :class:`DeviceError`."""

    def __init__(self, streams: Streams, memory: moving.Memory, check: Callable[[int, int], None]) -> None:
        self._streams, self._memory, self._check = streams, memory, check
        self._members: dict[int, Communicator] = {}
        self._shared: dict[bytes, SharedMeeting] = {}  #: also those whose ranks here are over: others may ask
        self.exchange: Exchange | None = None  #: the way to ranks in other sessions

    def create(self, number: int, context: int, ranks: int, rank: int, unique: bytes,
               members: Sequence[str] = ()) -> None:
        """Make one rank. ``members``: the session of each; none: all are in this one.

        Raises :class:`DeviceError` where it contradicts what other ranks said, or is there.
        """
        if not 0 <= rank < ranks <= MOST_RANKS or not unique:
            raise DeviceError(f"rank {rank} of {ranks}", INVALID_VALUE)
        if number in self._members:
            raise DeviceError(f"communicator {number} exists", INVALID_HANDLE)
        others = [member for member in self._members.values() if member.unique == unique]
        if any(member.rank == rank or member.meeting.ranks != ranks for member in others):
            raise DeviceError(f"rank {rank} of {ranks}: the communicator has that rank, or another size", INVALID_VALUE)
        meeting = others[0].meeting if others else self._meeting(ranks, rank, unique, members)
        self._members[number] = Communicator(unique, rank, context, meeting)

    def destroy(self, number: int, abort: bool) -> None:
        """End one rank; its operations go on to their end, or none of the communicator's does. Raises DeviceError."""
        member = self._member(number)
        del self._members[number]
        if isinstance(member.meeting, SharedMeeting):
            member.meeting.end(member.rank, abort)
        elif abort:
            member.meeting.abort()

    def destroy_context(self, context: int) -> None:
        """End the ranks that were made in a context."""
        for number in [number for number, member in self._members.items() if member.context == context]:
            self.destroy(number, True)

    def group(self, seq: int, operations: Sequence[Operation]) -> None:
        """Give a group to its streams. Raises :class:`DeviceError`; then nothing of it was given."""
        for operation in operations:
            self._check_operation(operation)
        postings: dict[Meeting | SharedMeeting, list[Posting]] = {}

        def run() -> None:
            for meeting, mine in postings.items():
                meeting.arrive(mine, seq)
            for meeting, mine in postings.items():
                meeting.wait(mine, self._streams.cancel.is_set)

        op = Op(seq, run, what="a collective: " + "; ".join(str(operation) for operation in operations[:4]))

        def number() -> None:
            for operation in operations:
                member = self._members[operation.communicator]
                postings.setdefault(member.meeting, []).append(member.meeting.post(member.rank, operation))

        self._streams.submit_joint(op, [operation.stream for operation in operations], number)

    def figures(self) -> list[dict[str, Any]]:
        """Return, for each communicator, its ranks here, and the last operation of each (:meth:`Meeting.figures`)."""
        meetings = {member.unique: member.meeting for member in list(self._members.values())}
        return [{"communicator": unique.hex()[:16], "ranks": meeting.ranks, "aborted": meeting.aborted,
                 "last": meeting.figures()} for unique, meeting in sorted(meetings.items())]

    def _meeting(self, ranks: int, rank: int, unique: bytes, members: Sequence[str]) -> Meeting | SharedMeeting:
        if not members:
            return Meeting(ranks, self._carry_out)
        if self.exchange is None or len(members) != ranks or members[rank] != self.exchange.session:
            raise DeviceError(f"rank {rank} is not this session's, or other sessions cannot be reached", INVALID_VALUE)
        if unique in self._shared:
            raise DeviceError("that communicator has been here and is over", INVALID_VALUE)
        self._shared[unique] = SharedMeeting(unique, members, self.exchange, self._memory)
        return self._shared[unique]

    def _carry_out(self, together: list[Posting]) -> None:
        moving.carry_out(together, self._memory)

    def _member(self, number: int) -> Communicator:
        if (member := self._members.get(number)) is None:
            raise DeviceError(f"no communicator {number}", INVALID_HANDLE)
        return member

    def _check_operation(self, operation: Operation) -> None:
        member = self._member(operation.communicator)
        ranks = member.meeting.ranks
        if operation.peer >= ranks:
            raise DeviceError(f"rank {operation.peer} of {ranks}", INVALID_VALUE)
        reads, writes = operation.kind.extent(ranks, member.rank, operation.peer)
        for address, size in ((operation.send, reads * operation.size), (operation.receive, writes * operation.size)):
            if size:
                self._check(address, size)
        if operation.reduction is Reduction.PREMULSUM and operation.on_device:
            self._check(operation.scalar, operation.data_type.size)
