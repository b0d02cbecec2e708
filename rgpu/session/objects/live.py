"""The live objects of a session, as the calls that make them (SEMANTICS 12, 13).

:class:`LiveObjects` is told every call that is applied and every answer, and
keeps of them what a fresh device needs to get the same objects at the same
addresses. Its size follows what is alive, plus the history of module loads.

=============  ================================================================
what           what is kept
=============  ================================================================
session_open   always
context        create, last value of each limit, flags. When destroyed: gone
               with its streams and events; kept, with the destroying call,
               while a module was ever loaded into it
module         every load that succeeded and every unload, for ever: they
               decide addresses. Contents are held once each, by BLAKE3. Last
               value of each function attribute while it is loaded. An unload
               beside an open host function takes place when none is open any
               more, in the journal's order: devices do the same
stream, event  create
mapping        the map call of every range that is still mapped, with the
               address that it was moved to
alias          create, with the address that what it stands for was moved to
memory         allocate; ends with its own free, with the mapping below it, or
               with the last context
host_memory    allocate
array          create; behind allocations, since its memory is one
texture        create, and the handle that the program holds; behind arrays
communicator   create, of each rank
graph_exec     instantiate, with the nodes as the updates left them; made again
               after everything else, since its nodes may name any of it
=============  ================================================================

A call that the device refuses (a number in use, an unknown one) changes
nothing here either. Ranges are not merged: a later unmap names them singly.

=============  ================================================================
module here    what it is
=============  ================================================================
object_table   which objects live, and what is kept of each
object_calls   what each call does to them
structure      the calls that make them again, in their order
live_format    how checkpoints and moves carry them
=============  ================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any

import blake3

from rgpu.session.answers import Divergence
from rgpu.session.journal.record import Record
from rgpu.session.objects import graphs, live_format, object_calls, structure
from rgpu.session.objects.load_answers import differs, load_answer
from rgpu.session.objects.module_table import GlobalVariable
from rgpu.session.objects.object_table import ObjectTable

_AWAITED = frozenset({"array", "texture", "communicator"})  #: kinds whose creation may be refused
_IDENTITY = Struct("<QQ")


@dataclass(frozen=True, slots=True)
class Mapping:
    """A range of device addresses backed by memory."""

    address: int
    size: int
    device: int


class LiveObjects:
    """See the module docstring. Not locked; :meth:`answered` may be called from other threads."""

    def __init__(self, table: ObjectTable | None = None) -> None:
        self._table = ObjectTable() if table is None else table

    # -- events -----------------------------------------------------------------
    def apply(self, record: Record) -> None:
        """A call is about to be applied. Raises :class:`Corrupt` if a call that matters here does not decode."""
        object_calls.apply(self._table, record)

    @property
    def position(self) -> int:
        """Position of the last call applied."""
        return self._table.position

    @position.setter
    def position(self, position: int) -> None:
        self._table.position = position

    def answered(self, seq: int, result: int, reply: Any) -> None:
        """A call was answered; only those that make objects matter. A failed one leaves nothing."""
        table = self._table
        if seq not in table.pending:
            item = table.objects.get(seq) if result else None
            if item is not None and item.kind in _AWAITED:
                table.forget(item)
            return
        table.pending.discard(seq)
        load = table.objects[seq]
        if result:
            table.forget(load)
            return
        load.answer = load_answer(reply)
        if load.ended is not None:
            load.answer.globals = None

    # -- questions --------------------------------------------------------------
    def structural_calls(self) -> list[Record]:
        """Return the calls that make a fresh device hold these objects, in the order to apply them."""
        return structure.calls(self._table)

    def pending(self, seq: int) -> bool:
        """Whether the call at that position is an unload that did not take place yet."""
        return any(item.ended is not None and item.ended.seq == seq for item in self._table.unloads)

    @property
    def count(self) -> int:
        """How many objects live."""
        return len(self._table.current)

    def inventory(self) -> list[tuple[str, int, bytes]]:
        """(kind, number, digest of the calls that make it what it is) of every live object, sorted."""
        found = []
        for (kind, number), seq in sorted(self._table.current.items()):
            item = self._table.objects[seq]
            hasher = blake3.blake3(_IDENTITY.pack(seq, item.created.call_id))
            for record in (item.created, *sorted(item.settings.values(), key=lambda record: record.seq)):
                hasher.update(_IDENTITY.pack(len(record.args), record.call_id))
                hasher.update(record.args)
            hasher.update(graphs.encode(item.nodes) if kind == "graph_exec" else item.digest)
            found.append((kind, number, hasher.digest(length=16)))
        return found

    def unanswered(self, seq: int) -> bool:
        """Whether the load of that position has no answer yet."""
        return seq in self._table.pending

    def handles(self, kind: str) -> list[int]:
        """Numbers (or addresses) of the live objects of a kind, sorted. Raises KeyError for no such kind."""
        return self._table.handles(kind)

    def mappings(self) -> list[Mapping]:
        """The mapped ranges, by address."""
        found = []
        for (kind, _), seq in self._table.current.items():
            if kind == "mapping":
                args = self._table.objects[seq].args
                found.append(Mapping(args.address, args.size, args.device))
        return sorted(found, key=lambda mapping: mapping.address)

    def module_history(self) -> list[tuple[int, int, bytes, bool]]:
        """(position, module, BLAKE3 of the contents, still loaded) of every load, in order."""
        return [(seq, item.number, item.digest, item.ended is None)
                for seq, item in sorted(self._table.objects.items()) if item.kind == "module"]

    def variables(self) -> dict[int, tuple[GlobalVariable, ...]]:
        """Where the variables of each loaded module stand, by the position of its load."""
        return {seq: item.answer.globals for seq, item in self._table.objects.items()
                if item.kind == "module" and item.answer is not None and item.answer.globals}

    @property
    def payload_bytes(self) -> int:
        """Bytes of module contents held."""
        return sum(map(len, self._table.contents.values()))

    def digest(self, seq: int) -> bytes:
        """Return the BLAKE3 of the module binary that the load at position ``seq`` brought; empty for any other."""
        item = self._table.objects.get(seq)
        return b"" if item is None else item.digest

    def load_differs(self, seq: int, result: int, reply: Any) -> Divergence | None:
        """Compare the answer of a replayed load with the one recorded (SEMANTICS 12); None: it is the same."""
        item = self._table.objects[seq]
        return None if item.answer is None else differs(seq, item.number, item.answer, result, reply)

    # -- checkpoints and moves ---------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        """Return the objects as checkpoints and moves carry them, for msgpack; contents of modules once each."""
        return live_format.to_dict(self._table)

    @staticmethod
    def from_dict(data: Any, digests: Sequence[bytes] = ()) -> LiveObjects:
        """The inverse of :meth:`to_dict`. Raises :class:`Corrupt` for anything else.

        ``digests``: of the payloads, those that the caller knows; empty ones it does not.
        """
        return LiveObjects(live_format.from_dict(data, digests))

    def check(self) -> None:
        """Invariants; raises AssertionError."""
        self._table.check()
