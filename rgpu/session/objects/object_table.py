"""The objects of a session, live or still needed, and what is kept of each: the state behind :class:`LiveObjects`.

:class:`ObjectTable` holds objects, their contexts and module binaries. The effects of calls on it are defined in
:mod:`rgpu.session.objects.object_calls`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import blake3

from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_ID, BY_NAME
from rgpu.session.journal.record import Record
from rgpu.session.objects import graphs
from rgpu.session.objects.load_answers import LOAD, LoadAnswer

_UNLOAD = BY_NAME["module_unload"].id
_PENDING = 2**63  #: the place of an unload that has not taken effect yet: behind everything
KINDS = frozenset(call.object_kind for call in BY_ID.values() if call.object_kind)


@dataclass(slots=True)
class LiveObject:
    """One incarnation of an object; its identity is the position of the call that made it."""

    kind: str
    number: int
    created: Record
    parent: int | None = None  #: position of its context's creating call
    settings: dict[Any, Record] = field(default_factory=dict)
    ended: Record | None = None
    ended_at: int = 0  #: ``ended`` took effect behind the call at this position; _PENDING: not yet
    digest: bytes = b""  #: BLAKE3 of a module binary
    answer: LoadAnswer | None = None
    nodes: list[graphs.Node] = field(default_factory=list)  #: nodes of an executable graph
    children: set[int] = field(default_factory=set)

    @property
    def args(self) -> Any:
        """Decoded arguments of the call that made the object."""
        return decoders.decode(self.created.call_id, self.created.args)

    def replace_args(self, args: Any) -> None:
        """Replace the arguments of the call that made the object, in a new record: the old one may be in use."""
        old = self.created
        self.created = Record(old.seq, old.call_id, decoders.encode_args(old.call_id, **args._asdict()), old.payload,
                              old.thread, old.flags)

    @property
    def is_library(self) -> bool:
        """Whether the object is a module that was loaded as a library, which outlives its context."""
        return bool(decoders.decode(LOAD, self.created.args).library)


class ObjectTable:
    """The objects of a session, with the calls and binaries that they consist of. Not locked."""

    def __init__(self) -> None:
        self.position = 0  #: position of the last call applied
        self.furthest = 0  #: position of the last call in the journal's order; rows of a checkpoint may be behind it
        self.opened: Record | None = None  #: the call that opened the session
        self.objects: dict[int, LiveObject] = {}  #: by position of the creating call
        self.current: dict[tuple[str, int], int] = {}  #: (kind, number) → position; live ones only
        self.contexts = 0  #: number of live contexts
        self.aliases: dict[int, set[int]] = {}  #: address of a mapping → addresses of its aliases
        self.contents: dict[bytes, bytes] = {}  #: module binaries, by their BLAKE3
        self.pending: set[int] = set()  #: loads without an answer
        self.functions: set[int] = set()  #: host functions that have not returned yet
        self.unloads: list[LiveObject] = []  #: unloads that take effect when no host function is open
        self._starts: list[int] = []  #: addresses of live memory, sorted
        self._content_uses: Counter[bytes] = Counter()

    # -- questions ----------------------------------------------------------------
    def live(self, kind: str, number: int) -> LiveObject | None:
        """Return the live object of that kind and number; None where there is none."""
        seq = self.current.get((kind, number))
        return None if seq is None else self.objects[seq]

    def handles(self, kind: str) -> list[int]:
        """Return the numbers (or addresses) of the live objects of a kind, sorted. Raises KeyError for no such kind."""
        if kind not in KINDS:
            raise KeyError(kind)
        return sorted(number for name, number in self.current if name == kind)

    def memory_in(self, address: int, size: int) -> list[int]:
        """Return the addresses of the allocations that begin in a range, in order."""
        return self._starts[bisect_left(self._starts, address):bisect_left(self._starts, address + size)]

    # -- creating and ending ------------------------------------------------------
    def create(self, kind: str, number: int, record: Record, context: int | None = None) -> LiveObject | None:
        """Add an object and return it; None if the number is in use: then the device refuses the call, too."""
        if (kind, number) in self.current:
            return None
        parent = None if context is None else self.current.get(("context", context))
        item = LiveObject(kind, number, kept(record), parent)
        self.objects[record.seq] = item
        self.current[kind, number] = record.seq
        if item.parent is not None:
            self.objects[item.parent].children.add(record.seq)
        return item

    def forget(self, item: LiveObject) -> None:
        """Drop an object and, if it was the last one for which a destroyed context is kept, that context."""
        seq = item.created.seq
        del self.objects[seq]
        if self.current.get((item.kind, item.number)) == seq:
            del self.current[item.kind, item.number]
        self.pending.discard(seq)
        if item in self.unloads:
            self.unloads.remove(item)
        if item.digest:
            self._content_uses[item.digest] -= 1
            if not self._content_uses[item.digest]:
                del self._content_uses[item.digest], self.contents[item.digest]
        if item.parent is not None and (parent := self.objects.get(item.parent)) is not None:
            parent.children.discard(seq)
            if parent.ended is not None and not parent.children:
                self.forget(parent)

    def end_context(self, item: LiveObject, record: Record) -> None:
        """End a context and all its objects except the modules, whose history decides addresses."""
        del self.current["context", item.number]
        self.contexts -= 1
        item.ended, item.ended_at = kept(record), self.furthest
        for seq in sorted(item.children):
            child = self.objects[seq]
            if child in self.unloads and not child.is_library:  # it is unloaded with its context, before that
                child.ended_at = self.furthest
                self.unloads.remove(child)
            if child.kind != "module":
                self.forget(child)
            elif child.ended is None and not child.is_library:  # a library outlives its context
                self.end_module(child, record)
        if not item.children and self.objects.get(item.created.seq) is item:
            self.forget(item)
        if not self.contexts:
            for number in self.handles("memory"):
                self.end_memory(number)

    # -- memory ---------------------------------------------------------------------
    def create_memory(self, address: int, record: Record) -> None:
        """Add an allocation, unless there is one at that address."""
        if self.create("memory", address, record):
            insort(self._starts, address)

    def end_memory(self, address: int) -> None:
        """Drop a live allocation and its export to other sessions."""
        if exported := self.live("export", address):
            self.forget(exported)
        self.forget(self.objects[self.current["memory", address]])
        del self._starts[bisect_left(self._starts, address)]

    def end_memory_in(self, address: int, size: int) -> None:
        """Drop the allocations that begin in a range."""
        for number in self.memory_in(address, size):
            self.end_memory(number)

    # -- modules --------------------------------------------------------------------
    def hold_contents(self, item: LiveObject, payload: Any, digest: bytes = b"") -> None:
        """Keep a module binary, once for all loads of it; ``digest``: its BLAKE3, where it is known."""
        item.digest = digest or blake3.blake3(payload).digest()
        if item.digest not in self.contents:
            self.contents[item.digest] = bytes(payload)
        self._content_uses[item.digest] += 1
        item.created.payload = self.contents[item.digest]

    def end_module(self, item: LiveObject, record: Record) -> None:
        """Note the end of a live module: an unload beside an open host function takes effect later."""
        item.ended, item.ended_at = kept(record), self.furthest
        if self.functions and record.call_id == _UNLOAD:
            item.ended_at = _PENDING
            self.unloads.append(item)
        item.settings.clear()
        del self.current["module", item.number]
        if item.answer is not None:
            item.answer.globals = None

    def host_function_returned(self, call: int, position: int) -> None:
        """Note that the host function of a call returned: after the last open one, waiting unloads take effect."""
        self.functions.discard(call)
        if not self.functions:
            for item in self.unloads:
                item.ended_at = position
            self.unloads.clear()

    # -- invariants -----------------------------------------------------------------
    def check(self) -> None:
        """Check the invariants that hold between calls. Raises :class:`AssertionError`."""
        assert self.contexts == len(self.handles("context"))
        assert self._starts == self.handles("memory")
        assert set(self._content_uses) == set(self.contents)
        assert self._content_uses.total() == sum(item.kind == "module" for item in self.objects.values())
        for (kind, number), seq in self.current.items():
            item = self.objects[seq]
            assert (item.kind, item.number, item.ended) == (kind, number, None)
        for seq, item in self.objects.items():
            assert seq == item.created.seq <= self.position
            assert item.parent is None or seq in self.objects[item.parent].children, "a child without its context"
            assert item.parent is None or item.parent < seq, "a child older than its context"
            assert all(self.objects[child].parent == seq for child in item.children)
            assert all(seq < record.seq <= self.position for record in item.settings.values()), \
                "a setting out of its time"
            if item.ended is not None:
                assert seq < item.ended.seq <= self.position, "an end out of its time"
                assert item.kind == "module" or (item.kind == "context" and item.children), "a dead object without use"
            assert (item.answer is None) == (item.kind != "module" or seq in self.pending)


def kept(record: Record) -> Record:
    """Return a copy of a record without the payload: the given one may be a view into a buffer that is freed."""
    return Record(record.seq, record.call_id, bytes(record.args), b"", record.thread, record.flags)
