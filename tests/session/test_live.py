"""Live objects: replaying what is kept gives the same session as replaying everything."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_ID, BY_NAME, Effect
from rgpu.session.errors import Corrupt, RecoveryFailed
from rgpu.session.journal.record import Record
from rgpu.session.objects import ahead, graphs, module_table
from rgpu.session.objects.live import _HANDLERS, LiveObjects, Mapping
from rgpu.session.objects.module_table import FunctionInfo, GlobalVariable, ModuleTable

MIB2 = 2 << 20


def call(seq: int, name: str, payload: bytes = b"", **values: Any) -> Record:
    return Record(seq, BY_NAME[name].id, decoders.encode_args(name, **values), payload)


class NaiveDevice:
    """What a device holds after calls: written for plainness, sharing nothing with the code under test.

    Where a module's variable lands depends on every load and unload before it; an unload beside an open host function
    takes place when none is open.
    """

    def __init__(self) -> None:
        self.contexts: dict[int, dict[Any, Any]] = {}
        self.owned: dict[tuple[str, int], tuple[Any, Any]] = {}  # stream/event → (context or None, arguments)
        self.modules: dict[int, dict[str, Any]] = {}
        self.memory: dict[int, int] = {}
        self.maps: dict[int, tuple[int, int]] = {}
        self.host: dict[int, Any] = {}
        self.history = hashlib.sha256()
        self.functions: set[int] = set()
        self.unloading: dict[int, tuple[int | None, bytes]] = {}  #: module → (context unless a library, contents)
        self.environment: Any = None

    def apply(self, record: Record) -> tuple[int, bytes] | None:
        name = BY_ID[record.call_id].name
        return getattr(self, name)(decoders.decode(record.call_id, record.args), record)

    def state(self) -> dict[str, Any]:
        contexts = {number: {key: value for key, value in held.items()} for number, held in self.contexts.items()}
        return {"contexts": contexts, "owned": self.owned, "modules": self.modules, "memory": self.memory,
                "maps": self.maps, "host": self.host, "history": self.history.hexdigest(), "env": self.environment}

    def session_open(self, a: Any, r: Record) -> None:
        self.environment = self.environment or a

    def context_create(self, a: Any, r: Record) -> None:
        self.contexts.setdefault(a.context, {"made": a})

    def context_destroy(self, a: Any, r: Record) -> None:
        if self.contexts.pop(a.context, None) is None:
            return
        for number, (context, content) in list(self.unloading.items()):
            if context == a.context:
                del self.unloading[number]
                self.history.update(b"unload" + content)
        self.owned = {key: held for key, held in self.owned.items() if held[0] != a.context}
        for number in [n for n, m in self.modules.items() if m["context"] == a.context]:
            if self.modules[number]["library"]:
                self.modules[number]["context"] = None
            else:
                self._unload(number)
        if not self.contexts:
            self.memory.clear()

    def context_limit(self, a: Any, r: Record) -> None:
        if a.context in self.contexts:
            self.contexts[a.context]["limit", a.limit] = a.value

    def context_flags(self, a: Any, r: Record) -> None:
        if a.context in self.contexts:
            self.contexts[a.context]["flags"] = a.flags

    def memory_map(self, a: Any, r: Record) -> None:
        self.maps.setdefault(a.address, (a.size, a.device))

    def memory_unmap(self, a: Any, r: Record) -> None:
        if self.maps.get(a.address, (None,))[0] == a.size:
            del self.maps[a.address]
            self.memory = {at: n for at, n in self.memory.items() if not a.address <= at < a.address + a.size}

    def memory_allocate(self, a: Any, r: Record) -> None:
        self.memory.setdefault(a.address, a.size)

    def memory_free(self, a: Any, r: Record) -> None:
        self.memory.pop(a.address, None)

    memory_free_wait = memory_free

    def host_allocate(self, a: Any, r: Record) -> None:
        self.host.setdefault(a.address, a)

    def host_free(self, a: Any, r: Record) -> None:
        self.host.pop(a.address, None)

    def _context(self, number: int) -> int | None:
        return number if number in self.contexts else None

    def stream_create(self, a: Any, r: Record) -> None:
        self.owned.setdefault(("stream", a.stream), (self._context(a.context), a))

    def stream_destroy(self, a: Any, r: Record) -> None:
        self.owned.pop(("stream", a.stream), None)

    def event_create(self, a: Any, r: Record) -> None:
        self.owned.setdefault(("event", a.event), (self._context(a.context), a))

    def event_destroy(self, a: Any, r: Record) -> None:
        self.owned.pop(("event", a.event), None)

    def module_load(self, a: Any, r: Record) -> tuple[int, bytes]:
        if a.module in self.modules or bytes(r.payload) == b"bad":
            return 200, decoders.encode_reply("module_load", table=b"", log=b"no")
        self.history.update(b"load" + bytes(r.payload))
        place = int.from_bytes(self.history.digest()[:6], "little")
        table = ModuleTable((FunctionInfo("f", (), (0,) * 16),), (GlobalVariable("g", place, 8),))
        self.modules[a.module] = {"context": self._context(a.context), "library": a.library, "place": place,
                                  "content": bytes(r.payload)}
        return 0, decoders.encode_reply("module_load", table=module_table.encode(table), log=b"")

    def _unload(self, number: int) -> None:
        self.history.update(b"unload" + self.modules.pop(number)["content"])

    def module_unload(self, a: Any, r: Record) -> None:
        if a.module in self.modules and self.functions:
            gone = self.modules.pop(a.module)
            self.unloading[a.module] = None if gone["library"] else gone["context"], gone["content"]
        elif a.module in self.modules:
            self._unload(a.module)

    def host_function(self, a: Any, r: Record) -> None:
        self.functions.add(r.seq)

    def host_function_done(self, a: Any, r: Record) -> None:
        self.functions.discard(a.call)
        while self.unloading and not self.functions:
            self.history.update(b"unload" + self.unloading.pop(next(iter(self.unloading)))[1])

    def function_attribute(self, a: Any, r: Record) -> None:
        if a.module in self.modules:
            self.modules[a.module][a.function, a.attribute] = a.value

    def graph_instantiate(self, a: Any, r: Record) -> None:
        if a.context in self.contexts:
            self.owned.setdefault(("graph", a.exec), (a.context, graphs.decode(r.payload)))

    def graph_exec_update(self, a: Any, r: Record) -> None:
        if found := self.owned.get(("graph", a.exec)):
            context, nodes = found
            self.owned["graph", a.exec] = context, graphs.apply_changes(nodes, graphs.decode_changes(r.payload))

    def graph_exec_destroy(self, a: Any, r: Record) -> None:
        self.owned.pop(("graph", a.exec), None)

    def launch(self, a: Any, r: Record) -> None: ...

    def memset(self, a: Any, r: Record) -> None: ...


numbers = st.integers(16, 17)
contexts = st.integers(1, 2)
slots = st.integers(0, 1).map(lambda n: (1 << 45) + n * MIB2)
contents = st.sampled_from([b"first", b"second", b"bad"])


class Compaction(RuleBasedStateMachine):
    """Every call goes to a naive device and to the live objects; a second device gets only what is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.device = NaiveDevice()
        self.live = LiveObjects()
        self.seq = 0
        self.answers: dict[int, tuple[int, bytes]] = {}
        self.sent: ahead.Ahead | None = None
        self.made: ahead.Ahead | None = None
        self.give("session_open", version=1, pid=1, environment=b"CUDA_X=1\0")

    def give(self, name: str, payload: bytes = b"", **values: Any) -> None:
        self.seq += 1
        record = call(self.seq, name, payload, **values)
        # the live objects must not depend on the buffer that a record stands in
        args, scratch = bytearray(record.args), bytearray(payload)
        self.live.apply(Record(record.seq, record.call_id, memoryview(args), memoryview(scratch)))
        args[:], scratch[:] = bytes(len(args)), bytes(len(scratch))
        answer = self.device.apply(record)
        if answer is not None:
            self.answers[self.seq] = answer
            self.live.answered(self.seq, *answer)

    @rule(c=contexts, flags=st.integers(0, 3), primary=st.integers(0, 1))
    def create_context(self, c: int, flags: int, primary: int) -> None:
        self.give("context_create", context=c, device=0, flags=flags, primary=primary)

    @rule(c=contexts)
    def destroy_context(self, c: int) -> None:
        self.give("context_destroy", context=c)

    @rule(c=contexts, limit=st.integers(0, 2), value=st.integers(0, 5))
    def limit(self, c: int, limit: int, value: int) -> None:
        self.give("context_limit", context=c, limit=limit, value=value)

    @rule(c=contexts, flags=st.integers(0, 5))
    def flags(self, c: int, flags: int) -> None:
        self.give("context_flags", context=c, flags=flags)

    @rule(n=numbers, c=contexts, what=st.sampled_from(["stream", "event"]), flags=st.integers(0, 1))
    def create(self, n: int, c: int, what: str, flags: int) -> None:
        extra = {"priority": 0} if what == "stream" else {}
        self.give(f"{what}_create", **{what: n}, context=c, flags=flags, **extra)

    @rule(n=numbers, what=st.sampled_from(["stream", "event"]))
    def destroy(self, n: int, what: str) -> None:
        self.give(f"{what}_destroy", **{what: n})

    @rule(n=numbers, c=contexts, content=contents, library=st.integers(0, 1))
    def load(self, n: int, c: int, content: bytes, library: int) -> None:
        if n in self.device.unloading:
            return  # the shim gives no number twice
        self.give("module_load", content, module=n, context=c, library=library, options=b"")

    @rule(n=numbers)
    def unload(self, n: int) -> None:
        self.give("module_unload", module=n)

    @rule(n=numbers, f=st.integers(0, 1), a=st.integers(8, 9), v=st.integers(0, 9))
    def attribute(self, n: int, f: int, a: int, v: int) -> None:
        self.give("function_attribute", module=n, function=f, attribute=a, value=v)

    @rule(at=slots)
    def map(self, at: int) -> None:
        self.give("memory_map", address=at, size=MIB2, device=0)

    @rule(at=slots, size=st.sampled_from([MIB2, 2 * MIB2]))
    def unmap(self, at: int, size: int) -> None:
        self.give("memory_unmap", address=at, size=size)

    @rule(at=slots, offset=st.sampled_from([0, 512, 4096]))
    def allocate(self, at: int, offset: int) -> None:
        self.give("memory_allocate", address=at + offset, size=512)

    @rule(at=slots, offset=st.sampled_from([0, 512, 4096]), how=st.sampled_from(["memory_free", "memory_free_wait"]))
    def free(self, at: int, offset: int, how: str) -> None:
        self.give(how, address=at + offset)

    @rule(n=st.integers(0, 2), how=st.booleans())
    def pinned(self, n: int, how: bool) -> None:
        address = 0x1800_0000_0000 + n * 4096
        self.give(*["host_allocate"] if how else ["host_free"],
                  **({"address": address, "size": 4096, "flags": 0} if how else {"address": address}))

    @rule(n=numbers, c=contexts, value=st.integers(0, 9))
    def instantiate(self, n: int, c: int, value: int) -> None:
        nodes = [graphs.EmptyNode(), graphs.MemsetNode(1 << 45, 1, 1, 1, value, 1, dependencies=(0,))]
        self.give("graph_instantiate", graphs.encode(nodes), exec=n, context=c, flags=0)

    @rule(n=numbers, value=st.integers(0, 9))
    def update_graph(self, n: int, value: int) -> None:
        changes: dict[int, graphs.Node] = {1: graphs.MemsetNode(1 << 45, 1, 1, 1, value, 1)}
        self.give("graph_exec_update", graphs.encode_changes(changes), exec=n)

    @rule(n=numbers)
    def destroy_graph(self, n: int) -> None:
        self.give("graph_exec_destroy", exec=n)

    @rule()
    def work(self) -> None:
        self.give("memset", destination=1 << 45, pitch=0, width=1, height=1, element=1, value=0, stream=0)

    @rule()
    def begin_function(self) -> None:
        self.give("host_function", stream=0)

    @precondition(lambda self: self.device.functions)
    @rule()
    def end_function(self) -> None:
        self.give("host_function_done", call=min(self.device.functions))

    @precondition(lambda self: not self.device.functions)  # a session is paused with all its work complete
    @rule()
    def saved_and_restored(self) -> None:
        """A session that was moved keeps the same objects and goes on."""
        data = msgspec.msgpack.decode(msgspec.msgpack.encode(self.live.to_dict()))
        restored = LiveObjects.from_dict(data)
        assert restored.structural_calls() == self.live.structural_calls()
        assert restored.to_dict() == self.live.to_dict()
        self.live = restored

    @rule()
    def send_ahead(self) -> None:
        """From now on a second device has what takes long, made at this moment."""
        self.sent = ahead.of(self.live)
        self.made = ahead.Ahead.decode(self.sent.encode())

    @invariant()
    def with_objects_ahead_it_is_the_same(self) -> None:
        if self.sent is None or self.made is None or self.device.unloading:
            return
        if any(context is None for context, _ in self.device.owned.values()):
            return  # a stream from before the context that it names: a device refuses that
        other = NaiveDevice()
        for record in self.made.calls():
            other.apply(record)
        objects = msgspec.msgpack.decode(msgspec.msgpack.encode(self.sent.shorten(self.live.to_dict())))
        live = LiveObjects.from_dict(*self.made.lengthen(objects))
        assert live.structural_calls() == self.live.structural_calls() and live.to_dict() == self.live.to_dict()
        try:
            rest = self.made.rest(live.structural_calls())
        except RecoveryFailed as error:
            assert "context" in error.message and "destroyed" in error.message
            assert error.detail["seq"] not in {call.seq for call in live.structural_calls()}
            self.sent = self.made = None  # that move has failed
            return
        for record in rest:
            other.apply(record)
        assert other.state() == self.device.state()

    @invariant()
    def replayed_is_the_same(self) -> None:
        self.live.check()
        other = NaiveDevice()
        for record in self.live.structural_calls():
            answer = other.apply(record)
            if answer is not None:
                assert answer[0] == 0, "a load that failed is not kept"
                assert self.live.load_differs(record.seq, *answer) is None
        assert self.device.unloading or other.state() == self.device.state()

    @invariant()
    def questions_agree(self) -> None:
        device, live = self.device, self.live
        assert live.handles("context") == sorted(device.contexts)
        assert live.handles("stream") == sorted(n for kind, n in device.owned if kind == "stream")
        assert live.handles("event") == sorted(n for kind, n in device.owned if kind == "event")
        assert live.handles("graph_exec") == sorted(n for kind, n in device.owned if kind == "graph")
        assert live.handles("module") == sorted(device.modules)
        assert live.handles("memory") == sorted(device.memory)
        assert live.handles("host_memory") == sorted(device.host)
        assert live.mappings() == [Mapping(at, *held) for at, held in sorted(device.maps.items())]

    @invariant()
    def size_follows_what_is_alive(self) -> None:
        history = self.live.module_history()
        device = self.device
        settings_alive = sum(len(c) - 1 for c in device.contexts.values()) + sum(len(m) - 4 for m in
                                                                                 device.modules.values())
        alive = len(device.contexts) + len(device.owned) + len(device.memory) + len(device.maps) + len(device.host)
        # a load brings at most its unload, its context, that one's end, limits (3) and flags
        assert len(self.live.structural_calls()) <= 1 + alive + settings_alive + 8 * len(history)
        assert self.live.payload_bytes <= len(b"first") + len(b"second")


Compaction.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestCompaction = Compaction.TestCase


@pytest.mark.parametrize("seed", range(60))
def test_random_sessions(seed: int) -> None:
    """Long walks over the same rules: they reach what needs many calls of the right kinds."""
    random = Random(seed)
    machine = Compaction()
    few, at = (lambda: random.randint(16, 17)), (lambda: (1 << 45) + random.randint(0, 1) * MIB2)
    steps: list[Callable[[], None]] = [
        lambda: machine.create_context(random.randint(1, 3), random.randint(0, 3), 0),
        lambda: machine.destroy_context(random.randint(1, 3)),
        lambda: machine.limit(random.randint(1, 3), random.randint(0, 1), random.randint(0, 9)),
        lambda: machine.flags(random.randint(1, 3), random.randint(0, 9)),
        lambda: machine.create(few(), random.randint(1, 3), random.choice(["stream", "event"]), 0),
        lambda: machine.destroy(few(), random.choice(["stream", "event"])),
        lambda: machine.load(few(), random.randint(1, 3), random.choice([b"first", b"second", b"bad"]),
                             random.randint(0, 1)),
        lambda: machine.unload(few()),
        lambda: machine.attribute(few(), random.randint(0, 1), 8, random.randint(0, 9)),
        lambda: machine.map(at()),
        lambda: machine.unmap(at(), random.choice([MIB2, MIB2, 2 * MIB2])),
        lambda: machine.allocate(at(), random.choice([0, 512])),
        lambda: machine.instantiate(few(), random.randint(1, 3), random.randint(0, 9)),
        lambda: machine.update_graph(few(), random.randint(0, 9)),
        lambda: machine.destroy_graph(few()),
        lambda: machine.free(at(), random.choice([0, 512]), "memory_free"),
        lambda: None if machine.device.functions else machine.saved_and_restored(),
        machine.send_ahead,
        machine.begin_function,
        lambda: machine.end_function() if machine.device.functions else None,
    ]
    weights = [random.choice([1, 2, 6]) for _ in steps]
    for _ in range(150):
        random.choices(steps, weights)[0]()
        machine.replayed_is_the_same()
        machine.with_objects_ahead_it_is_the_same()
    machine.questions_agree()
    machine.size_follows_what_is_alive()


def _objects(*records: Record) -> LiveObjects:
    live = LiveObjects()
    for record in records:
        live.apply(record)
    return live


def _load(seq: int, number: int, content: bytes = b"first", context: int = 1) -> Record:
    return call(seq, "module_load", content, module=number, context=context, library=0, options=b"")


def _answer(place: int, name: str = "g", functions: int = 1) -> bytes:
    table = ModuleTable((FunctionInfo("f", (), (0,) * 16),) * functions, (GlobalVariable(name, place, 8),))
    return decoders.encode_reply("module_load", table=module_table.encode(table), log=b"")


def test_every_call_that_changes_objects_is_handled() -> None:
    assert set(_HANDLERS) == {c.id for c in BY_ID.values() if c.effect not in (Effect.NONE, Effect.WRITES)}


def test_a_long_session_stays_small() -> None:
    live, seq = LiveObjects(), 0
    for _ in range(500):
        for record in (call(seq + 1, "stream_create", stream=16, context=1, flags=0, priority=0),
                       call(seq + 2, "memory_map", address=1 << 45, size=MIB2, device=0),
                       call(seq + 3, "memory_allocate", address=1 << 45, size=512),
                       call(seq + 4, "memory_free", address=1 << 45),
                       call(seq + 5, "memory_unmap", address=1 << 45, size=MIB2),
                       call(seq + 6, "stream_destroy", stream=16)):
            live.apply(record)
            seq = record.seq
    assert live.structural_calls() == [] and live.position == seq


def test_modules_are_held_once_by_content() -> None:
    live = LiveObjects()
    content = bytes(100_000)
    for n in range(20):
        live.apply(_load(2 * n + 1, 16 + n, content))
        live.answered(2 * n + 1, 0, _answer(5))
        live.apply(call(2 * n + 2, "module_unload", module=16 + n))
    assert len(live.structural_calls()) == 40 and live.payload_bytes == 100_000
    assert len(msgspec.msgpack.encode(live.to_dict())) < 110_000
    assert [alive for *_, alive in live.module_history()] == [False] * 20


def test_a_dead_context_stays_while_a_module_was_loaded_into_it() -> None:
    live = _objects(call(1, "context_create", context=1, device=0, flags=0, primary=0), _load(2, 16),
                    call(3, "context_destroy", context=1))
    assert [r.seq for r in live.structural_calls()] == [1, 2, 3]
    live.answered(2, 209, b"")  # the load failed after all
    assert live.structural_calls() == []
    live.check()


def test_allocations_outlive_contexts_that_leave_no_trace() -> None:
    """Context 2 kept the memory alive, and is not replayed: context 1 must not take the memory with it."""
    def create(seq: int, number: int) -> Record:
        return call(seq, "context_create", context=number, device=0, flags=0, primary=0)

    records = [create(1, 1), _load(2, 16), create(3, 2), call(4, "memory_allocate", address=1 << 45, size=512),
               call(5, "context_destroy", context=1), create(6, 3), call(7, "context_destroy", context=2)]
    live, first, second = LiveObjects(), NaiveDevice(), NaiveDevice()
    for record in records:
        live.apply(record)
        if answer := first.apply(record):
            live.answered(record.seq, *answer)
    assert [r.seq for r in live.structural_calls()] == [1, 2, 5, 6, 4]
    for record in live.structural_calls():
        second.apply(record)
    assert second.state() == first.state() and first.memory


def test_settings_end_with_their_module() -> None:
    live = _objects(_load(1, 16), *(call(seq, "function_attribute", module=16, function=0, attribute=seq % 2, value=seq)
                                    for seq in range(2, 9)))
    live.answered(1, 0, _answer(5))
    assert [r.seq for r in live.structural_calls()] == [1, 7, 8]
    live.apply(call(9, "module_unload", module=16))
    assert [r.seq for r in live.structural_calls()] == [1, 9]


def test_a_session_opens_once() -> None:
    live = _objects(*(call(seq, "session_open", version=1, pid=seq, environment=b"") for seq in (1, 2)))
    assert [r.seq for r in live.structural_calls()] == [1]


def test_a_replayed_load_is_compared() -> None:
    live = _objects(_load(1, 16))
    live.answered(1, 0, _answer(0x400))
    assert live.load_differs(1, 0, _answer(0x400)) is None
    moved = live.load_differs(1, 0, _answer(0x800))
    assert moved is not None and "0x400" in moved.what and "0x800" in moved.what
    assert live.load_differs(1, 0, _answer(0x400, name="h")) is not None
    assert live.load_differs(1, 0, _answer(0x400, functions=2)) is not None
    failed = live.load_differs(1, 218, b"")
    assert failed is not None and "218" in failed.what
    live.apply(call(2, "module_unload", module=16))
    assert live.load_differs(1, 0, _answer(0x400)) is None
    assert live.load_differs(1, 0, _answer(0x800)) is not None, "dead modules decide addresses too"


def test_a_graph_comes_after_what_its_updates_name() -> None:
    """The updated node names a module that was loaded after the graph was made."""
    kernel = graphs.KernelNode(16, 0, (1, 1, 1), (1, 1, 1), 0, False, b"x", b"")
    live = _objects(call(1, "context_create", context=1, device=0, flags=0, primary=0),
                    call(2, "graph_instantiate", graphs.encode([kernel]), exec=20, context=1, flags=0), _load(3, 17))
    live.answered(3, 0, _answer(5))
    other = graphs.KernelNode(17, 0, (1, 1, 1), (1, 1, 1), 0, False, b"y", b"")
    for seq in range(4, 200):
        live.apply(call(seq, "graph_exec_update", graphs.encode_changes({0: other}), exec=20))
    _, load, graph = live.structural_calls()
    assert (load.seq, graph.seq) == (3, 2) and graphs.decode(graph.payload) == [other]
    live.apply(call(200, "graph_exec_destroy", exec=20))
    assert [r.seq for r in live.structural_calls()] == [1, 3]


def test_an_unknown_kind() -> None:
    with pytest.raises(KeyError):
        LiveObjects().handles("graph")


def test_hostile_dictionaries() -> None:
    live = _objects(call(1, "context_create", context=1, device=0, flags=0, primary=0), _load(2, 16))
    live.answered(2, 0, _answer(5))
    good = live.to_dict()
    assert LiveObjects.from_dict(good).to_dict() == good
    row, answer = good["calls"][1], good["answers"][0]
    for change in (
        {"version": 2}, {"position": "9"}, {"position": 0}, {"payloads": None}, {"payloads": ["text"]},
        {"payloads": []},
        {"calls": [1]}, {"calls": [row, row]}, {"calls": [[0, *row[1:]]]}, {"calls": [[2, 23, 0, 0, b"", -1]]},
        {"calls": [[*row[:4], b"short", 0]]}, {"calls": [[*row[:5], 7]]}, {"calls": [[*row[:5], -1]]},
        {"calls": [[*row[:3], "flags", *row[4:]]]}, {"answers": [[9, *answer[1:]]]}, {"answers": [[1, *answer[1:]]]},
        {"answers": [answer, answer]}, {"answers": [[2, 1, "digest", None]]}, {"answers": [[2, 1, b"", None]]},
        {"answers": [[2, 1, b"", [["g", 1]]]]}, {"answers": 5},
    ):
        with pytest.raises(Corrupt):
            LiveObjects.from_dict({**good, **change})
    for data in (None, [], "x", 5, {}):
        with pytest.raises(Corrupt):
            LiveObjects.from_dict(data)


# -- objects ahead ----------------------------------------------------------------------------


def _session() -> LiveObjects:
    live = _objects(call(1, "context_create", context=1, device=0, flags=0, primary=0), _load(2, 16),
                    call(3, "stream_create", stream=16, context=1, flags=0, priority=0), _load(4, 17, b"second"),
                    _load(5, 18))
    for seq in (2, 4, 5):
        live.answered(seq, 0, _answer(seq))
    return live


def test_contents_go_ahead_once_and_are_numbers_then() -> None:
    live = _session()
    sent = ahead.of(live)
    assert sent.contents == [b"first", b"second"] and [row.seq for row in sent.rows] == [1, 2, 4, 5]
    live.apply(_load(6, 19, b"third"))
    live.answered(6, 0, _answer(6))
    assert sent.shorten(live.to_dict())["payloads"] == [0, 1, b"third"]
    made = ahead.Ahead.decode(sent.encode())
    assert made.lengthen(sent.shorten(live.to_dict())) == (live.to_dict(), [*made.digests, b""])
    assert [record.seq for record in made.rest(live.structural_calls())] == [3, 6]


def test_a_rebuild_knows_where_variables_stood() -> None:
    live = _session()
    there = live.variables()
    assert set(there) == {2, 4, 5} and all(there.values())
    assert LiveObjects.from_dict(live.to_dict()).variables() == there
    assert ahead.Ahead.decode(ahead.of(live).encode()).variables() == there
    older = msgspec.msgpack.decode(ahead.of(live).encode())
    older[1] = [row[:6] for row in older[1]]
    assert ahead.Ahead.decode(msgspec.msgpack.encode(older)).variables() == {}, "an older source does not tell"
    live.apply(call(6, "module_unload", module=17))
    assert set(live.variables()) == {2, 5}


def test_what_comes_behind_a_load_that_is_not_answered_is_made_in_its_order() -> None:
    live = _session()
    live.apply(_load(6, 19, b"third"))
    live.apply(_load(7, 20, b"fourth"))
    live.answered(7, 0, _answer(7))
    assert [row.seq for row in ahead.of(live).rows] == [1, 2, 4, 5]


def test_a_context_that_is_gone_without_a_trace_ends_the_move() -> None:
    live = _session()
    live.apply(call(6, "context_create", context=2, device=0, flags=0, primary=0))
    made = ahead.of(live)
    live.apply(call(7, "context_destroy", context=2))
    with pytest.raises(RecoveryFailed, match="context of call 6 was destroyed while"):
        made.rest(live.structural_calls())


@pytest.mark.parametrize("rows", [
    [[1, 9999, 0, 0, b"", -1]], [[0, ahead._CONTEXT, 0, 0, b"", -1]], [[1, ahead.LOAD, 0, 0, b"", -1]],
    [[1, ahead.LOAD, 0, 0, b"", 2]], [[1, ahead._CONTEXT, 0, 0, b"", 0]], [[1, ahead._CONTEXT, 0, 0, b"", -2]],
    [[2, ahead._CONTEXT, 0, 0, b"", -1], [2, ahead._CONTEXT, 0, 0, b"", -1]], [[1]], "rows",
    [[1, BY_NAME["launch"].id, 0, 0, b"", -1]]])
def test_what_is_no_list_of_objects_is_refused(rows: Any) -> None:
    with pytest.raises(Corrupt):
        ahead.Ahead.decode(msgspec.msgpack.encode([[b"one", b"two"], rows]))


@pytest.mark.parametrize("payloads", [[2], [-1], ["x", 7], None])
def test_contents_that_nobody_sent_are_refused(payloads: Any) -> None:
    made = ahead.Ahead.decode(ahead.of(_session()).encode())
    with pytest.raises(Corrupt):
        LiveObjects.from_dict(*made.lengthen({**_session().to_dict(), "payloads": payloads}))
