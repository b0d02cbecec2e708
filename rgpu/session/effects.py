"""Records of a session's actual history, for a checker that examines a whole pool afterwards. Pure.

State machines and registry records define what *should* happen. An *effect* is an
action of a process that another can observe: a call applied, an answer sent,
accepted, a journal cut, a checkpoint about to be named. Workers, agents and leaders
record theirs where a test requests it (:mod:`rgpu.link.effects`); the checker in
``tests/effects`` compares all of them with the registry's history (OWNERSHIP 1, 2, 5).

A file: 8 bytes magic, then records; each is u16 length and a msgpack array. The
first one is a :class:`Header`, the others are :class:`Effect`. A process may be
killed in the middle of its last record, so a torn end is no damage; anything
else that does not decode is :class:`Corrupt`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from rgpu.session.errors import Corrupt

MAGIC = b"RGPUEFF1"
LONGEST = 0xFFFF  #: bytes of one record
LONGEST_NOTE = 1024  #: characters
_LENGTH = struct.Struct("<H")

U63 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Word = Annotated[str, Meta(max_length=LONGEST_NOTE)]


class Kind(IntEnum):
    """Kind of an effect. ``first``..``last`` are journal positions, equal where there is only one."""

    # of a worker
    BEGUN = 1  #: an empty session at position 0; ``note``: the state in which it was started
    REBUILT = 2  #: from a checkpoint, or from the pages of a move, at that position
    ACTIVE = 3  #: the registry named this worker the owner, at that position
    APPLIED = 4  #: the calls first..last, in order
    ANSWERED = 5  #: the answer of that call is about to be sent
    OFFERED = 6  #: a verified copy was offered at that position: the registry record alone decides what follows
    RESUMED = 7  #: the move was aborted
    OVER = 8  #: the worker was commanded to drop the session; ``note``: why
    # of an agent
    ATTACHED = 16  #: ships from that position on
    WANTED = 17  #: the program waits for the answer of that call
    ACCEPTED = 18  #: the program was given the answer of that call
    CUT = 19  #: the journal up to there is not needed any more; ``note``: the checkpoint that covers it
    ENDED = 20  #: the session's last call; ``note``: why, when it did not end by the program's end
    # of a leader
    PUBLISHING = 32  #: about to name checkpoint ``note``, whose position this is


class Header(msgspec.Struct, frozen=True, array_like=True):
    """Identity of the process that recorded the file. ``boot``: the machine's boot ID, as times of two boots cannot be
    compared.
    """

    v: int
    who: Annotated[str, Meta(max_length=16)]  #: worker | agent | leader
    session: Word
    host: Word
    pid: U63
    boot: Word = ""


class Effect(msgspec.Struct, frozen=True, array_like=True):
    """One effect. ``when``: CLOCK_BOOTTIME in ns, read before sending and after receiving."""

    kind: Kind
    when: U63
    epoch: U63
    first: U63
    last: U63
    note: Word = ""


@dataclass(frozen=True, slots=True)
class History:
    """Effects of one process on one session, in their order."""

    header: Header
    effects: tuple[Effect, ...]

    @property
    def name(self) -> str:
        """Name for sentences: ``worker 4711 on node-a``."""
        return f"{self.header.who} {self.header.pid}" + (f" on {self.header.host}" if self.header.host else "")


def pack(record: Header | Effect) -> bytes:
    """Encode one record of the file. Raises :class:`ValueError` above LONGEST bytes."""
    data = msgspec.msgpack.encode(record)
    if len(data) > LONGEST:
        raise ValueError(f"a record of {len(data)} bytes; {LONGEST} are allowed")
    return _LENGTH.pack(len(data)) + data


def unpack(data: bytes) -> History | None:
    """Decode a whole file; None when its process was killed before it wrote the header. Raises :class:`Corrupt`."""
    if len(data) < len(MAGIC) and MAGIC.startswith(data):
        return None
    if not data.startswith(MAGIC):
        raise Corrupt("no file of effects: it does not begin with RGPUEFF1", offset=0, reason="magic")
    at, header, effects = len(MAGIC), None, []
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        piece = data[at + _LENGTH.size:at + _LENGTH.size + length]
        if len(piece) < length:
            break
        try:
            if header is None:
                header = msgspec.msgpack.decode(piece, type=Header)
                if header.v != 1:
                    raise ValueError(f"version {header.v}")
            else:
                effect = msgspec.msgpack.decode(piece, type=Effect)
                if effect.first > effect.last:
                    raise ValueError(f"positions {effect.first} to {effect.last}")
                effects.append(effect)
        except (msgspec.MsgspecError, ValueError) as error:
            raise Corrupt(f"the record at byte {at} is no effect: {error}", offset=at, reason="record") from error
        at += _LENGTH.size + length
    return None if header is None else History(header, tuple(effects))
