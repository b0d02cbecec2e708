"""How many collectives of each communicator a session has given to its device: what members of a gang compare for a
checkpoint of all of them.

Counted are communicators whose ranks are in several sessions, by the numbers that the client gives operations, so a
session that was rebuilt goes on with the numbers of its checkpoint. For each communicator the collectives of each rank
count; for each pair of ranks what the one sent and the other received. Communicators that were destroyed stay: who
replays from an older position asks for what was brought to them.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rgpu.session.errors import Corrupt
from rgpu.session.objects.collectives import Kind, Operation

MOST_MARKS = 8  #: checkpoints that may count yet
UNKNOWN, GIVEN_UP = -1, -2  #: instead of a number: it is not known before the next one; nothing of it is waited for

_Place = tuple[int, int, int]  #: sender, receiver, rank here


@dataclass(slots=True)
class _Communicator:
    """One communicator. ``given``: by (sender, receiver, rank here) how many; the ends are -1 for collectives."""

    name: str
    members: list[str]
    given: dict[_Place, int] = field(default_factory=dict)
    aborted: bool = False


class Given:
    """See the module docstring. Told by the applying thread; any may ask."""

    def __init__(self, session: str) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._all: dict[str, _Communicator] = {}
        self._handles: dict[int, tuple[str, int]] = {}  #: name and rank of each that was not destroyed
        self._marks: dict[int, dict[str, dict[_Place, int]]] = {}  #: by position of a checkpoint: what was given there
        self._kept: dict[str, dict[_Place, int]] = {}  #: likewise, of the newest that counts: the journal begins there
        self._from_before = False  #: the checkpoint that this session was rebuilt from tells no numbers

    def created(self, communicator: int, unique: bytes, rank: int, members: Sequence[str]) -> None:
        """Note a rank that was made, also in a rebuild. ``members``: the session of each; none: all are in this one."""
        if not members:
            return
        name = _name(unique)
        with self._lock:
            known = self._all.setdefault(name, _Communicator(name, list(members)))
            self._handles[communicator] = name, rank
            known.given.setdefault((-1, -1, rank), UNKNOWN if self._from_before else 0)

    def destroyed(self, communicator: int, abort: bool) -> None:
        """Note that a rank ended."""
        with self._lock:
            if (found := self._handles.pop(communicator, None)) is None:
                return
            if (one := self._all.get(found[0])) is not None:
                one.aborted = one.aborted or abort

    def gave(self, operations: Sequence[Operation]) -> bool:
        """Note operations of a group; whether any is of such a communicator."""
        found = False
        with self._lock:
            for op in operations:
                if (known := self._handles.get(op.communicator)) is None:
                    continue
                name, rank = known
                pair = (-1, -1) if not op.kind.paired else \
                    (rank, op.peer) if op.kind is Kind.SEND else (op.peer, rank)
                if not op.kind.paired or rank != op.peer:  # what a rank sends to itself concerns nobody else
                    given = self._all[name].given
                    given[*pair, rank] = max(given.get((*pair, rank), 0), op.number + 1)
                found = True
        return found

    def rows(self) -> dict[str, tuple[int, int, list[str]]]:
        """Return, by communicator and pair, the least and the greatest number of a rank here, and whose they are."""
        with self._lock:
            return {name: row for one in self._all.values() for name, row in self._rows_of(one).items()}

    def _rows_of(self, one: _Communicator) -> dict[str, tuple[int, int, list[str]]]:
        if one.aborted:
            return {one.name: (GIVEN_UP, GIVEN_UP, sorted(set(one.members)))}
        here = [rank for rank, session in enumerate(one.members) if session == self._session]
        numbers = [one.given.get((-1, -1, rank), 0) for rank in here]
        found = {one.name: (min(numbers), max(numbers), sorted(set(one.members)))} if numbers else {}
        for sender, receiver in sorted({place[:2] for place in one.given if place[0] >= 0}):
            numbers = [one.given.get((sender, receiver, end), 0) for end in (sender, receiver)
                       if one.members[end] == self._session]
            found[f"{one.name} {sender}>{receiver}"] = (min(numbers), max(numbers),
                                                        sorted({one.members[sender], one.members[receiver]}))
        return found

    def mark(self, position: int) -> None:
        """Note that a checkpoint is taken at this position of the journal; it may come to count."""
        with self._lock:
            self._marks[position] = self._numbers()
            for old in sorted(self._marks)[:-MOST_MARKS]:
                del self._marks[old]

    def cut(self, position: int) -> None:
        """Note that a checkpoint counts: the journal ahead of this position is gone."""
        with self._lock:
            self._kept = self._marks.pop(position, self._kept)
            for old in [old for old in self._marks if old < position]:
                del self._marks[old]

    def kept_from(self, unique: bytes, sender: int, receiver: int) -> int | None:
        """Return from which number on the journal brings again what ranks here brought; None: it is not known.

        ``sender``, ``receiver``: of a pair whose sender is here; -1: collectives.
        """
        with self._lock:
            if (given := self._kept.get(_name(unique))) is None:
                return None
            found = [number for place, number in given.items() if place[:2] == (sender, receiver)
                     and (sender < 0 or place[2] == sender)]
            return None if UNKNOWN in found else max(found, default=0)

    def _numbers(self) -> dict[str, dict[_Place, int]]:
        return {name: dict(one.given) for name, one in self._all.items()}

    def peers(self) -> list[str]:
        """Return the other sessions that have, or had, ranks of its communicators."""
        with self._lock:
            return sorted({session for one in self._all.values() if not one.aborted for session in one.members}
                          - {self._session})

    def state(self) -> Any:
        """Return it for a checkpoint or a move; unset where there is nothing."""
        with self._lock:
            return msgspec.to_builtins([[one.name, one.members, list(one.given.items()), one.aborted]
                                        for one in self._all.values()]) or msgspec.UNSET

    def restore(self, state: Any) -> None:
        """Go on from what :meth:`state` returned, before the communicators are made anew.

        Unset where there was nothing, or the version before wrote it. Raises :class:`Corrupt`.
        """
        try:
            rows = msgspec.convert([] if state is msgspec.UNSET or state is None else state, type=list[
                tuple[str, list[str], list[tuple[tuple[int, int, int], int]], bool]])
        except msgspec.ValidationError as error:
            raise Corrupt(f"numbers of collectives in a checkpoint cannot be read: {error}", reason="given") from None
        with self._lock:
            self._from_before = not rows
            for one in self._all.values():  # made ahead of the state: at what number is not known yet
                one.given = dict.fromkeys(one.given, UNKNOWN)
            for name, members, given, aborted in rows:
                if any(not -1 <= end < len(members) for place, _ in given for end in place):
                    raise Corrupt("numbers of collectives in a checkpoint name impossible ranks", reason="given")
                self._all[name] = _Communicator(name, members, dict(given), aborted)

    def rebuilt(self) -> None:
        """The communicators of a checkpoint were made: those that follow begin at 0."""
        self._from_before = False


def _name(unique: bytes) -> str:
    return hashlib.blake2b(unique, digest_size=12).hexdigest()
