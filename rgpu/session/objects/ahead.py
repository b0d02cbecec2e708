"""Objects that a session's next owner makes before it owns anything: those that take long, and stay. Pure.

Contexts, and the history of module loads: loading a framework's modules takes the better part of a second, and nothing
else of a session does. A source that is to stand still sends them while it runs on (:func:`of`, :meth:`Ahead.encode`);
the destination applies them (:meth:`Ahead.calls`). The state of the last pause then names their contents by number
(:meth:`Ahead.shorten`, :meth:`Ahead.lengthen`), and what is left to apply is all else, in its order
(:meth:`Ahead.rest`). That is safe because

* the history of modules only grows: an unload meanwhile is a call of its own, behind the loads;
* a setting that was replaced meanwhile is set again by the call that replaced it;
* a context that is gone, with all that it left, cannot be taken back: then the move is.

Streams, events, mappings, allocations and graphs are made in the pause: they are quick, and come and go.
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
    payload: int  #: number of a module's contents, or −1
    #: (name, address, size) of a module's variables; an older source does not tell
    variables: tuple[tuple[str, int, int], ...] = ()


class _Body(msgspec.Struct, array_like=True):
    contents: list[bytes]
    rows: list[_Row]


@dataclass(frozen=True)
class Ahead:
    """``contents``: of modules, once each; ``digests``: their BLAKE3, at the destination."""

    contents: list[bytes]
    rows: list[_Row]
    digests: tuple[bytes, ...] = ()

    def encode(self) -> bytes:
        """Encode it as msgpack for the other worker."""
        return msgspec.msgpack.encode(_Body(self.contents, self.rows))

    @staticmethod
    def decode(data: Any) -> Ahead:
        """Raises :class:`Corrupt` for anything but what :meth:`encode` makes."""
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
        """Calls in the order to apply them."""
        return [Record(row.seq, row.call_id, row.args, self.contents[row.payload] if row.payload >= 0 else b"",
                       row.thread, row.flags) for row in self.rows]

    def variables(self) -> dict[int, tuple[GlobalVariable, ...]]:
        """Where the variables of each module stand at the source, by the position of its load."""
        return {row.seq: tuple(GlobalVariable(*each) for each in row.variables) for row in self.rows if row.variables}

    # -- the last pause ---------------------------------------------------------------
    def shorten(self, objects: dict[str, Any]) -> dict[str, Any]:
        """Shorten :meth:`LiveObjects.to_dict` of the same objects, taken later: contents that the other side has as
        numbers.
        """
        numbers = {id(one): number for number, one in enumerate(self.contents)}
        return {**objects, "payloads": [numbers.get(id(one), one) for one in objects["payloads"]]}

    def lengthen(self, objects: Any) -> tuple[dict[str, Any], list[bytes]]:
        """The inverse, and the BLAKE3 of each, empty where it is not known. Raises :class:`Corrupt`."""
        try:
            given = list(objects["payloads"])
            whole = [self.contents[one] if type(one) is int and one >= 0 else one for one in given]
            digests = [self.digests[one] if type(one) is int else b"" for one in given]
        except (KeyError, TypeError, IndexError) as error:
            raise Corrupt(f"live objects: {error!r}", offset=0, reason="live objects") from None
        return {**objects, "payloads": whole}, digests

    def rest(self, calls: list[Record]) -> list[Record]:
        """Structural calls that were not applied ahead. Raises :class:`RecoveryFailed`."""
        wanted, made = {call.seq for call in calls}, {row.seq for row in self.rows}
        if gone := [row.seq for row in self.rows if row.call_id == _CONTEXT and row.seq not in wanted]:
            raise RecoveryFailed(f"the context of call {gone[0]} was destroyed while the session was being moved; "
                                 "move it again", seq=gone[0], reason="objects ahead")
        return [call for call in calls if call.seq not in made]


def of(live: LiveObjects) -> Ahead:
    """Take the objects of a session that applies no call at this moment. Contents are those of ``live``, not copies."""
    contents: list[bytes] = []
    numbers: dict[int, int] = {}
    rows: list[_Row] = []
    variables = live.variables()
    for call in live.structural_calls():
        if call.call_id not in CALLS:
            continue
        if live.pending(call.seq):
            break  # it takes place behind calls that are still to come
        number = -1
        if call.call_id == LOAD:
            if live.unanswered(call.seq):
                break  # nobody knows whether it stays; what comes behind it is made in order
            if (number := numbers.setdefault(id(call.payload), len(contents))) == len(contents):
                contents.append(call.payload)
        rows.append(_Row(call.seq, call.call_id, call.thread, call.flags, call.args, number,
                         tuple((one.name, one.address, one.size) for one in variables.get(call.seq, ()))))
    return Ahead(contents, rows)
