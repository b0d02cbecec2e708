"""Effect of each call on the objects of a session: one function for each call, and the table of them.

A call in :data:`HANDLERS` makes, changes or ends an object. Others leave no object; host functions are tracked, since
unloads wait for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_ID, BY_NAME, Effect
from rgpu.session.journal.record import Record
from rgpu.session.objects import graphs
from rgpu.session.objects.load_answers import LOAD
from rgpu.session.objects.object_table import ObjectTable, kept

_HOST_FUNCTION, _HOST_FUNCTION_DONE = BY_NAME["host_function"].id, BY_NAME["host_function_done"].id


def apply(table: ObjectTable, record: Record, digest: bytes = b"") -> None:
    """Apply a call to the table. Raises :class:`Corrupt` if a relevant call does not decode.

    ``digest``: the BLAKE3 of the module binary that it loads, where it is known.
    """
    table.position = record.seq
    table.furthest = max(table.furthest, record.seq)
    handler = HANDLERS.get(record.call_id)
    if record.call_id == LOAD and digest:
        _module_load(table, record, decoders.decode(LOAD, record.args), digest)
    elif handler is not None:
        handler(table, record, decoders.decode(record.call_id, record.args))
    elif record.call_id == _HOST_FUNCTION:
        table.functions.add(record.seq)
    elif record.call_id == _HOST_FUNCTION_DONE:
        table.host_function_returned(decoders.decode(record.call_id, record.args).call, record.seq)


def _session_open(table: ObjectTable, record: Record, args: Any) -> None:
    table.opened = table.opened or kept(record)


def _context_create(table: ObjectTable, record: Record, args: Any) -> None:
    if table.create("context", args.context, record):
        table.contexts += 1


def _context_destroy(table: ObjectTable, record: Record, args: Any) -> None:
    if item := table.live("context", args.context):
        table.end_context(item, record)


def _context_limit(table: ObjectTable, record: Record, args: Any) -> None:
    if item := table.live("context", args.context):
        item.settings["limit", args.limit] = kept(record)


def _context_flags(table: ObjectTable, record: Record, args: Any) -> None:
    if item := table.live("context", args.context):
        item.settings["flags"] = kept(record)


def _memory_map(table: ObjectTable, record: Record, args: Any) -> None:
    if ("alias", args.address) not in table.current:
        table.create("mapping", args.address, record)


def _memory_unmap(table: ObjectTable, record: Record, args: Any) -> None:
    item = table.live("mapping", args.address)
    if item is None or item.args.size != args.size:
        return
    if table.aliases.get(args.address):
        return
    table.aliases.pop(args.address, None)
    table.forget(item)
    table.end_memory_in(args.address, args.size)


def _memory_alias(table: ObjectTable, record: Record, args: Any) -> None:
    mapping = table.live("mapping", args.source)
    if mapping is None or ("mapping", args.address) in table.current or args.size > mapping.args.size:
        return
    if table.create("alias", args.address, record):
        table.aliases.setdefault(args.source, set()).add(args.address)


def _memory_unalias(table: ObjectTable, record: Record, args: Any) -> None:
    item = table.live("alias", args.address)
    if item is None or (made := item.args).size != args.size:
        return
    table.aliases[made.source].discard(args.address)
    table.forget(item)
    table.end_memory_in(args.address, args.size)


def _memory_move(table: ObjectTable, record: Record, args: Any) -> None:
    """Change the creating calls at once: a fresh device then maps the memory at its present address."""
    item = table.live("mapping", args.address)
    if item is None or table.current.keys() & {("mapping", args.to), ("alias", args.to)}:
        return
    if (made := item.args).size != args.size or table.memory_in(args.address, args.size):
        return
    item.replace_args(made._replace(address=args.to))
    table.current["mapping", args.to] = table.current.pop(("mapping", item.number))
    item.number = args.to
    for number in (moved := table.aliases.pop(args.address, set())):
        alias = table.objects[table.current["alias", number]]
        alias.replace_args(alias.args._replace(source=args.to))
    table.aliases[args.to] = moved


def _memory_allocate(table: ObjectTable, record: Record, args: Any) -> None:
    table.create_memory(args.address, record)


def _memory_free(table: ObjectTable, record: Record, args: Any) -> None:
    if ("memory", args.address) in table.current:
        table.end_memory(args.address)


def _memory_export(table: ObjectTable, record: Record, args: Any) -> None:
    memory = table.live("memory", args.address)
    if memory is not None and memory.args.size == args.size:
        table.create("export", args.address, record)


def _memory_import(table: ObjectTable, record: Record, args: Any) -> None:
    if not table.current.keys() & {("mapping", args.address), ("alias", args.address)}:
        table.create("import", args.address, record)


def _memory_unimport(table: ObjectTable, record: Record, args: Any) -> None:
    if (item := table.live("import", args.address)) is not None:
        size = item.args.size
        table.forget(item)
        table.end_memory_in(args.address, size)


def _module_load(table: ObjectTable, record: Record, args: Any, digest: bytes = b"") -> None:
    if item := table.create("module", args.module, record, args.context):
        table.hold_contents(item, record.payload, digest)
        table.pending.add(record.seq)


def _module_unload(table: ObjectTable, record: Record, args: Any) -> None:
    if item := table.live("module", args.module):
        table.end_module(item, record)


def _function_attribute(table: ObjectTable, record: Record, args: Any) -> None:
    if item := table.live("module", args.module):
        item.settings[args.function, args.attribute] = kept(record)


def _stream_create(table: ObjectTable, record: Record, args: Any) -> None:
    table.create("stream", args.stream, record, args.context)


def _event_create(table: ObjectTable, record: Record, args: Any) -> None:
    table.create("event", args.event, record, args.context)


def _event_destroy(table: ObjectTable, record: Record, args: Any) -> None:
    for kind in ("event_export", "event"):
        if item := table.live(kind, args.event):
            table.forget(item)


def _event_export(table: ObjectTable, record: Record, args: Any) -> None:
    if table.live("event", args.event) is not None:
        table.create("event_export", args.event, record, args.context)


def _event_import(table: ObjectTable, record: Record, args: Any) -> None:
    table.create("event_import", args.event, record, args.context)


def _graph_instantiate(table: ObjectTable, record: Record, args: Any) -> None:
    nodes = graphs.decode(record.payload)
    if table.live("context", args.context) is None:
        return  # the device refuses it
    if item := table.create("graph_exec", args.exec, record, args.context):
        item.created.payload = bytes(record.payload)
        item.nodes = nodes


def _graph_exec_update(table: ObjectTable, record: Record, args: Any) -> None:
    """Change the creating call at once: one call is kept, however often a graph is updated."""
    changes = graphs.decode_changes(record.payload)
    if item := table.live("graph_exec", args.exec):
        item.nodes = graphs.apply_changes(item.nodes, changes)
        item.created.payload = b""


def _array_create(table: ObjectTable, record: Record, args: Any) -> None:
    table.create("array", args.array, record, args.context)


def _communicator_create(table: ObjectTable, record: Record, args: Any) -> None:
    table.create("communicator", args.communicator, record, args.context)


def _texture_create(table: ObjectTable, record: Record, args: Any) -> None:
    table.create("texture", args.texture, record, args.context)


def _texture_place(table: ObjectTable, record: Record, args: Any) -> None:
    if item := table.live("texture", args.texture):
        item.settings["handle"] = kept(record)


def _host_allocate(table: ObjectTable, record: Record, args: Any) -> None:
    table.create("host_memory", args.address, record)


def _destroy_simple(table: ObjectTable, record: Record, args: Any) -> None:
    """End a stream, an event, pinned memory, …: any object that the first argument names."""
    if item := table.live(BY_ID[record.call_id].object_kind or "", args[0]):
        table.forget(item)


#: call id → its effect on the table; calls that leave no object are not in it.
HANDLERS: dict[int, Callable[[ObjectTable, Record, Any], None]] = {
    BY_NAME[name].id: handler for name, handler in {
        "session_open": _session_open,
        "context_create": _context_create,
        "context_destroy": _context_destroy,
        "context_limit": _context_limit,
        "context_flags": _context_flags,
        "memory_map": _memory_map,
        "memory_unmap": _memory_unmap,
        "memory_alias": _memory_alias,
        "memory_unalias": _memory_unalias,
        "memory_move": _memory_move,
        "memory_export": _memory_export,
        "memory_import": _memory_import,
        "memory_unimport": _memory_unimport,
        "memory_allocate": _memory_allocate,
        "memory_free": _memory_free,
        "memory_free_wait": _memory_free,
        "module_load": _module_load,
        "module_unload": _module_unload,
        "function_attribute": _function_attribute,
        "stream_create": _stream_create,
        "stream_destroy": _destroy_simple,
        "event_create": _event_create,
        "event_destroy": _event_destroy,
        "event_export": _event_export,
        "event_import": _event_import,
        "event_unimport": _destroy_simple,
        "graph_instantiate": _graph_instantiate,
        "graph_exec_update": _graph_exec_update,
        "graph_exec_destroy": _destroy_simple,
        "array_create": _array_create,
        "array_destroy": _destroy_simple,
        "texture_create": _texture_create,
        "texture_place": _texture_place,
        "texture_destroy": _destroy_simple,
        "communicator_create": _communicator_create,
        "communicator_destroy": _destroy_simple,
        "host_allocate": _host_allocate,
        "host_free": _destroy_simple,
    }.items()
}
#: A call that changes objects and is not handled would be lost by every checkpoint.
assert set(HANDLERS) == {call.id for call in BY_ID.values() if call.effect not in (Effect.NONE, Effect.WRITES)}
