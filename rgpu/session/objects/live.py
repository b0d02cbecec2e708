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
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Any

import blake3

from rgpu.session.answers import Divergence
from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_ID, BY_NAME, Effect
from rgpu.session.errors import Corrupt
from rgpu.session.journal.record import Record
from rgpu.session.objects import graphs
from rgpu.session.objects.load_answers import LOAD, LoadAnswer, differs, load_answer
from rgpu.session.objects.module_table import GlobalVariable

ALLOCATE = BY_NAME["memory_allocate"].id
_UNLOAD = BY_NAME["module_unload"].id
INSTANTIATE = BY_NAME["graph_instantiate"].id
_HOST_FUNCTION, _HOST_FUNCTION_DONE = BY_NAME["host_function"].id, BY_NAME["host_function_done"].id
_AWAITED = frozenset({"array", "texture", "communicator"})  #: kinds whose creation may be refused
_PENDING = 2**63  #: the place of an unload that did not take place yet: behind everything
_IDENTITY = Struct("<QQ")
_KINDS = frozenset(call.object_kind for call in BY_ID.values() if call.object_kind)


@dataclass(frozen=True, slots=True)
class Mapping:
    """A range of device addresses backed by memory."""

    address: int
    size: int
    device: int


@dataclass(slots=True)
class _Object:
    """One incarnation of an object; its identity is the position of the call that made it."""

    kind: str
    number: int
    created: Record
    parent: int | None = None  #: position of its context's creating call
    settings: dict[Any, Record] = field(default_factory=dict)
    ended: Record | None = None
    ended_at: int = 0  #: behind the call at this position: where ``ended`` took place; _PENDING: not yet
    digest: bytes = b""  #: of a module's contents
    answer: LoadAnswer | None = None
    nodes: list[graphs.Node] = field(default_factory=list)  #: of an executable graph
    children: set[int] = field(default_factory=set)


class LiveObjects:
    """See the module docstring. Not locked; :meth:`answered` may be called from other threads."""

    def __init__(self) -> None:
        self.position = 0  #: of the last call applied
        self._open: Record | None = None
        self._objects: dict[int, _Object] = {}  #: by position of the creating call
        self._current: dict[tuple[str, int], int] = {}  #: (kind, number) → position; live ones only
        self._contexts = 0  #: live ones
        self._starts: list[int] = []  #: addresses of live memory, sorted
        self._aliases: dict[int, set[int]] = {}  #: address of a mapping → addresses of its aliases
        self._payloads: dict[bytes, bytes] = {}
        self._payload_uses: Counter[bytes] = Counter()
        self._pending: set[int] = set()  #: loads without an answer
        self._digest = b""  #: of the contents of the load being applied, where it is known
        self._furthest = 0  #: position of the last call in the journal's order; rows of a checkpoint may be behind it
        self._functions: set[int] = set()  #: host functions that did not return yet
        self._unloads: list[_Object] = []  #: that take place when none is open

    # -- events -----------------------------------------------------------------
    def apply(self, record: Record) -> None:
        """A call is about to be applied. Raises :class:`Corrupt` if a call that matters here does not decode."""
        self.position = record.seq
        self._furthest = max(self._furthest, record.seq)
        handler = _HANDLERS.get(record.call_id)
        if handler is not None:
            handler(self, record, decoders.decode(record.call_id, record.args))
        elif record.call_id == _HOST_FUNCTION:
            self._functions.add(record.seq)
        elif record.call_id == _HOST_FUNCTION_DONE:
            self._functions.discard(decoders.decode(record.call_id, record.args).call)
            if not self._functions:
                for item in self._unloads:
                    item.ended_at = record.seq
                self._unloads.clear()

    def answered(self, seq: int, result: int, reply: Any) -> None:
        """A call was answered; only those that make objects matter. A failed one leaves nothing."""
        if seq not in self._pending:
            item = self._objects.get(seq) if result else None
            if item is not None and item.kind in _AWAITED:
                self._forget(item)
            return
        self._pending.discard(seq)
        if result:
            self._forget(self._objects[seq])
            return
        load = self._objects[seq]
        load.answer = load_answer(reply)
        if load.ended is not None:
            load.answer.globals = None

    # -- questions --------------------------------------------------------------
    def structural_calls(self) -> list[Record]:
        """The calls that make a fresh device hold these objects, in the order to apply them.

        That is the order of the journal, unloads where they took place, but for
        allocations, which come last:
        a device may free memory when it loses what happens to be its last
        context, and contexts that left no trace are not replayed. Behind them
        come arrays; textures by their handles, as drivers give them; executable
        graphs: an update may name what was made after them.
        """
        found: dict[int, Record] = {self._open.seq: self._open} if self._open else {}
        #: position of a call that comes elsewhere → (where, its turn there)
        ends: dict[int, tuple[int, int]] = {}
        for item in list(self._objects.values()):
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

    def pending(self, seq: int) -> bool:
        """Whether the call at that position is an unload that did not take place yet."""
        return any(item.ended is not None and item.ended.seq == seq for item in self._unloads)

    @property
    def count(self) -> int:
        """How many objects live."""
        return len(self._current)

    def inventory(self) -> list[tuple[str, int, bytes]]:
        """(kind, number, digest of the calls that make it what it is) of every live object, sorted."""
        found = []
        for (kind, number), seq in sorted(self._current.items()):
            item = self._objects[seq]
            hasher = blake3.blake3(_IDENTITY.pack(seq, item.created.call_id))
            for record in (item.created, *sorted(item.settings.values(), key=lambda record: record.seq)):
                hasher.update(_IDENTITY.pack(len(record.args), record.call_id))
                hasher.update(record.args)
            hasher.update(graphs.encode(item.nodes) if kind == "graph_exec" else item.digest)
            found.append((kind, number, hasher.digest(length=16)))
        return found

    def unanswered(self, seq: int) -> bool:
        """Whether the load of that position has no answer yet."""
        return seq in self._pending

    def handles(self, kind: str) -> list[int]:
        """Numbers (or addresses) of the live objects of a kind, sorted. Raises KeyError for no such kind."""
        if kind not in _KINDS:
            raise KeyError(kind)
        return sorted(number for name, number in self._current if name == kind)

    def mappings(self) -> list[Mapping]:
        """The mapped ranges, by address."""
        found = []
        for (kind, _), seq in self._current.items():
            if kind == "mapping":
                args = decoders.decode(BY_NAME["memory_map"].id, self._objects[seq].created.args)
                found.append(Mapping(args.address, args.size, args.device))
        return sorted(found, key=lambda mapping: mapping.address)

    def module_history(self) -> list[tuple[int, int, bytes, bool]]:
        """(position, module, BLAKE3 of the contents, still loaded) of every load, in order."""
        return [(seq, item.number, item.digest, item.ended is None)
                for seq, item in sorted(self._objects.items()) if item.kind == "module"]

    def variables(self) -> dict[int, tuple[GlobalVariable, ...]]:
        """Where the variables of each loaded module stand, by the position of its load."""
        return {seq: item.answer.globals for seq, item in self._objects.items()
                if item.kind == "module" and item.answer is not None and item.answer.globals}

    @property
    def payload_bytes(self) -> int:
        """Bytes of module contents held."""
        return sum(map(len, self._payloads.values()))

    def digest(self, seq: int) -> bytes:
        """Return the BLAKE3 of the module binary that the load at position ``seq`` brought; empty for any other."""
        item = self._objects.get(seq)
        return b"" if item is None else item.digest

    def load_differs(self, seq: int, result: int, reply: Any) -> Divergence | None:
        """Compare the answer of a replayed load with the one recorded (SEMANTICS 12); None: it is the same."""
        item = self._objects[seq]
        return None if item.answer is None else differs(seq, item.number, item.answer, result, reply)

    # -- creating and ending ------------------------------------------------------
    def _create(self, kind: str, number: int, record: Record, context: int | None = None) -> _Object | None:
        """A new object, or None if the number is in use: the device refuses it then."""
        if (kind, number) in self._current:
            return None
        parent = None if context is None else self._current.get(("context", context))
        item = _Object(kind, number, _kept(record), parent)
        self._objects[record.seq] = item
        self._current[kind, number] = record.seq
        if item.parent is not None:
            self._objects[item.parent].children.add(record.seq)
        return item

    def _live(self, kind: str, number: int) -> _Object | None:
        seq = self._current.get((kind, number))
        return None if seq is None else self._objects[seq]

    def _forget(self, item: _Object) -> None:
        """Drop an object and, when it was the last reason to keep a dead context, that too."""
        seq = item.created.seq
        del self._objects[seq]
        if self._current.get((item.kind, item.number)) == seq:
            del self._current[item.kind, item.number]
        self._pending.discard(seq)
        if item in self._unloads:
            self._unloads.remove(item)
        if item.digest:
            self._payload_uses[item.digest] -= 1
            if not self._payload_uses[item.digest]:
                del self._payload_uses[item.digest], self._payloads[item.digest]
        if item.parent is not None and (parent := self._objects.get(item.parent)) is not None:
            parent.children.discard(seq)
            if parent.ended is not None and not parent.children:
                self._forget(parent)

    def _end_module(self, item: _Object, record: Record) -> None:
        item.ended, item.ended_at = _kept(record), self._furthest
        if self._functions and record.call_id == _UNLOAD:
            item.ended_at = _PENDING
            self._unloads.append(item)
        item.settings.clear()
        del self._current["module", item.number]
        if item.answer is not None:
            item.answer.globals = None

    # -- one method for each call that matters ------------------------------------
    def _session_open(self, record: Record, args: Any) -> None:
        self._open = self._open or _kept(record)

    def _context_create(self, record: Record, args: Any) -> None:
        if self._create("context", args.context, record):
            self._contexts += 1

    def _context_destroy(self, record: Record, args: Any) -> None:
        item = self._live("context", args.context)
        if item is None:
            return
        del self._current["context", args.context]
        self._contexts -= 1
        item.ended, item.ended_at = _kept(record), self._furthest
        for seq in sorted(item.children):
            child = self._objects[seq]
            if child in self._unloads and not _is_library(child.created):  # it goes with its context, before it
                child.ended_at = self._furthest
                self._unloads.remove(child)
            if child.kind != "module":
                self._forget(child)
            elif child.ended is None and not _is_library(child.created):  # a library outlives its context
                self._end_module(child, record)
        if not item.children and self._objects.get(item.created.seq) is item:
            self._forget(item)
        if not self._contexts:
            for number in self.handles("memory"):
                self._end_memory(number)

    def _context_limit(self, record: Record, args: Any) -> None:
        if item := self._live("context", args.context):
            item.settings["limit", args.limit] = _kept(record)

    def _context_flags(self, record: Record, args: Any) -> None:
        if item := self._live("context", args.context):
            item.settings["flags"] = _kept(record)

    def _memory_map(self, record: Record, args: Any) -> None:
        if ("alias", args.address) not in self._current:
            self._create("mapping", args.address, record)

    def _memory_unmap(self, record: Record, args: Any) -> None:
        item = self._live("mapping", args.address)
        if item is None or _args_of(item).size != args.size:
            return
        if self._aliases.get(args.address):
            return
        self._aliases.pop(args.address, None)
        self._forget(item)
        self._end_memory_in(args.address, args.size)

    def _end_memory_in(self, address: int, size: int) -> None:
        """End the allocations that begin in a range."""
        for number in self._starts_in(address, size):
            self._end_memory(number)

    def _starts_in(self, address: int, size: int) -> list[int]:
        return self._starts[bisect_left(self._starts, address):bisect_left(self._starts, address + size)]

    def _memory_alias(self, record: Record, args: Any) -> None:
        mapping = self._live("mapping", args.source)
        if mapping is None or ("mapping", args.address) in self._current or args.size > _args_of(mapping).size:
            return
        if self._create("alias", args.address, record):
            self._aliases.setdefault(args.source, set()).add(args.address)

    def _memory_unalias(self, record: Record, args: Any) -> None:
        item = self._live("alias", args.address)
        if item is None or (made := _args_of(item)).size != args.size:
            return
        self._aliases[made.source].discard(args.address)
        self._forget(item)
        self._end_memory_in(args.address, args.size)

    def _memory_move(self, record: Record, args: Any) -> None:
        """Into the creating calls at once: a fresh device maps it where it stands now."""
        item = self._live("mapping", args.address)
        if item is None or self._current.keys() & {("mapping", args.to), ("alias", args.to)}:
            return
        if (made := _args_of(item)).size != args.size or self._starts_in(args.address, args.size):
            return
        _replace_args(item, made._replace(address=args.to))
        self._current["mapping", args.to] = self._current.pop(("mapping", item.number))
        item.number = args.to
        for number in (moved := self._aliases.pop(args.address, set())):
            alias = self._objects[self._current["alias", number]]
            _replace_args(alias, _args_of(alias)._replace(source=args.to))
        self._aliases[args.to] = moved

    def _memory_allocate(self, record: Record, args: Any) -> None:
        if self._create("memory", args.address, record):
            insort(self._starts, args.address)

    def _memory_free(self, record: Record, args: Any) -> None:
        if ("memory", args.address) in self._current:
            self._end_memory(args.address)

    def _end_memory(self, address: int) -> None:
        self._forget(self._objects[self._current["memory", address]])
        del self._starts[bisect_left(self._starts, address)]

    def _module_load(self, record: Record, args: Any) -> None:
        item = self._create("module", args.module, record, args.context)
        if item is None:
            return
        item.digest = self._digest or blake3.blake3(record.payload).digest()
        if item.digest not in self._payloads:
            self._payloads[item.digest] = bytes(record.payload)
        self._payload_uses[item.digest] += 1
        item.created.payload = self._payloads[item.digest]
        self._pending.add(record.seq)

    def _module_unload(self, record: Record, args: Any) -> None:
        if item := self._live("module", args.module):
            self._end_module(item, record)

    def _function_attribute(self, record: Record, args: Any) -> None:
        if item := self._live("module", args.module):
            item.settings[args.function, args.attribute] = _kept(record)

    def _stream_create(self, record: Record, args: Any) -> None:
        self._create("stream", args.stream, record, args.context)

    def _event_create(self, record: Record, args: Any) -> None:
        self._create("event", args.event, record, args.context)

    def _graph_instantiate(self, record: Record, args: Any) -> None:
        nodes = graphs.decode(record.payload)
        if self._live("context", args.context) is None:
            return  # the device refuses it
        if item := self._create("graph_exec", args.exec, record, args.context):
            item.created.payload = bytes(record.payload)
            item.nodes = nodes

    def _graph_exec_update(self, record: Record, args: Any) -> None:
        """Into the creating call at once: what stays is one call, however often a graph is updated."""
        changes = graphs.decode_changes(record.payload)
        if item := self._live("graph_exec", args.exec):
            item.nodes = graphs.apply_changes(item.nodes, changes)
            item.created.payload = b""

    def _array_create(self, record: Record, args: Any) -> None:
        self._create("array", args.array, record, args.context)

    def _communicator_create(self, record: Record, args: Any) -> None:
        self._create("communicator", args.communicator, record, args.context)

    def _texture_create(self, record: Record, args: Any) -> None:
        self._create("texture", args.texture, record, args.context)

    def _texture_place(self, record: Record, args: Any) -> None:
        if item := self._live("texture", args.texture):
            item.settings["handle"] = _kept(record)

    def _host_allocate(self, record: Record, args: Any) -> None:
        self._create("host_memory", args.address, record)

    def _destroy_simple(self, record: Record, args: Any) -> None:
        """Streams, events and pinned memory: the first argument names them."""
        if item := self._live(BY_ID[record.call_id].object_kind or "", args[0]):
            self._forget(item)

    # -- checkpoints and moves ---------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        """Return the objects as checkpoints and moves carry them, for msgpack; contents of modules once each."""
        digests = list(self._payloads)
        index = {digest: number for number, digest in enumerate(digests)}
        calls, answers = [], []
        for record in self.structural_calls():
            item = self._objects.get(record.seq)
            load = item if record.call_id == LOAD else None
            if record.call_id == INSTANTIATE:
                calls.append([record.seq, record.call_id, record.thread, record.flags, record.args, record.payload])
                continue
            calls.append([record.seq, record.call_id, record.thread, record.flags, record.args,
                          index[load.digest] if load else -1])
            if load and load.answer:
                variables = load.answer.globals
                answers.append([record.seq, load.answer.functions, load.answer.globals_digest,
                                None if variables is None else [[v.name, v.address, v.size] for v in variables]])
        return {"version": 1, "position": self.position, "payloads": [self._payloads[d] for d in digests],
                "calls": calls, "answers": answers}

    @staticmethod
    def from_dict(data: Any, digests: Sequence[bytes] = ()) -> LiveObjects:
        """The inverse of :meth:`to_dict`. Raises :class:`Corrupt` for anything else.

        ``digests``: of the payloads, those that the caller knows; empty ones it does not.
        """
        found = LiveObjects()
        try:
            if data["version"] != 1:
                raise ValueError(f"version {data['version']}")
            payloads = [_typed(payload, bytes) for payload in _typed(data["payloads"], list)]
            for row in _typed(data["calls"], list):
                found._apply_row(row, payloads, digests)
            for seq, functions, digest, variables in _typed(data["answers"], list):
                found._answer_row(_typed(seq, int), LoadAnswer(
                    _typed(functions, int), _typed(digest, bytes), None if variables is None else tuple(
                        GlobalVariable(_typed(n, str), _typed(a, int), _typed(s, int)) for n, a, s in variables)))
            found.position = _typed(data["position"], int)
            found.check()
        except (KeyError, TypeError, ValueError, IndexError, AssertionError) as error:
            raise Corrupt(f"live objects: {error!r}", offset=0, reason="live objects") from None
        return found

    def _apply_row(self, row: Any, payloads: list[bytes], digests: Sequence[bytes]) -> None:
        seq, call_id, thread, flags, args, payload = row
        for value in (seq, call_id, thread, flags):
            _typed(value, int)
        if call_id == INSTANTIATE:  # its nodes are its own, and stand in the row
            if seq <= 0 or seq in self._objects:
                raise ValueError(f"call {call_id} at position {seq}")
            self.apply(Record(seq, call_id, _typed(args, bytes), _typed(payload, bytes), thread, flags))
            return
        _typed(payload, int)
        if call_id not in _HANDLERS or seq <= 0 or seq in self._objects or (payload >= 0) != (call_id == LOAD):
            raise ValueError(f"call {call_id} at position {seq}")
        self._digest = digests[payload] if 0 <= payload < len(digests) else b""
        self.apply(Record(seq, call_id, _typed(args, bytes), payloads[payload] if payload >= 0 else b"", thread, flags))
        self._digest = b""

    def _answer_row(self, seq: int, answer: LoadAnswer) -> None:
        item = self._objects[seq]
        if item.kind != "module" or seq not in self._pending or (answer.globals is None) != (item.ended is not None):
            raise ValueError(f"an answer to call {seq}")
        self._pending.discard(seq)
        item.answer = answer

    def check(self) -> None:
        """Invariants; raises AssertionError."""
        assert self._contexts == len(self.handles("context"))
        assert self._starts == self.handles("memory")
        assert set(self._payload_uses) == set(self._payloads)
        assert self._payload_uses.total() == sum(item.kind == "module" for item in self._objects.values())
        for (kind, number), seq in self._current.items():
            item = self._objects[seq]
            assert (item.kind, item.number, item.ended) == (kind, number, None)
        for seq, item in self._objects.items():
            assert seq == item.created.seq <= self.position
            assert item.parent is None or seq in self._objects[item.parent].children, "a child without its context"
            assert all(self._objects[child].parent == seq for child in item.children)
            if item.ended is not None:
                assert item.kind == "module" or (item.kind == "context" and item.children), "a dead object nobody needs"
            assert (item.answer is None) == (item.kind != "module" or seq in self._pending)


#: call id → what it does here; calls that leave nothing behind are not in it.
_HANDLERS: dict[int, Callable[[LiveObjects, Record, Any], None]] = {
    BY_NAME[name].id: handler for name, handler in {
        "session_open": LiveObjects._session_open,
        "context_create": LiveObjects._context_create,
        "context_destroy": LiveObjects._context_destroy,
        "context_limit": LiveObjects._context_limit,
        "context_flags": LiveObjects._context_flags,
        "memory_map": LiveObjects._memory_map,
        "memory_unmap": LiveObjects._memory_unmap,
        "memory_alias": LiveObjects._memory_alias,
        "memory_unalias": LiveObjects._memory_unalias,
        "memory_move": LiveObjects._memory_move,
        "memory_allocate": LiveObjects._memory_allocate,
        "memory_free": LiveObjects._memory_free,
        "memory_free_wait": LiveObjects._memory_free,
        "module_load": LiveObjects._module_load,
        "module_unload": LiveObjects._module_unload,
        "function_attribute": LiveObjects._function_attribute,
        "stream_create": LiveObjects._stream_create,
        "stream_destroy": LiveObjects._destroy_simple,
        "event_create": LiveObjects._event_create,
        "event_destroy": LiveObjects._destroy_simple,
        "graph_instantiate": LiveObjects._graph_instantiate,
        "graph_exec_update": LiveObjects._graph_exec_update,
        "graph_exec_destroy": LiveObjects._destroy_simple,
        "array_create": LiveObjects._array_create,
        "array_destroy": LiveObjects._destroy_simple,
        "texture_create": LiveObjects._texture_create,
        "texture_place": LiveObjects._texture_place,
        "texture_destroy": LiveObjects._destroy_simple,
        "communicator_create": LiveObjects._communicator_create,
        "communicator_destroy": LiveObjects._destroy_simple,
        "host_allocate": LiveObjects._host_allocate,
        "host_free": LiveObjects._destroy_simple,
    }.items()
}
#: A call that changes objects and is not handled would be lost by every checkpoint.
assert set(_HANDLERS) == {call.id for call in BY_ID.values() if call.effect not in (Effect.NONE, Effect.WRITES)}


#: call id → when it comes in structural_calls(); others come first
_LATE = {ALLOCATE: 1, BY_NAME["array_create"].id: 2, BY_NAME["texture_create"].id: 3, BY_NAME["texture_place"].id: 3,
         INSTANTIATE: 4}


def _kept(record: Record) -> Record:
    """A record of its own, without the payload: the one given may be a view into a buffer that goes away."""
    return Record(record.seq, record.call_id, bytes(record.args), b"", record.thread, record.flags)


def _args_of(item: _Object) -> Any:
    """Return the arguments of the call that made it."""
    return decoders.decode(item.created.call_id, item.created.args)


def _replace_args(item: _Object, args: Any) -> None:
    """Let the call that made it have other arguments; the record may be held elsewhere, so it gets one of its own."""
    old = item.created
    item.created = Record(old.seq, old.call_id, decoders.encode_args(old.call_id, **args._asdict()), old.payload,
                          old.thread, old.flags)


def _is_library(load: Record) -> bool:
    return bool(decoders.decode(LOAD, load.args).library)


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.80} is no {kind.__name__}")
    return value
