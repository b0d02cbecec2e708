"""Host functions and calls of the driver that wait for the device: neither waits for the other for ever."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rgpu.server.device.cuda.work import modules
from rgpu.server.worker.apply import lookahead
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.session.addresses import PINNED_BASE
from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_NAME
from rgpu.session.objects import ahead
from rgpu.session.objects.live import LiveObjects
from tests.support.eventually import eventually
from tests.support.fake_driver.support import BASE, BINARY, Agent, Journal, driver, linked

Attach = Callable[[], Agent]


@pytest.fixture
def runtime(device: Any) -> SessionRuntime:
    return SessionRuntime("s", 1, device)


@pytest.fixture
def attach(runtime: SessionRuntime) -> Iterator[Attach]:
    """Opens links to the runtime; they end before the device does."""
    links = []

    def make() -> Agent:
        link, connection = linked(runtime)
        links.append(link)
        return Agent(connection)

    yield make
    runtime.stop()
    for link in links:
        link.finish()
        link._receiver.join(5)


@pytest.fixture
def agent(attach: Attach, journal: Journal) -> Agent:
    """A link with a session open, whose driver's loads wait for all streams from now on."""
    agent = attach()
    agent.send(journal.opened())
    assert agent.answer(5)[0] == 0
    driver().fake_loads_wait(1)
    return agent


def stopped(agent: Agent, journal: Journal) -> int:
    """A stream stands at a host function, with work behind it."""
    agent.send(journal("host_function", stream=18))
    function = journal.seq
    assert agent.answer(function)[0] == 0
    agent.send(journal.add_one())
    return function


def load(journal: Journal) -> bytes:
    return journal("module_load", BINARY, module=30, context=16, library=0, options=b"")


def unregister(journal: Journal) -> bytes:
    return journal("host_free", address=PINNED_BASE)


@pytest.mark.parametrize("patience", [20.0, 0.05])
@pytest.mark.parametrize("waits", [load, unregister])
def test_a_call_that_waits_and_a_function_that_returns_behind_it(
        device: Any, runtime: SessionRuntime, agent: Agent, journal: Journal, monkeypatch: pytest.MonkeyPatch,
        waits: Callable[[Journal], bytes], patience: float) -> None:
    """The record that would let the stream go is behind the call: in the same message, and in a later one.

    With little patience the call is inside the driver when that record comes.
    """
    monkeypatch.setattr(lookahead, "PATIENCE", patience)
    for together in (True, False):
        agent.send(journal("host_allocate", address=PINNED_BASE, size=1 << 16, flags=0) + journal.write(bytes(16)))
        function = stopped(agent, journal)
        call = waits(journal)
        position = journal.seq
        rest = journal("host_function_done", call=function) + journal("context_synchronize", context=16)
        if together:
            agent.send(call + rest)
        else:
            agent.send(call)
            time.sleep(0.3)
            assert runtime.applied < position, "the call returned while the stream stood"
            agent.send(rest)
        assert agent.answer(journal.seq)[0] == 0
        agent.send(journal.read(16))
        assert agent.answer(journal.seq)[2] == struct.pack("<4I", 1, 1, 1, 1)
        if waits is load:
            agent.send(journal("module_unload", module=30) + journal("host_free", address=PINNED_BASE))
    assert runtime.executor.bugs == 0 and not device.host_gates.held and not device.host_gates.open


def test_much_behind_the_call_is_kept_in_order(runtime: SessionRuntime, agent: Agent, journal: Journal) -> None:
    """Copies of megabytes, answers and a ping between the call and the record that lets it go."""
    function = stopped(agent, journal)
    data = bytes(range(256)) * 16384
    agent.send(load(journal))
    loaded = journal.seq
    agent.send(journal.write(data, BASE + 4096, stream=19) + journal.add_one(BASE + 4096, 1, stream=19)
               + journal.read(8, BASE + 4096, stream=19), 1_000_003)
    read = journal.seq
    agent.connection.send(4, struct.pack("<Q", journal.seq))
    agent.send(journal("host_function_done", call=function), 7)
    assert agent.answer(loaded)[0] == 0
    assert agent.answer(read)[2] == bytes([1, 1, 2, 3, 4, 5, 6, 7])
    assert runtime.executor.bugs == 0


def test_a_connection_ends_while_the_call_is_in_the_driver(
        runtime: SessionRuntime, attach: Attach, agent: Agent, journal: Journal,
        monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one finds it there, brings the record that lets it go, and nothing is applied twice."""
    monkeypatch.setattr(lookahead, "PATIENCE", 0.05)
    function = stopped(agent, journal)
    call = load(journal)
    loaded = journal.seq
    agent.send(call)
    eventually(lambda: runtime.boundary.under_way, "the call is not in the driver")
    agent.connection.close()
    again = attach()
    assert runtime.applied == loaded - 1
    again.send(call + journal("host_function_done", call=function) + journal.add_one() + journal.read(16))
    assert again.answer(loaded)[0] == 0
    assert again.answer(journal.seq)[0] == 0 and runtime.executor.bugs == 0
    eventually(lambda: runtime.applied == journal.seq, "a call was not applied, or twice")  # the answer may come first


def test_a_cut_waits_for_a_call_in_the_driver(runtime: SessionRuntime, agent: Agent, journal: Journal,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """Its position is behind the call, and the call's work is in it."""
    monkeypatch.setattr(lookahead, "PATIENCE", 0.05)
    function = stopped(agent, journal)
    agent.send(load(journal))
    loaded = journal.seq
    eventually(lambda: runtime.boundary.under_way, "the call is not in the driver")
    agent.send(journal("host_function_done", call=function))
    runtime.quiesce(10)
    assert runtime.applied >= loaded
    runtime.resume()
    assert agent.answer(loaded)[0] == 0


def test_a_rebuild_loads_and_unloads_in_the_order_of_the_driver(device: Any, runtime: SessionRuntime, journal: Journal,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver places a module by all loads and unloads before it, and unloads here behind the function's end."""
    done: list[str] = []
    load, unload = modules.Loader.load, modules.unload
    monkeypatch.setattr(modules.Loader, "load", lambda *a: (done.append(f"load {a[1].count(b'f 0')}"), load(*a))[1])
    monkeypatch.setattr(modules, "unload", lambda m: (done.append(f"unload {len(m.functions)}"), unload(m))[1])

    def module(number: int) -> bytes:
        return journal("module_load", b"f 0\n" * (number - 30), module=number, context=16, library=0, options=b"")

    feed = runtime.open_stream()
    feed(journal.opened() + module(31) + module(32) + journal("host_function", stream=18))
    function = journal.seq
    feed(journal("module_unload", module=31) + module(33))
    assert journal.seq - 1 not in {call.seq for call in ahead.of(runtime.live).calls()}, "sent before it took place"
    eventually(lambda: function in runtime.retained, "the stream did not get to the host function")
    feed(journal("host_function_done", call=function) + module(34))
    before, done = done[1:], done
    done.clear()
    for record in LiveObjects.from_dict(runtime.objects()).structural_calls():
        if record.call_id in (BY_NAME["module_load"].id, BY_NAME["module_unload"].id):
            number = decoders.decode(record.call_id, record.args).module
            done.append(f"load {number - 30}" if record.payload else f"unload {number - 30}")
    assert before == ["load 1", "load 2", "load 3", "unload 1", "load 4"] == done[1:]


def test_a_full_queue_waits_for_no_function_that_has_returned(runtime: SessionRuntime, attach: Attach,
                                                              journal: Journal) -> None:
    """More calls than may be under way stand between a function and the word that it has returned: as quick as if that
    came at once. A patience of a second was spent on each 32 calls.
    """
    agent = attach()
    agent.send(journal.opened())
    assert agent.answer(5)[0] == 0

    def seconds(behind: bool) -> float:
        began = time.monotonic()
        agent.send(journal("host_function", stream=18))
        function = journal.seq
        assert agent.answer(function)[0] == 0
        done = b"" if behind else journal("host_function_done", call=function)
        data = done + b"".join(journal.add_one() for _ in range(500))
        agent.send(data + (journal("host_function_done", call=function) if behind else b""), 30_000)
        agent.send(journal("context_synchronize", context=16))
        assert agent.answer(journal.seq)[0] == 0
        return time.monotonic() - began

    seconds(behind=False)
    at_once, behind = (sum(seconds(which) for _ in range(3)) for which in (False, True))
    assert behind < 20 * at_once, f"{behind} s, {at_once} s where the function returns at once"
    agent.send(journal.read(4))
    assert agent.answer(journal.seq)[2] == struct.pack("<I", 7 * 500) and runtime.executor.bugs == 0
