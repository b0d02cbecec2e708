"""``communicators/NAME``: the ranks of a communicator that have arrived, and their sessions. Pure.

NAME is the hash of the data that the ranks share (the unique id, and for children of a communicator how they were
made). A rank arrives once; repeating its request changes nothing, and returns the ranks that have arrived by then.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from rgpu.migrate.records.schema import SCHEMA, Name, Record, Seconds, Text, decode
from rgpu.session.errors import Corrupt, NotPermitted, Refused

COMMUNICATORS = "communicators/"
MOST_RANKS = 2048  #: of one communicator, so that its record stays far below the largest size
KEEP_SECONDS = 3600.0  #: that a record is kept; ranks hold their peers' data once all have arrived

_NAME = r"\A[0-9a-f]{32}\Z"
U31 = Annotated[int, Meta(ge=0, le=2**31 - 1)]
#: (rank, its session, its payload for the others: a u64 as hexadecimal digits)
Arrival = tuple[U31, Name, Annotated[str, Meta(pattern=r"\A[0-9a-f]{1,16}\Z")]]


class RendezvousRecord(Record, frozen=True, kw_only=True):
    """Ranks of a communicator that have arrived, all of one user's sessions."""

    v: int = SCHEMA
    name: Annotated[str, Meta(pattern=_NAME)]
    user: Text
    ranks: Annotated[int, Meta(ge=1, le=MOST_RANKS)]
    came: Annotated[list[Arrival], Meta(max_length=MOST_RANKS)] = []
    created: Seconds = 0.0


def communicator_key(name: str) -> str:
    """Key of a rendezvous."""
    return COMMUNICATORS + name


def read_rendezvous(value: bytes, key: str) -> RendezvousRecord:
    """Return the checked record. Raises :class:`Corrupt`, :class:`VersionMismatch`."""
    record = decode(value, RendezvousRecord, key)
    if communicator_key(record.name) != key:
        raise Corrupt(f"{key} holds the ranks of {record.name}", offset=0, reason="name", key=key)
    return record


def come(record: RendezvousRecord | None, *, name: str, user: str, ranks: int, rank: int, session: str, payload: int,
         now: float) -> RendezvousRecord:
    """Return the record with that rank in it; the same record if the rank had arrived already.

    Raises :class:`Refused` where it contradicts ranks that have arrived, :class:`NotPermitted` for another user's.
    """
    if not 0 <= rank < ranks <= MOST_RANKS:
        raise Refused(f"rank {rank} of {ranks}: a communicator has 1 to {MOST_RANKS} ranks, counted from 0")
    if record is None:
        record = RendezvousRecord(name=name, user=user, ranks=ranks, created=now)
    if record.user != user:
        raise NotPermitted("that communicator is another user's: ranks of one user only come together")
    if record.ranks != ranks:
        raise Refused(f"rank {rank} asks for a communicator of {ranks} ranks, others gave {record.ranks}: all ranks "
                      "have to give the same number", ranks=record.ranks)
    shown = f"{payload:x}"
    for other, where, what in record.came:
        if other != rank:
            continue
        if (where, what) != (session, shown):
            raise Refused(f"rank {rank} has come already, from session {where}: two processes gave the same rank",
                          rank=rank, session=where)
        return record
    return record.replace(came=sorted([*record.came, (rank, session, shown)]))
