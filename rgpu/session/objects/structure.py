"""The structural calls: those that make the objects of a session on a fresh device, in the order to apply them."""

from __future__ import annotations

from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_NAME
from rgpu.session.journal.record import Record
from rgpu.session.objects import graphs
from rgpu.session.objects.object_table import ObjectTable

#: call id → its place in the order; others come first
_LATE = {BY_NAME["memory_allocate"].id: 1, BY_NAME["array_create"].id: 2, BY_NAME["texture_create"].id: 3,
         BY_NAME["texture_place"].id: 3, BY_NAME["graph_instantiate"].id: 4}


def calls(table: ObjectTable) -> list[Record]:
    """Return the structural calls in the order to apply them.

    That is the order of the journal, with unloads where they took effect, except for allocations, which follow all
    those: a device may free memory when its last context is destroyed, and contexts that left no trace are not
    replayed. Arrays follow allocations; then textures, in the order of their handles, as drivers assign them; then
    executable graphs: an update may name objects that were made after the graph.
    """
    found: dict[int, Record] = {table.opened.seq: table.opened} if table.opened else {}
    #: position of a call with another place in the order → (that place, its rank there)
    ends: dict[int, tuple[int, int]] = {}
    for item in list(table.objects.values()):
        if item.kind == "graph_exec" and not item.created.payload:
            item.created.payload = graphs.encode(item.nodes)
        found[item.created.seq] = item.created
        for record in item.settings.values():
            found[record.seq] = record
        if item.kind == "texture" and (placed := item.settings.get("handle")):
            handle = decoders.decode(placed.call_id, placed.args).handle
            ends[item.created.seq] = ends[placed.seq] = handle, 0
        if item.ended is not None:
            found[item.ended.seq] = item.ended
            ends[item.ended.seq] = item.ended_at, 1
    return sorted(found.values(), key=lambda record: (
        _LATE.get(record.call_id, 0), ends.get(record.seq, (record.seq, 0)), record.seq))
