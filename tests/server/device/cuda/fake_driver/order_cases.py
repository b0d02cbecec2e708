"""A backlog in the order of issue, in the engine (SEMANTICS 20): hot, cold calls, stalls, host functions, its end."""

from __future__ import annotations

import re
import struct
import threading
import time
from typing import Any

import pytest

from rgpu.server.worker.apply import ordering
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.session.addresses import PINNED_BASE
from rgpu.session.journal import issue_order
from rgpu.session.journal.issue_order import State
from tests.support.eventually import eventually
from tests.support.fake_driver.support import BASE, SIZE, SLOW, WAIT_FLAG, Journal, collect, linked
from tests.support.fake_driver.support import Agent as AgentEnd

EVER = 1 << 40
BOUNDARY = re.compile(b"RGCL")  #: how a record begins


def started(device: Any, journal: Journal, published: int = EVER) -> tuple[SessionRuntime, Any]:
    runtime = SessionRuntime("s", 1, device)
    runtime.attach(lambda *answer: None, published)
    feed = runtime.open_stream()
    feed(journal.opened() + journal.write(bytes(1 << 16)))
    assert device.drain(10)
    return runtime, feed


def slow(journal: Journal, stream: int, milliseconds: int = 30) -> bytes:
    return journal.launch(SLOW, struct.pack("<I", milliseconds * 1000), stream)


def race(journal: Journal, between: bytes = b"") -> bytes:
    """The first stream is slow, then adds; the second one overwrites what it adds to, with nothing between them."""
    data = slow(journal, 18) + journal.add_one(stream=18) + between
    return data + journal("memset", destination=BASE, pitch=16, width=4, height=1, element=4, value=7, stream=19)


@pytest.mark.parametrize("published, expected", [(EVER, 7), (0, 8)])
def test_a_race_between_streams(device: Any, journal: Journal, published: int, expected: int) -> None:
    """In order the later call wins; live, the one whose stream has less to do comes first."""
    runtime, feed = started(device, journal, published)
    feed(race(journal) + journal("context_synchronize", context=16) + journal.read(4))
    found = collect(runtime, {journal.seq - 1, journal.seq})
    assert found[journal.seq] == (0, struct.pack("<I", expected))
    assert runtime.order.describe()["state"] == ("ordered" if published else "live")


@pytest.mark.parametrize("step", [1, 7, 41, 300, 5000])
def test_cut_anywhere(device: Any, journal: Journal, step: int) -> None:
    """Also payloads that arrive while the call waits for its turn."""
    runtime, feed = started(device, journal)
    data = race(journal) + slow(journal, 18) + journal.write(struct.pack("<4I", 5, 6, 7, 8) * 64, stream=19)
    data += journal.add_one(stream=18) + journal.read(16, stream=19)
    for at in range(0, len(data), step):
        feed(data[at:at + step])
    assert collect(runtime, {journal.seq})[journal.seq][1] == struct.pack("<4I", 6, 7, 8, 9)
    assert runtime.applied == journal.seq and runtime.executor.bugs == 0


def test_cold_calls_keep_the_same_order(device: Any, journal: Journal) -> None:
    """A mirror write between two hot calls of another stream: it waits for the first, the second one for it."""
    runtime, feed = started(device, journal)
    feed(journal("host_allocate", address=PINNED_BASE, size=1 << 16, flags=0))
    feed(slow(journal, 18) + journal("memcpy_d2d", destination=BASE, source=PINNED_BASE, size=4, stream=18)
         + journal("host_mirror_write", b"\x09\0\0\0", address=PINNED_BASE, stream=19)
         + journal("memcpy_d2d", destination=BASE + 4, source=PINNED_BASE, size=4, stream=18) + journal.read(8))
    assert collect(runtime, {journal.seq})[journal.seq][1] == struct.pack("<2I", 0, 9)


def test_clearly_more_than_usual_under_way_is_a_backlog(device: Any, journal: Journal,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Live: calls of one stream pile up, whyever; from the next stream on they are in order. One stream alone: none."""
    monkeypatch.setattr(ordering, "STALL", 0.3)
    runtime, feed = started(device, journal, 0)
    runtime.order.distance.earlier = True
    runtime.order.look(time.monotonic(), 1)
    feed(journal.launch(WAIT_FLAG, struct.pack("<Q", BASE + 2048)))
    feed(b"".join(journal.add_one(stream=18) for _ in range(160)))
    assert runtime.order.describe()["state"] == "live"
    feed(journal("memset", destination=BASE + 2048, pitch=4, width=1, height=1, element=4, value=1, stream=19))
    said = runtime.order.describe()
    assert (said["state"], said["catch_ups"], said["stalls"]) == ("overlapping", 1, 1), said
    assert device.drain(10)


def after(journal: Journal, before: int, behind: int, event: int = 20) -> bytes:
    """What the program does to have one stream wait for another."""
    return journal("event_record", event=event, stream=before, flags=0) \
        + journal("stream_wait_event", stream=behind, event=event, flags=0)


FLAG = BASE + 2048  #: what a kernel waits for


def held(journal: Journal, stream: int) -> bytes:
    return journal.launch(WAIT_FLAG, struct.pack("<Q", FLAG), stream)


def waits(runtime: SessionRuntime, device: Any, feed: Any, data: bytes) -> bool:
    """Feed ``data``; whether its last call was given only once the flag was written, which is 0 again then."""
    last = runtime.applied + len(BOUNDARY.findall(data))
    thread = threading.Thread(target=feed, args=(data,))
    thread.start()
    thread.join(0.5)
    waited = thread.is_alive()
    assert waited == (runtime.applied != last)
    device.write(FLAG, b"\1\0\0\0")
    thread.join(20)
    assert device.drain(20)
    device.write(FLAG, bytes(4))
    return waited


def test_streams_that_the_program_ordered_are_not_waited_for(device: Any, journal: Journal,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """The device keeps that order; the host waits where an event does not cover all that was given before."""
    monkeypatch.setattr(ordering, "STALL", 60.0)
    runtime, feed = started(device, journal)
    feed(journal("stream_create", stream=21, context=16, flags=1, priority=0)
         + journal("event_create", event=22, context=16, flags=2))
    data = held(journal, 18) + after(journal, 18, 19) + journal("event_record", event=20, stream=18, flags=0)
    data += after(journal, 19, 21, 22)  # events are no work; what is behind the second is behind the first
    assert not waits(runtime, device, feed, data + journal.add_one(stream=21))
    data = held(journal, 18) + after(journal, 18, 19) + journal.add_one(stream=19) + after(journal, 19, 18)
    assert not waits(runtime, device, feed, data + journal.add_one(stream=18))
    data = held(journal, 18) + after(journal, 18, 19) + journal.add_one(stream=18)  # this one is behind the event
    assert waits(runtime, device, feed, data + journal.add_one(stream=19)), "it ran beside what was given before it"
    feed(journal.read(4))
    assert collect(runtime, {journal.seq})[journal.seq][1] == struct.pack("<I", 5)
    assert runtime.order.describe()["stalls"] == 0 and runtime.executor.bugs == 0


def test_what_was_given_before_the_catch_up_is_waited_for(device: Any, journal: Journal,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """Live, only the point of an event is known, not what its stream had waited for."""
    monkeypatch.setattr(ordering, "STALL", 60.0)
    runtime, feed = started(device, journal, published=0)
    feed(journal("stream_create", stream=21, context=16, flags=1, priority=0)
         + journal("event_create", event=22, context=16, flags=2))
    assert not runtime.order.ordered
    feed(held(journal, 18) + after(journal, 18, 19, 22) + journal.add_one(stream=19)
         + journal("event_record", event=20, stream=19, flags=0))
    runtime.order.feed(issue_order.Attached(runtime.applied, EVER))
    data = journal("stream_wait_event", stream=21, event=20, flags=0) + journal.add_one(stream=21)
    assert waits(runtime, device, feed, data), "that 19 had waited for 18 was not written down then"
    data = held(journal, 18) + after(journal, 18, 19) + journal.add_one(stream=19)
    assert not waits(runtime, device, feed, data)


def test_one_stream_waits_for_nothing(device: Any, journal: Journal) -> None:
    runtime, feed = started(device, journal)
    feed(slow(journal, 18, 500))
    began = time.monotonic()
    feed(journal.add_one() * 1 + journal("stream_synchronize", stream=18) + journal("event_destroy", event=20))
    assert time.monotonic() - began < 0.45 and not device.is_complete(journal.seq - 3)
    runtime.stop()


def test_work_that_waits_for_a_later_call_overlaps_from_there(device: Any, journal: Journal,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that runs until another stream writes its flag: noticed, named, counted, and the rest overlaps."""
    monkeypatch.setattr(ordering, "STALL", 0.3)
    runtime, feed = started(device, journal)
    feed(journal.launch(WAIT_FLAG, struct.pack("<Q", BASE)))
    waiting = journal.seq
    feed(journal.write(b"\1\0\0\0", stream=19) + journal("context_synchronize", context=16))
    assert collect(runtime, {journal.seq})[journal.seq][0] == 0
    said = runtime.order.describe()
    assert said["state"] == "overlapping" and said["stalls"] == 1
    assert f"kernel wait_flag (call {waiting})" in said["reason"], said
    assert f"memcpy_h2d at {waiting + 1}" in said["reason"], said
    feed(race(journal) + journal("context_synchronize", context=16) + journal.read(4))
    assert collect(runtime, {journal.seq})[journal.seq][1] == struct.pack("<I", 8), "it went on in order"


def test_many_long_kernels_are_no_stall(device: Any, journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that takes far longer than a stall, each kernel of which takes less."""
    monkeypatch.setattr(ordering, "STALL", 1.0)
    runtime, feed = started(device, journal)
    feed(b"".join(slow(journal, 18, 60) for _ in range(30)) + journal.add_one(stream=19))
    assert device.drain(10)
    said = runtime.order.describe()
    assert said["state"] == "ordered" and said["stalls"] == 0, said


def test_an_open_host_function_is_let_go_by_the_backlog(device: Any, journal: Journal) -> None:
    """What says that it returned lies behind the call that waits for its stream, in this message or a later one."""
    runtime = SessionRuntime("s", 1, device)
    link, connection = linked(runtime, EVER)
    agent = AgentEnd(connection)
    agent.send(journal.opened() + journal.write(bytes(64)))
    for rest in (0, 50):
        data = b"".join(journal.add_one(BASE + 4096, 1) for _ in range(rest)) + journal("host_function", stream=18)
        function = journal.seq
        data += journal.add_one(stream=18) + journal.add_one(stream=19)
        data += journal("host_function_done", call=function) + journal.read(4, stream=19)
        agent.send(data[:len(data) - 300])
        agent.send(data[len(data) - 300:])
        assert agent.answer(journal.seq)[0] == 0
    assert runtime.order.describe()["stalls"] == 0 and not device.host_gates.held
    link.close()


def test_a_call_that_was_complete_before_the_function_returned_does_not_wait_for_it(device: Any,
                                                                                 journal: Journal) -> None:
    """The program saw that, so the journal says it."""
    runtime, feed = started(device, journal)
    data = journal("host_function", stream=18)
    function = journal.seq
    data += journal.add_one(stream=19) + journal("stream_synchronize", stream=19)
    data += journal("completed", observed=journal.seq - 1) + journal("host_function_done", call=function)
    feed(data + journal.read(4, stream=18))
    assert collect(runtime, {journal.seq})[journal.seq][0] == 0
    assert runtime.order.describe()["stalls"] == 0


def seen(journal: Journal, call: int) -> bytes:
    return journal("completed", observed=call)


def test_in_order_an_observation_is_put_off_until_a_call_that_is_no_work(device: Any, journal: Journal,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay: work follows the call that was seen complete anyway, a change of memory does not."""
    monkeypatch.setattr(ordering, "STALL", 60.0)
    runtime, feed = started(device, journal)
    data = held(journal, 18)
    data += seen(journal, journal.seq) + after(journal, 18, 19) + journal.add_one(stream=19)
    assert not waits(runtime, device, feed, data), "the work behind it is in order without a wait"
    data = held(journal, 18)
    data += seen(journal, journal.seq) + journal("event_destroy", event=20)
    assert waits(runtime, device, feed, data), "what is no work came before the program had seen the call complete"
    feed(journal.read(4))
    assert collect(runtime, {journal.seq})[journal.seq][1] == struct.pack("<I", 1)


def test_an_answer_that_was_seen_is_waited_for(device: Any, journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes memory until then."""
    monkeypatch.setattr(ordering, "STALL", 60.0)
    runtime, feed = started(device, journal)
    data = held(journal, 18) + journal("memcpy_d2h", source=BASE, size=4, stream=18)
    assert waits(runtime, device, feed, data + seen(journal, journal.seq))


def test_what_was_put_off_is_waited_for_where_the_order_ends(device: Any, journal: Journal,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordering, "STALL", 60.0)
    runtime, feed = started(device, journal)
    data = held(journal, 18)
    feed(data + seen(journal, journal.seq))
    assert runtime.applied == journal.seq and not device.is_complete(journal.seq - 1)
    runtime.order.feed(issue_order.Stalled(runtime.applied, "for this test"))
    assert not runtime.order.ordered
    data = journal("memset", destination=BASE, pitch=4, width=1, height=1, element=4, value=1, stream=19)
    assert waits(runtime, device, feed, data), "the program had seen the kernel complete before it"


def function(journal: Journal, stream: int) -> tuple[bytes, int]:
    return journal("host_function", stream=stream), journal.seq


def test_host_functions_that_have_returned_hold_up_no_replay(device: Any, journal: Journal,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """As JAX does: functions on streams of their own, behind events; the host waits for none of them."""
    monkeypatch.setattr(ordering, "STALL", 60.0)
    runtime, feed = started(device, journal)
    feed(journal("stream_create", stream=21, context=16, flags=1, priority=0)
         + journal("event_create", event=22, context=16, flags=2))
    for _ in range(3):
        data = held(journal, 18) + after(journal, 18, 21, 22)
        call, number = function(journal, 21)
        data += call + journal.add_one(stream=18)
        data += seen(journal, number - 1) + journal("host_function_done", call=number) + seen(journal, number)
        data += after(journal, 18, 19) + journal.add_one(stream=19)
        assert not waits(runtime, device, feed, data)
    feed(journal.read(4))
    assert collect(runtime, {journal.seq})[journal.seq][1] == struct.pack("<I", 6)
    assert runtime.order.describe()["stalls"] == 0 and runtime.executor.bugs == 0
    assert not device.host_gates.open


def test_beside_an_open_host_function_an_observation_is_waited_for(device: Any, journal: Journal,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """The function returned because of that call: what stands behind the function may need it."""
    monkeypatch.setattr(ordering, "STALL", 60.0)
    runtime, feed = started(device, journal)
    call, number = function(journal, 18)
    data = call + journal.add_one(stream=18) + held(journal, 19)
    data += seen(journal, journal.seq) + journal("host_function_done", call=number)
    assert waits(runtime, device, feed, data)


def test_slow_work_is_not_taken_for_a_host_function(device: Any, journal: Journal,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """A function is open, and the journal has the waiting call complete before its end; other work is ahead, too."""
    monkeypatch.setattr(ordering, "STALL", 60.0)
    runtime, feed = started(device, journal)
    feed(journal("stream_create", stream=21, context=16, flags=1, priority=0)
         + journal("event_create", event=22, context=16, flags=2))
    data = held(journal, 18) + after(journal, 18, 21, 22)
    call, number = function(journal, 21)
    data += call + journal("memset", destination=BASE, pitch=4, width=1, height=1, element=4, value=7, stream=19)
    last = len(BOUNDARY.findall(data))
    data += seen(journal, journal.seq) + journal("host_function_done", call=number)
    position, thread = runtime.applied, threading.Thread(target=feed, args=(data,))
    thread.start()
    eventually(lambda: runtime.applied == position + last - 1)
    time.sleep(0.3)  # far longer than a call waits where only functions are ahead of it
    assert runtime.applied == position + last - 1, "the memset overtook the kernel"
    device.write(FLAG, b"\1\0\0\0")
    thread.join(10)
    assert device.drain(10)


def test_a_shared_device_is_given_more_than_it_does_in_a_turn(device: Any, journal: Journal) -> None:
    """All calls complete at once, 30 ms after they were given, as where others share it: the bound does not shrink."""
    runtime, feed = started(device, journal, published=0)
    for _ in range(12):
        first, data = runtime.applied, held(journal, 18) + b"".join(journal.add_one(stream=18) for _ in range(300))
        thread = threading.Thread(target=feed, args=(data,))
        thread.start()
        given = -1
        while given != (given := runtime.applied - first):
            time.sleep(0.03)  # the turn: until no more is given
        device.write(FLAG, b"\1\0\0\0")
        thread.join(20)
        assert device.drain(20)
        device.write(FLAG, bytes(4))
    assert given > 100


def test_a_cut_while_a_call_waits_for_its_turn(device: Any, journal: Journal) -> None:
    """It is at that call's boundary, and the call comes behind it."""
    runtime, feed = started(device, journal)
    feed(slow(journal, 18, 300))
    record = journal.add_one(stream=19)
    thread = threading.Thread(target=feed, args=(record,))
    thread.start()
    time.sleep(0.1)
    runtime.quiesce(10, settle=5)
    assert runtime.applied == journal.seq - 1
    runtime.resume()
    thread.join(10)
    assert runtime.applied == journal.seq


def test_the_end_of_a_catch_up(device: Any, journal: Journal) -> None:
    runtime, feed = started(device, journal, published=20)
    order = runtime.order
    while journal.seq < 20:
        order.feed(issue_order.Dry(*runtime.reach()))
        assert order.ordered
        feed(journal.add_one())
    assert device.drain(10)
    order.feed(issue_order.Dry(*runtime.reach()))
    assert order.machine.state is State.LIVE and not order.ordered
    assert device.drain(10)
    feed(race(journal) + journal("context_synchronize", context=16) + journal.read(4))
    assert collect(runtime, {journal.seq})[journal.seq][1] == struct.pack("<I", 8), "live it overlaps"


def test_a_free_behind_the_replay_waits_for_it(device: Any, journal: Journal) -> None:
    """The program's side has looked at the watermark of the worker before (SEMANTICS 21)."""
    runtime, feed = started(device, journal, published=10)
    feed(journal.launch(WAIT_FLAG, struct.pack("<Q", BASE)))
    free = journal("memory_free", address=BASE)
    assert journal.seq == 11 > runtime.gate.replay_until
    thread = threading.Thread(target=feed, args=(free,))
    thread.start()
    time.sleep(0.3)
    assert runtime.applied == 10 and device.engine.contains(BASE, SIZE), "it was freed under a kernel that runs"
    device.write(BASE, b"\1\0\0\0")
    thread.join(10)
    assert runtime.applied == 11 and not device.engine.contains(BASE, 4)


def test_standing_still_is_a_backlog_and_a_busy_program_is_none(device: Any, journal: Journal) -> None:
    runtime, feed = started(device, journal, published=0)
    runtime.quiesce(5)
    time.sleep(0.01)
    runtime.resume()
    assert runtime.order.ordered and runtime.order.describe()["catch_ups"] == 1
    runtime.order.feed(issue_order.Dry(*runtime.reach()))
    runtime.order.distance.told = issue_order.UNBOUNDED
    runtime.stood_still("this worker", 2.0)
    assert not runtime.order.ordered
    runtime.order.distance.told = 3
    runtime.stood_still("this worker", 2.0)
    eventually(lambda: runtime.order.ordered, "a gap is no backlog")



def quick(device: Any, journal: Journal, feed: Any) -> None:
    """Calls so short that many may be under way: the engine goes by how long the last ones took."""
    for _ in range(60):
        follow(device, journal, feed, 32)
    for _ in range(8):  # a busy machine lets the device wait between them
        follow(device, journal, feed, 400)


def follow(device: Any, journal: Journal, feed: Any, calls: int) -> None:
    """Calls of one stream, all complete."""
    feed(b"".join(journal.add_one(stream=18) for _ in range(calls)))
    assert device.drain(10)


@pytest.mark.parametrize(("count", "stream", "waited"), [(100, 19, False), (200, 19, True), (200, 18, False)])
def test_live_a_stream_overtakes_some_calls_of_others_at_most(device: Any, journal: Journal, count: int, stream: int,
                                                              waited: bool) -> None:
    """A copy ahead of a step that is not done; not where there are few of them, and its own stream's do not count."""
    runtime, feed = started(device, journal, 0)

    def waited_now() -> bool:
        quick(device, journal, feed)
        data = held(journal, 18) + b"".join(journal.add_one(stream=18) for _ in range(count))
        return waits(runtime, device, feed, data + journal.add_one(stream=stream))

    # on a busy machine calls take long, and the engine lets few be under way whatever their streams
    assert waited_now() == waited or any(waited_now() == waited for _ in range(4))
    assert runtime.order.describe()["catch_ups"] == 0 and runtime.executor.bugs == 0


def test_live_work_that_waits_for_a_later_call_is_not_waited_for_again_and_again(device: Any, journal: Journal) -> None:
    """Each stall lets streams overtake as they like for longer: for 1024, 2048, 4096 calls."""
    runtime, feed = started(device, journal, 0)

    def stalled() -> bool:
        data = held(journal, 18) + b"".join(journal.add_one(stream=18) for _ in range(150))
        data += journal("memset", destination=FLAG, pitch=4, width=1, height=1, element=4, value=1, stream=19)
        began = time.monotonic()
        feed(data)
        seconds = time.monotonic() - began
        assert device.drain(10)
        device.write(FLAG, bytes(4))
        return seconds > 0.7

    def goes_on_behind(calls: int) -> bool:
        """One of some: on a busy machine the engine lets few be under way, by how long calls took, and a feed may take
        as long. Short calls come before, and a stall of an earlier one, which would loosen the order anew, is over."""
        for seconds in (0, 1, 3):
            time.sleep(seconds)
            follow(device, journal, feed, calls)
            for _ in range(40):
                follow(device, journal, feed, 1)
            if not stalled():
                return True
        return False

    quick(device, journal, feed)
    assert stalled()
    follow(device, journal, feed, 1040)
    assert stalled(), "streams overtake as they like for more than 1,024 calls"
    assert goes_on_behind(1040), "for no more than 1,024 calls again"
    for _ in range(10):
        follow(device, journal, feed, 2000)  # more than three further stalls would allow
    assert stalled()
    assert goes_on_behind(2060), "for no more than 2,048 calls"
    assert runtime.executor.bugs == 0


def test_an_open_host_function_lets_streams_overtake(device: Any, journal: Journal) -> None:
    """What lets its stream go on comes later among the calls."""
    runtime, feed = started(device, journal, 0)

    def waited_beside_one() -> bool:
        quick(device, journal, feed)
        feed(journal("host_function", stream=18))
        function = journal.seq
        began = time.monotonic()
        feed(b"".join(journal.add_one(stream=18) for _ in range(200)) + journal.add_one(stream=19))
        seconds = time.monotonic() - began
        feed(journal("host_function_done", call=function))
        assert device.drain(10)
        return seconds > 0.7

    assert any(not waited_beside_one() for _ in range(4)), "on a busy machine few calls may be under way: some times"
    held_now = held(journal, 18) + b"".join(journal.add_one(stream=18) for _ in range(200))
    assert waits(runtime, device, feed, held_now + journal.add_one(stream=19)), "none is open any more"


def test_a_mirror_is_read_beside_an_open_host_function(device: Any, journal: Journal) -> None:
    """In order as well: the function waits for these bytes, work stands between."""
    runtime, feed = started(device, journal)
    answers: dict[int, tuple[int, bytes]] = {}
    runtime.attach(lambda seq, result, reply, payload: answers.update({seq: (result, bytes(payload))}), EVER)
    feed(journal("host_allocate", address=PINNED_BASE, size=1 << 16, flags=0) + journal("host_function", stream=18))
    function = journal.seq
    began = time.monotonic()
    feed(journal.add_one(stream=19) + journal("host_mirror_read", address=PINNED_BASE, size=64, stream=19))
    eventually(lambda: answers.get(journal.seq) == (0, bytes(64)), lambda: answers, 5, every=0.01)
    assert time.monotonic() - began < 0.5 < ordering.STALL
    feed(journal("host_function_done", call=function))
    assert device.drain(10) and runtime.order.describe()["stalls"] == 0
