"""What is kept of a session, replayed, gives the same as replaying everything: walks over the rules of calls."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rgpu.session.errors import RecoveryFailed
from rgpu.session.journal.record import Record
from rgpu.session.objects import ahead, graphs
from rgpu.session.objects.live import LiveObjects, Mapping
from tests.support.naive_device import NaiveDevice, call

MIB2 = 2 << 20
numbers = st.integers(16, 17)
contexts = st.integers(1, 2)
slots = st.integers(0, 2).map(lambda n: (1 << 45) + n * MIB2)
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

    @rule(at=slots, size=st.sampled_from([MIB2, 2 * MIB2]), source=slots)
    def alias(self, at: int, size: int, source: int) -> None:
        self.give("memory_alias", address=at, size=size, source=source)

    @rule(at=slots, size=st.sampled_from([MIB2, 2 * MIB2]))
    def unalias(self, at: int, size: int) -> None:
        self.give("memory_unalias", address=at, size=size)

    @rule(at=slots, to=slots)
    def move_mapping(self, at: int, to: int) -> None:
        self.give("memory_move", address=at, size=MIB2, to=to)

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
        assert live.handles("alias") == sorted(device.aliases)
        assert live.handles("host_memory") == sorted(device.host)
        assert live.mappings() == [Mapping(at, *held) for at, held in sorted(device.maps.items())]

    @invariant()
    def size_follows_what_is_alive(self) -> None:
        history = self.live.module_history()
        device = self.device
        settings_alive = sum(len(c) - 1 for c in device.contexts.values()) + sum(len(m) - 4 for m in
                                                                                 device.modules.values())
        alive = sum(map(len, (device.contexts, device.owned, device.memory, device.maps, device.aliases, device.host)))
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
    few, at = (lambda: random.randint(16, 17)), (lambda: (1 << 45) + random.randint(0, 2) * MIB2)
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
        lambda: machine.alias(at(), random.choice([MIB2, MIB2, 2 * MIB2]), at()),
        lambda: machine.unalias(at(), random.choice([MIB2, MIB2, 2 * MIB2])),
        lambda: machine.move_mapping(at(), at()),
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
