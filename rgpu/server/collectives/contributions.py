"""What ranks brought to the collectives of communicators whose ranks are in several sessions.

Each worker keeps what its own ranks brought and what it was given by others. So a member that is moved, or comes back
after its worker was lost, replays its journal and gets again what the others had brought, while they go on: nobody else
goes back. Results depend on the contributions and the order of ranks alone, so they are the same bytes again.

What is kept is bounded by :data:`MOST_BYTES`; what every member's checkpoint is past is not kept (:meth:`Log.floor`).
A checkpoint has it, too (:meth:`Log.rows`): when all members lose their workers at once, one that begins again at its
checkpoint gives the others what it had brought before that. So has the state that a copying move sends.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rgpu.session.errors import Corrupt
from rgpu.session.objects.collectives import MOST_RANKS, DataType, Kind, Operation, Reduction

MOST_BYTES = 512 << 20  #: of contributions that a worker keeps; the oldest go first
MOST_WRITTEN = 128 << 20  #: of those that a checkpoint has
SMALL = 1 << 16  #: bytes that are sent in one part
MOST_SENT = 16 << 20  #: of those that go with a move, in its pause

#: Names one collective of a communicator: (-1, -1, number), or one message: (sender, receiver, number of that pair).
Key = tuple[int, int, int]
Unique = bytes


def key_of(rank: int, operation: Operation) -> Key:
    """Name what an operation of ``rank`` takes part in."""
    if not operation.kind.paired:
        return -1, -1, operation.number
    pair = (rank, operation.peer) if operation.kind is Kind.SEND else (operation.peer, rank)
    return *pair, operation.number


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one rank brought: what it called, and the bytes that it read. ``scalar``: of PREMULSUM, its bytes."""

    kind: Kind
    data_type: DataType
    reduction: Reduction
    peer: int
    count: int
    scalar: bytes
    data: bytes | memoryview = field(repr=False)

    @property
    def called(self) -> tuple[Any, ...]:
        """What has to be the same for all ranks."""
        return self.kind, self.data_type, self.reduction, self.peer, self.count

    def __str__(self) -> str:
        return str(Operation(self.kind, self.data_type, self.reduction, self.peer, 0, 0, 0, 0, self.count))


_Row = tuple[int, int, int, int, int, int, bytes, bytes | memoryview]
_ReadRow = tuple[int, int, int, int, int, int, bytes, memoryview]
_PlacedRow = tuple[int, int, int, int, int, int, bytes, int, int]
_Rows = list[tuple[Unique, Key, int, list[tuple[int, int, int, int, int, int, bytes, bytes]]]]


def encode(contributions: dict[int, Contribution]) -> list[bytes | memoryview]:
    """Encode what ranks brought to one collective, as msgpack in parts one behind the other: the data is not copied.

    An array of rows, each an array of seven fields and the data, of bin 32 (the msgpack specification's formats).
    """
    parts: list[bytes | memoryview] = [b"\xdd" + len(contributions).to_bytes(4, "big")]
    for *head, data in _rows(contributions):
        parts += [b"\x98" + msgspec.msgpack.encode(head)[1:] + b"\xc6" + len(data).to_bytes(4, "big"), data]
    return parts if sum(map(len, parts)) > SMALL else [b"".join(parts)]


def _rows(contributions: dict[int, Contribution]) -> list[_Row]:
    return [(rank, int(one.kind), int(one.data_type), int(one.reduction), one.peer, one.count, one.scalar, one.data)
            for rank, one in sorted(contributions.items())]


def decode(data: bytes | bytearray | memoryview) -> dict[int, Contribution]:
    """The inverse of :func:`encode`, of all parts; it shares their memory. Raises :class:`Corrupt`."""
    try:
        return _contributions(msgspec.msgpack.decode(data, type=list[_ReadRow]))
    except msgspec.MsgspecError as error:
        raise Corrupt(f"contributions to a collective cannot be read: {error}", reason="contributions") from None


def placed(data: Any, view: Callable[[int, int], memoryview]) -> dict[int, Contribution]:
    """Return the contributions of PLACED's rows. ``view`` (segment, bytes): what it raises; :class:`Corrupt`."""
    try:
        rows = msgspec.msgpack.decode(data, type=list[_PlacedRow])
    except msgspec.MsgspecError as error:
        raise Corrupt(f"places of contributions cannot be read: {error}", reason="contributions") from None
    return _contributions([(*row[:7], view(*row[7:])) for row in rows])


def _contributions(rows: Sequence[_Row]) -> dict[int, Contribution]:
    try:
        found = {rank: Contribution(Kind(kind), DataType(data_type), Reduction(reduction), peer, count, scalar, whole)
                 for rank, kind, data_type, reduction, peer, count, scalar, whole in rows}
    except ValueError as error:
        raise Corrupt(f"contributions to a collective cannot be read: {error}", reason="contributions") from None
    if any(not 0 <= rank < MOST_RANKS for rank in found):
        raise Corrupt("contributions to a collective name an impossible rank", reason="rank")
    return found


@dataclass(slots=True)
class Entry:
    """What is kept of one collective. ``seq``: of the call by which this session's last rank came to it; 0: none."""

    came: dict[int, Contribution] = field(default_factory=dict)
    seq: int = 0
    size: int = 0


class Log:
    """Contributions by communicator and collective; thread-safe. ``changed`` may be waited on with the lock held."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.bytes = 0
        self._most = most
        self._entries: OrderedDict[tuple[Unique, Key], Entry] = OrderedDict()
        self._listeners: list[Callable[[Unique, Key], None]] = []
        self._held: set[tuple[Unique, Key]] = set()  #: that are not complete here
        #: (communicator, sender, receiver): from which number on the session's journal brings it again; None: not known
        self.kept_from: Callable[[Unique, int, int], int | None] = lambda unique, sender, receiver: None
        self._least: dict[Unique, int] = {}  #: what every session's is, at least
        self._floors: dict[Unique, dict[str, int]] = {}  #: by session: collectives below are never asked for again

    def listen(self, listener: Callable[[Unique, Key], None]) -> None:
        """Have ``listener`` called, without the lock, with each collective that something was brought to."""
        self._listeners.append(listener)

    def put(self, unique: Unique, key: Key, came: dict[int, Contribution], seq: int = 0) -> None:
        """Keep contributions; those that are there already stay. ``seq`` 0: of other sessions."""
        with self.lock:
            if not seq and key[0] < 0 and key[2] < self._least.get(unique, 0):
                return  # it was on its way when the last member said that it asks for it no more
            entry = self._entries.setdefault((unique, key), Entry())
            for rank, contribution in came.items():
                if rank not in entry.came:
                    entry.came[rank] = contribution
                    entry.size += len(contribution.data)
                    self.bytes += len(contribution.data)
            entry.seq = max(entry.seq, seq)
            if self.bytes > self._most:
                self._make_room((unique, key))
            self.changed.notify_all()
        for listener in self._listeners:
            listener(unique, key)

    def _make_room(self, newest: tuple[Unique, Key]) -> None:
        """Forget the oldest, but for the newest and those that are not complete here."""
        for where in list(self._entries):
            if self.bytes <= self._most:
                return
            if where != newest and where not in self._held:
                self._drop(where)

    def hold(self, unique: Unique, key: Key) -> None:
        """Keep a collective whatever comes: it is not complete here, until :meth:`release`."""
        with self.lock:
            self._held.add((unique, key))

    def release(self, unique: Unique, key: Key) -> None:
        """Keep it as any other."""
        with self.lock:
            self._held.discard((unique, key))

    def holds(self, unique: Unique, key: Key) -> bool:
        """Tell whether a collective is kept whatever comes."""
        with self.lock:
            return (unique, key) in self._held

    def get(self, unique: Unique, key: Key) -> dict[int, Contribution]:
        """Return what is there of a collective, by rank."""
        with self.lock:
            entry = self._entries.get((unique, key))
            return dict(entry.came) if entry is not None else {}

    def brought(self, unique: Unique, ranks: Collection[int]) -> dict[tuple[int, int, int], int]:
        """Return the number behind the last that each of this session's ranks brought: by rank and pair, -1 and -1."""
        found: dict[tuple[int, int, int], int] = {}
        with self.lock:
            for (name, key), entry in self._entries.items():
                if name == unique and entry.seq:
                    for rank in set(ranks) & set(entry.came):
                        found[rank, *key[:2]] = max(found.get((rank, *key[:2]), 0), key[2] + 1)
        return found

    def keys(self, unique: Unique) -> list[Key]:
        """Return what is kept of a communicator, the oldest first."""
        with self.lock:
            return [key for name, key in self._entries if name == unique]

    def rows(self, most: int = MOST_WRITTEN) -> list[Any]:
        """Return what is kept, for a checkpoint or a move: the newest, ``most`` bytes. They are not copied."""
        found, size = [], 0
        with self.lock:
            for (unique, key), entry in reversed(self._entries.items()):
                size += entry.size
                if size > most:
                    break
                found.append((unique, key, entry.seq, _rows(entry.came)))
        return found[::-1]

    def restore(self, rows: Any) -> None:
        """Keep what :meth:`rows` returned, as it came out of a checkpoint; nothing where that is unset.

        Raises :class:`Corrupt`.
        """
        try:
            read = msgspec.convert(rows or [], type=_Rows)
        except msgspec.ValidationError as error:
            raise Corrupt(f"contributions in a checkpoint cannot be read: {error}", reason="contributions") from None
        for unique, key, seq, came in read:
            self.put(unique, key, _contributions(came), seq)

    def passed(self, unique: Unique, seq: int) -> int:
        """Return the number below which this session needs no collective again that goes on behind call ``seq``."""
        with self.lock:
            numbers = [key[2] for (name, key), entry in self._entries.items()
                       if name == unique and key[0] < 0 and 0 < entry.seq <= seq]
        return max(numbers, default=-1) + 1

    def floor(self, unique: Unique, session: str, number: int, members: Iterable[str]) -> None:
        """Note that ``session`` asks for no collective below ``number`` again; forget what none of ``members`` does.

        Messages between two ranks are kept until there is no room.
        """
        with self.lock:
            floors = self._floors.setdefault(unique, {})
            floors[session] = max(floors.get(session, 0), number)
            least = self._least[unique] = min(floors.get(member, 0) for member in members)
            for where in [where for where in self._entries if where[0] == unique and 0 <= where[1][2] < least
                          and where[1][0] < 0]:
                self._drop(where)

    def floor_of(self, unique: Unique, session: str) -> int:
        """Return the number of the first collective that ``session`` may ask for again."""
        with self.lock:
            return self._floors.get(unique, {}).get(session, 0)

    def forget(self, unique: Unique) -> None:
        """Forget a communicator."""
        with self.lock:
            for where in [where for where in self._entries if where[0] == unique]:
                self._drop(where)
            self._floors.pop(unique, None)
            self._least.pop(unique, None)
            self._held = {where for where in self._held if where[0] != unique}

    def _drop(self, where: tuple[Unique, Key]) -> None:
        self.bytes -= self._entries.pop(where).size
