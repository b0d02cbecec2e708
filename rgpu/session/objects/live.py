"""The live objects of a session, as the calls that make them (SEMANTICS 12, 13).

:class:`LiveObjects` receives every call that is applied and every answer, and
keeps the part of them from which a fresh device makes the same objects at the
same addresses. Its size is that of the live objects, plus the history of module loads.

=============  ================================================================
object         calls that are kept
=============  ================================================================
session_open   always
context        create, last value of each limit, flags. A destroyed context is
               dropped with its streams and events; if a module was ever loaded
               into it, it is kept, with the destroying call
module         every load that succeeded and every unload, for ever: they
               decide addresses. Binaries are held once each, by BLAKE3. Last
               value of each function attribute while it is loaded. An unload
               beside an open host function takes effect when none is open any
               more, in the journal's order: devices do the same
stream, event  create
mapping        the map call of every range that is still mapped, with the
               address that it was moved to
alias          create, with the address to which its mapping was moved
memory         allocate; ends with its own free, with the mapping below it, or
               with the last context
host_memory    allocate
array          create; after allocations, since its memory is one
texture        create, and the handle that the program holds; after arrays
communicator   create, of each rank
graph_exec     instantiate, with the nodes as the updates left them; made again
               after everything else, since its nodes may name any of it
=============  ================================================================

A call that the device refuses (a number in use, an unknown one) changes
nothing here either. Ranges are not merged: a later unmap names them singly.

=============  ================================================================
Python module  contents
=============  ================================================================
object_table   the live objects, and what is kept of each
object_calls   the effect of each call on them
structure      the calls that make them again, in their order
live_format    their form in checkpoints and moves
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
        """Enter a call that is about to be applied. Raises :class:`Corrupt` if a relevant call does not decode."""
        object_calls.apply(self._table, record)

    @property
    def position(self) -> int:
        """Position of the last call applied."""
        return self._table.position

    @position.setter
    def position(self, position: int) -> None:
        self._table.position = position

    def answered(self, seq: int, result: int, reply: Any) -> None:
        """Enter an answer; only those to calls that make objects matter. A failed call leaves no object."""
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
        """Return the calls that make these objects on a fresh device, in the order to apply them."""
        return structure.calls(self._table)

    def pending(self, seq: int) -> bool:
        """Whether the call at that position is an unload that has not taken effect yet."""
        return any(item.ended is not None and item.ended.seq == seq for item in self._table.unloads)

    @property
    def count(self) -> int:
        """Number of live objects."""
        return len(self._table.current)

    def inventory(self) -> list[tuple[str, int, bytes]]:
        """Return (kind, number, digest of the calls that it consists of) of every live object, sorted."""
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
        """Return the numbers (or addresses) of the live objects of a kind, sorted. Raises KeyError for no such kind."""
        return self._table.handles(kind)

    def mappings(self) -> list[Mapping]:
        """List the mapped ranges by address."""
        found = []
        for (kind, _), seq in self._table.current.items():
            if kind == "mapping":
                args = self._table.objects[seq].args
                found.append(Mapping(args.address, args.size, args.device))
        return sorted(found, key=lambda mapping: mapping.address)

    def module_history(self) -> list[tuple[int, int, bytes, bool]]:
        """Return (position, module, BLAKE3 of the binary, still loaded) of every load, in order."""
        return [(seq, item.number, item.digest, item.ended is None)
                for seq, item in sorted(self._table.objects.items()) if item.kind == "module"]

    def variables(self) -> dict[int, tuple[GlobalVariable, ...]]:
        """Return the variables of each loaded module with their addresses, by the position of its load."""
        return {seq: item.answer.globals for seq, item in self._table.objects.items()
                if item.kind == "module" and item.answer is not None and item.answer.globals}

    @property
    def payload_bytes(self) -> int:
        """Bytes of module binaries held."""
        return sum(map(len, self._table.contents.values()))

    def digest(self, seq: int) -> bytes:
        """Return the BLAKE3 of the module binary of the load at position ``seq``; empty for any other call."""
        item = self._table.objects.get(seq)
        return b"" if item is None else item.digest

    def load_differs(self, seq: int, result: int, reply: Any) -> Divergence | None:
        """Compare the answer of a replayed load with the one recorded (SEMANTICS 12); None: it is the same."""
        item = self._table.objects[seq]
        return None if item.answer is None else differs(seq, item.number, item.answer, result, reply)

    # -- checkpoints and moves ---------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        """Return the objects as checkpoints and moves carry them, for msgpack; module binaries once each."""
        return live_format.to_dict(self._table)

    @staticmethod
    def from_dict(data: Any, digests: Sequence[bytes] = ()) -> LiveObjects:
        """Invert :meth:`to_dict`. Raises :class:`Corrupt` for anything else.

        ``digests``: BLAKE3 of the payloads, empty where the caller does not have it.
        """
        return LiveObjects(live_format.from_dict(data, digests))

    def check(self) -> None:
        """Check the invariants. Raises AssertionError."""
        self._table.check()
