"""Communicators of one device: their ranks here, and groups of operations, whatever the device gives them to.

A device makes a group (:meth:`Communicators.group`), numbers it in the journal's order (:meth:`Group.post`) and runs it
(:meth:`Group.run`) in a thread, once all its streams have come to it; they go on when that returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rgpu.server.collectives.exchange import Exchange
from rgpu.server.collectives.matching import Meeting, Memory, Posting
from rgpu.server.collectives.moving import carry_out
from rgpu.server.collectives.shared import SharedMeeting
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


class Group:
    """Operations that were checked, each with the communicator's rank that brings it."""

    def __init__(self, operations: Sequence[tuple[Communicator, Operation]]) -> None:
        self._operations = operations
        self._postings: dict[Meeting | SharedMeeting, list[Posting]] = {}

    def __str__(self) -> str:
        return "a collective: " + "; ".join(str(operation) for _, operation in self._operations[:4])

    @property
    def streams(self) -> list[int]:
        """Return the streams that it is work of, each once."""
        return list(dict.fromkeys(operation.stream for _, operation in self._operations))

    @property
    def operations(self) -> Sequence[tuple[Communicator, Operation]]:
        """Return the operations, each with the rank that brings it."""
        return self._operations

    @property
    def postings(self) -> list[Posting]:
        """Return what :meth:`post` made, of one communicator after the other."""
        return [posting for mine in self._postings.values() for posting in mine]

    def extents(self) -> list[tuple[Operation, int, int]]:
        """Return each operation, and the bytes that it reads and that it writes."""
        return [(operation, reads * operation.size, writes * operation.size) for member, operation in self._operations
                for reads, writes in (operation.kind.extent(member.meeting.ranks, member.rank, operation.peer),)]

    def post(self, memories: Sequence[Memory]) -> None:
        """Give its operations their numbers, and each its memory: in the order of the journal, ahead of :meth:`run`."""
        for (member, operation), memory in zip(self._operations, memories, strict=True):
            self._postings.setdefault(member.meeting, []).append(member.meeting.post(member.rank, operation, memory))

    def run(self, seq: int, cancelled: Callable[[], bool]) -> None:
        """Take part, as call ``seq``, until all is complete, aborted or cancelled.

        Raises :class:`rgpu.server.collectives.shared.RankLost`, :class:`DeviceError`.
        """
        for meeting, mine in self._postings.items():
            meeting.arrive(mine, seq)
        for meeting, mine in self._postings.items():
            meeting.wait(mine, cancelled)


class Communicators:
    """See the module docstring.

    ``check`` (address, bytes): raises :class:`DeviceError` for what is no memory of the session.
    """

    def __init__(self, check: Callable[[int, int], object]) -> None:
        self._check = check
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

    def of_context(self, context: int) -> list[int]:
        """Return the communicators' numbers of the ranks that were made in a context."""
        return [number for number, member in self._members.items() if member.context == context]

    def destroy_context(self, context: int) -> None:
        """End the ranks that were made in a context."""
        for number in self.of_context(context):
            self.destroy(number, True)

    def member(self, number: int) -> Communicator:
        """Return a rank by its communicator's number. Raises :class:`DeviceError`."""
        return self._member(number)

    def group(self, operations: Sequence[Operation]) -> Group:
        """Return a group of operations. Raises :class:`DeviceError` for what is wrong with any."""
        for operation in operations:
            self._check_operation(operation)
        return Group([(self._members[operation.communicator], operation) for operation in operations])

    def figures(self) -> list[dict[str, Any]]:
        """Return, for each communicator, its ranks here, and the last operation of each (:meth:`Meeting.figures`)."""
        meetings = {member.unique: member.meeting for member in list(self._members.values())}
        return [{"communicator": unique.hex()[:16], "ranks": meeting.ranks, "aborted": meeting.aborted,
                 "last": meeting.figures()} for unique, meeting in sorted(meetings.items())]

    def _meeting(self, ranks: int, rank: int, unique: bytes, members: Sequence[str]) -> Meeting | SharedMeeting:
        if not members:
            return Meeting(ranks, carry_out)
        if self.exchange is None or len(members) != ranks or members[rank] != self.exchange.session:
            raise DeviceError(f"rank {rank} is not this session's, or other sessions cannot be reached", INVALID_VALUE)
        if unique in self._shared:
            raise DeviceError("that communicator has been here and is over", INVALID_VALUE)
        self._shared[unique] = SharedMeeting(unique, members, self.exchange)
        return self._shared[unique]

    def _member(self, number: int) -> Communicator:
        if (member := self._members.get(number)) is None:
            raise DeviceError(f"no communicator {number}", INVALID_HANDLE)
        return member

    def _check_operation(self, operation: Operation) -> None:
        member = self._member(operation.communicator)
        if operation.peer >= member.meeting.ranks:
            raise DeviceError(f"rank {operation.peer} of {member.meeting.ranks}", INVALID_VALUE)
        for _, reads, writes in Group([(member, operation)]).extents():
            for address, size in ((operation.send, reads), (operation.receive, writes)):
                if size:
                    self._check(address, size)
        if operation.reduction is Reduction.PREMULSUM and operation.on_device:
            self._check(operation.scalar, operation.data_type.size)
