"""Printed text from a session on the cpu device to the agent's end of its links: order, recovery, moves."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

import pytest

from rgpu.checkpoint.device import GRANULE
from rgpu.checkpoint.manifest import cut
from rgpu.checkpoint.manifest.state import SessionState
from rgpu.server.device.cpu import CpuDevice
from rgpu.server.worker import session_text
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.session.addresses import DEVICE_BASE
from rgpu.session.journal.record import Record, pack_record
from tests.support.cpu import stub
from tests.support.eventually import eventually
from tests.support.worker.journal import Journal
from tests.support.worker.links import End, linked

BASE = DEVICE_BASE


class Program:
    """The calls of a program whose kernels print, as the journal keeps them; its replays use them again."""

    def __init__(self) -> None:
        self.journal, self.records = Journal(), []
        self.text = b""
        for name, args in (("session_open", dict(version=1, pid=1, environment=b"")),
                           ("context_create", dict(context=16, device=0, flags=0, primary=1)),
                           ("memory_map", dict(address=BASE, size=GRANULE, device=0)),
                           ("memory_allocate", dict(address=BASE, size=1 << 20))):
            self.call(name, **args)
        self.call("module_load", stub.text(), module=17, context=16, library=0, options=b"")

    @property
    def position(self) -> int:
        return self.journal.seq

    def call(self, name: str, payload: bytes = b"", **args: object) -> int:
        self.records.append(self.journal(name, payload, **args))
        return self.position

    def say(self, number: int) -> None:
        self.call("launch", module=17, function=stub.INDEX["print"], grid_x=1, grid_y=1, grid_z=1, block_x=1, block_y=1,
                  block_z=1, shared=0, flags=0, stream=0, parameters=struct.pack("<QQ", BASE, number), attributes=b"")
        self.text += b"say %d\n" % number

    def sync(self) -> int:
        return self.call("context_synchronize", context=16)

    def since(self, position: int) -> list[Record]:
        return self.records[position:]

    def packed(self, position: int) -> bytes:
        return b"".join(map(pack_record, self.since(position)))


@pytest.fixture
def devices() -> Iterator[list[CpuDevice]]:
    """The process has room for one at a time: the one before ends when another is made."""
    made: list[CpuDevice] = []
    yield made
    made[-1].close()


def worker(devices: list[CpuDevice], state: SessionState | None = None) -> SessionRuntime:
    if devices:
        devices[-1].close()
    devices.append(CpuDevice(0, 64 << 20, 1, engine=stub, host="test"))  # type: ignore[arg-type]
    runtime = SessionRuntime("s", 1, devices[-1], None if state is None else state.hash_key)
    if state is not None:
        runtime.restore(state, ())  # all pages are zeros
    return runtime


def taken(runtime: SessionRuntime) -> SessionState:
    runtime.quiesce(5)
    try:
        return SessionState.decode(cut.take(
            runtime.device, session="s", epoch=1, position=runtime.applied, hash_key=runtime.hash_key,
            live=runtime.objects(), answers=runtime.answers(), printed=runtime.text.state()).encode())
    finally:
        runtime.resume()


def attach(runtime: SessionRuntime, given: int = 0, published: int = 0) -> End:
    return End(linked(runtime, published, given)[1], given)


def test_text_comes_before_what_tells_that_it_was_printed(devices: list[CpuDevice]) -> None:
    program, runtime = Program(), worker(devices)
    end, sent = attach(runtime), 0
    for turn in range(1, 101):
        program.say(turn)
        seq = program.sync()
        end.send(program.packed(sent))
        sent = program.position
        assert end.answer(seq) == (0, program.text)
    for done, text in end.marks:
        assert text.count(b"\n") >= max(0, (done - 4) // 2), "a watermark overtook the text of what it covers"


def test_a_program_that_never_waits_gets_its_text(devices: list[CpuDevice]) -> None:
    program, runtime = Program(), worker(devices)
    end = attach(runtime)
    for turn in range(1, 50):
        program.say(turn)
    end.send(program.packed(0))
    assert end.wait_text(len(program.text)) == program.text


@pytest.mark.parametrize("at", [5, 20, 41])
@pytest.mark.parametrize("given", [0, 37, 10_000], ids=["nothing", "some", "all"])
def test_a_recovery_repeats_nothing(devices: list[CpuDevice], at: int, given: int) -> None:
    """From the beginning or from a checkpoint; the agent has some of the text, of before and behind the checkpoint."""
    program, first = Program(), worker(devices)
    for turn in range(1, 19):
        program.say(turn)
        program.sync()
    checkpoint = None
    if at > 5:
        first.feed(program.records[:at])
        checkpoint = taken(first)
        assert checkpoint.printed[0] == len(program.text[:checkpoint.printed[0]]) > 0
    given = min(given, len(program.text))
    second = worker(devices, checkpoint)
    end = attach(second, max(given, 0 if checkpoint is None else checkpoint.printed[0] - len(checkpoint.printed[1])),
                 program.position)
    program.say(99)
    seq = program.sync()
    end.send(program.packed(second.applied))
    assert end.answer(seq) == (0, program.text[end.begin:])


def test_a_move_by_copy_takes_what_is_not_confirmed(devices: list[CpuDevice]) -> None:
    program, first = Program(), worker(devices)
    end = attach(first)
    for turn in range(1, 30):
        program.say(turn)
    seq = program.sync()
    end.send(program.packed(0))
    end.answer(seq)
    end.confirm(50)
    eventually(lambda: first.text.state()[1] == program.text[50:], "the count is not taken")
    state = taken(first)
    assert state.printed == [len(program.text), program.text[50:]]
    second = worker(devices, state)
    here = attach(second, 60, program.position)  # ten more had reached the agent when the link ended
    program.say(77)
    seq = program.sync()
    here.send(program.packed(second.applied))
    assert here.answer(seq) == (0, program.text[60:])


def test_a_move_by_replay_takes_the_sources_text(devices: list[CpuDevice]) -> None:
    """What the destination prints in its replay goes nowhere, not even where it prints something else."""
    program, source = Program(), worker(devices)
    program.say(1)
    program.sync()
    source.feed(program.records)
    state, begin = taken(source), program.position
    for turn in range(2, 10):
        program.say(turn)
        program.sync()
    source.feed(program.since(begin))
    last = taken(source)
    destination = worker(devices, state)
    destination.replay()
    destination.feed(program.since(begin))
    devices[-1].text.writer("another")(b"printed in the replay alone\n")
    assert destination.device.drain(5)
    destination.settle(last)
    end = attach(destination, 3, program.position)
    assert end.wait_text(len(program.text) - 3) == program.text[3:]


def test_calls_wait_for_an_agent_that_reads_nothing(devices: list[CpuDevice], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_text, "LIMIT", 1000)
    program, runtime = Program(), worker(devices)
    end = attach(runtime)
    for turn in range(1, 1001):
        program.say(turn)
        if turn % 10 == 0:
            program.sync()
    end.send(program.packed(0))
    eventually(lambda: len(end.text) > 1000, "no text comes")
    time.sleep(0.2)
    stood = runtime.applied
    time.sleep(0.2)
    assert runtime.applied == stood < program.position - 500, "nothing holds the calls up"
    taken(runtime)  # nor does that hold a cut up
    eventually(lambda: (end.confirm(), program.position in end.answers)[1], "it stands still for good", 60)
    assert end.text == program.text
    end.confirm()
    eventually(lambda: runtime.text.state() == [len(program.text), b""], "what is confirmed is kept")


def test_an_agent_of_before_is_sent_none(devices: list[CpuDevice]) -> None:
    program, runtime = Program(), worker(devices)
    end = End(linked(runtime)[1])
    program.say(1)
    seq = program.sync()
    end.send(program.packed(0))
    assert end.answer(seq) == (0, b"") and runtime.text.state() == [6, b""]


def test_a_count_that_cannot_be_ends_the_link(devices: list[CpuDevice]) -> None:
    program, runtime = Program(), worker(devices)
    end = attach(runtime)
    end.send(program.packed(0))
    end.answer(program.position)
    end.confirm(10)
    eventually(lambda: runtime.kept._deliver is None, "the link goes on")
