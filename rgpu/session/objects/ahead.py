"""Objects that a session's next owner makes before it takes over: those that take long to make, and last. Pure.

These are contexts and the history of module loads: loading a framework's modules takes most of a second, and no other
objects take that long. The source of a move sends them while the session still runs (:func:`of`, :meth:`Ahead.encode`);
the destination applies them (:meth:`Ahead.calls`). The state of the last pause then refers to their contents by number
(:meth:`Ahead.shorten`, :meth:`Ahead.lengthen`), and the other calls are applied after it, in their order
(:meth:`Ahead.rest`). That is safe because

* the history of modules only grows: an unload meanwhile is a call of its own, behind the loads;
* a setting that was replaced meanwhile is set again by the call that replaced it;
* the creation of a context that was destroyed meanwhile cannot be undone: then the move fails.

Streams, events, mappings, allocations and graphs are made in the pause: they are made quickly and are short-lived.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import blake3
import msgspec

from rgpu.session.calls.wire import BY_NAME
from rgpu.session.errors import Corrupt, RecoveryFailed
from rgpu.session.journal.record import Record
from rgpu.session.objects.live import LiveObjects
from rgpu.session.objects.load_answers import LOAD
from rgpu.session.objects.module_table import GlobalVariable

_CONTEXT = BY_NAME["context_create"].id
CALLS = frozenset(BY_NAME[name].id for name in (
    "session_open", "context_create", "context_destroy", "context_limit", "context_flags", "module_load",
    "module_unload", "function_attribute"))


class _Row(msgspec.Struct, array_like=True):
    seq: int
    call_id: int
    thread: int
    flags: int
    args: bytes
    payload: int  #: number of a module binary, or −1
    #: (name, address, size) of a module's variables; empty from an older source
    variables: tuple[tuple[str, int, int], ...] = ()


class _Body(msgspec.Struct, array_like=True):
    contents: list[bytes]
    rows: list[_Row]


@dataclass(frozen=True)
class Ahead:
    """Objects to make ahead. ``contents``: module binaries, once each; ``digests``: their BLAKE3, at the destination.
    """

    contents: list[bytes]
    rows: list[_Row]
    digests: tuple[bytes, ...] = ()

    def encode(self) -> bytes:
        """Encode the objects as msgpack for the other worker."""
        return msgspec.msgpack.encode(_Body(self.contents, self.rows))

    @staticmethod
    def decode(data: Any) -> Ahead:
        """Invert :meth:`encode`. Raises :class:`Corrupt` for anything else."""
        try:
            body = msgspec.msgpack.decode(data, type=_Body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise Corrupt(f"objects ahead: {error}", offset=0, reason="objects ahead") from None
        seen: set[int] = set()  # an unload may stand behind later calls
        for row in body.rows:
            if row.seq <= 0 or row.seq in seen or row.call_id not in CALLS \
                    or (row.payload >= 0) != (row.call_id == LOAD) or not -1 <= row.payload < len(body.contents) \
                    or not 0 <= row.thread < 1 << 32 \
                    or not 0 <= row.flags < 1 << 16:
                raise Corrupt(f"objects ahead: call {row.call_id} at position {row.seq}", offset=0,
                              reason="objects ahead")
            seen.add(row.seq)
        return Ahead(body.contents, body.rows, tuple(blake3.blake3(one).digest() for one in body.contents))

    def calls(self) -> list[Record]:
        """Return the calls in the order in which they are applied."""
        return [Record(row.seq, row.call_id, row.args, self.contents[row.payload] if row.payload >= 0 else b"",
                       row.thread, row.flags) for row in self.rows]

    def variables(self) -> dict[int, tuple[GlobalVariable, ...]]:
        """Return the variables of each module with their addresses at the source, by the position of its load."""
        return {row.seq: tuple(GlobalVariable(*each) for each in row.variables) for row in self.rows if row.variables}

    # -- the last pause ---------------------------------------------------------------
    def shorten(self, objects: dict[str, Any]) -> dict[str, Any]:
        """Shorten :meth:`LiveObjects.to_dict` of the same objects, taken later: binaries that the other side has are
        replaced by their numbers.
        """
        numbers = {id(one): number for number, one in enumerate(self.contents)}
        return {**objects, "payloads": [numbers.get(id(one), one) for one in objects["payloads"]]}

    def lengthen(self, objects: Any) -> tuple[dict[str, Any], list[bytes]]:
        """Invert :meth:`shorten`; also return the BLAKE3 of each binary, empty where unknown.

        Raises :class:`Corrupt`.
        """
        try:
            given = list(objects["payloads"])
            whole = [self.contents[one] if type(one) is int and one >= 0 else one for one in given]
            digests = [self.digests[one] if type(one) is int else b"" for one in given]
        except (KeyError, TypeError, IndexError) as error:
            raise Corrupt(f"live objects: {error!r}", offset=0, reason="live objects") from None
        return {**objects, "payloads": whole}, digests

    def rest(self, calls: list[Record]) -> list[Record]:
        """Return the structural calls that were not applied ahead. Raises :class:`RecoveryFailed` if a context that was
        made ahead has been destroyed.
        """
        wanted, made = {call.seq for call in calls}, {row.seq for row in self.rows}
        if gone := [row.seq for row in self.rows if row.call_id == _CONTEXT and row.seq not in wanted]:
            raise RecoveryFailed(f"the context of call {gone[0]} was destroyed while the session was being moved; "
                                 "move it again", seq=gone[0], reason="objects ahead")
        return [call for call in calls if call.seq not in made]


def of(live: LiveObjects) -> Ahead:
    """Take the objects of a session that applies no call meanwhile. Binaries are those of ``live``, not copies."""
    contents: list[bytes] = []
    numbers: dict[int, int] = {}
    rows: list[_Row] = []
    variables = live.variables()
    for call in live.structural_calls():
        if call.call_id not in CALLS:
            continue
        if live.pending(call.seq):
            break  # it takes effect behind later calls
        number = -1
        if call.call_id == LOAD:
            if live.unanswered(call.seq):
                break  # it may still fail; the calls behind it are applied in order
            if (number := numbers.setdefault(id(call.payload), len(contents))) == len(contents):
                contents.append(call.payload)
        rows.append(_Row(call.seq, call.call_id, call.thread, call.flags, call.args, number,
                         tuple((one.name, one.address, one.size) for one in variables.get(call.seq, ()))))
    return Ahead(contents, rows)
