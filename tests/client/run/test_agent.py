"""The agent end to end: Python in the place of shim and worker, everything between them real."""

from __future__ import annotations

import os
import random
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rgpu.client.run import known_nodes
from rgpu.client.run.agent import Agent, Options
from rgpu.client.session import shipper
from rgpu.link.messages.shim import JOURNAL_FULL, RUNNING, UNPROTECTED
from rgpu.session.calls import decoders
from rgpu.session.facts import SessionFacts
from rgpu.session.objects import module_table
from tests.support.agent.fake_pool import FakePool, FakeWorker, answer_of
from tests.support.agent.fake_shim import FakeShim
from tests.support.agent.running import SYNC, busy, start
from tests.support.eventually import eventually


def check_applied(shim: FakeShim, worker: FakeWorker) -> None:
    assert sorted(worker.records) == list(range(worker.first, shim.journal.seq + 1))
    for seq, record in worker.records.items():
        wire = shim.journal.wire[seq - 1]
        assert bytes(record.payload) in wire and bytes(record.args) in wire


def answered_once(shim: FakeShim, awaited: list[int]) -> None:
    assert sorted(seq for seq, *_ in shim.answers) == sorted(awaited)
    for seq, result, reply, _ in shim.answers:
        assert result == 0 and struct.unpack_from("<Q", reply)[0] == seq


def test_a_session_from_hello_to_goodbye(pool: FakePool, agent: Agent, complaints: list[str]) -> None:
    directory = agent.socket_path.parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    shim = start(agent)
    facts = SessionFacts.decode(shim.welcome)
    assert (facts.name, facts.number, facts.journal_limit, facts.recover) == ("heat", 1, 4 << 20, True)
    created = pool.said("session.create")[0]
    assert created["memory"] == 1 << 20 and created["program"]["pid"] == os.getpid()
    awaited = busy(shim, 200)
    shim.wait(lambda: len(shim.answers) >= len(awaited))
    worker = pool.sessions["heat"]
    eventually(lambda: worker.applied == shim.journal.seq)
    check_applied(shim, worker)
    answered_once(shim, awaited)
    shim.wait(lambda: shim.watermarks and shim.watermarks[-1] == shim.journal.seq)
    eventually(lambda: worker.stats.get("calls") == 200)
    assert worker.stats["awaited_calls"] == len(awaited) and worker.stats["pid"] == os.getpid()
    assert worker.stats["bytes"] == sum(map(len, shim.journal.wire))
    shim.goodbye()
    eventually(lambda: pool.said("session.end"))
    assert pool.said("session.end")[0]["session"] == "heat"
    eventually(lambda: worker.byes)
    assert complaints == []
    agent.close()
    assert not directory.exists()


def test_calls_just_before_the_end_are_counted(pool: FakePool, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that waits for nothing may have ended before the agent looks for calls again."""
    monkeypatch.setattr(shipper.Shipper, "take_calls", lambda self: False)
    shim = start(agent)
    awaited = busy(shim, 200)
    shim.goodbye()
    eventually(lambda: pool.said("session.end"))
    figures = pool.said("session.end")[0]["statistics"]
    assert (figures["calls"], figures["awaited_calls"]) == (200, len(awaited))
    assert figures["bytes"] == sum(map(len, shim.journal.wire))


def test_the_link_drops_and_calls_go_on(pool: FakePool, agent: Agent) -> None:
    shim = start(agent)
    awaited: list[int] = []
    worker = pool.sessions["heat"]
    for number in range(6):
        awaited += busy(shim, 60, number)
        eventually(lambda number=number: worker.attached > number)  # type: ignore[misc]
        worker.drop()
    shim.wait(lambda: len(shim.answers) >= len(awaited))
    eventually(lambda: worker.applied == shim.journal.seq)
    check_applied(shim, worker)
    eventually(lambda: worker.attached == 7)
    time.sleep(0.2)
    answered_once(shim, awaited)
    assert worker.attached == 7


def test_a_worker_dies_and_its_successor_gets_everything_again(pool: FakePool, agent: Agent) -> None:
    shim = start(agent)
    first = pool.sessions["heat"]
    awaited = busy(shim, 300)
    shim.wait(lambda: len(shim.answers) > len(awaited) // 2)
    first.kill()
    awaited += busy(shim, 100, 1)
    second = pool.sessions["heat"] = FakeWorker(pool, 2)
    shim.wait(lambda: len(shim.answers) >= len(awaited))
    eventually(lambda: second.applied == shim.journal.seq)
    check_applied(shim, second)
    time.sleep(0.2)
    answered_once(shim, awaited)
    assert agent.statistics()["heat"]["divergences"] == 0


def test_a_parked_session_goes_on_when_it_is_back(pool: FakePool, agent: Agent, complaints: list[str]) -> None:
    """Its worker says goodbye, nobody owns it for a while, then somebody does at the next epoch."""
    shim = start(agent)
    first = pool.sessions["heat"]
    awaited = busy(shim, 200)
    shim.wait(lambda: len(shim.answers) > len(awaited) // 2)
    pool.parked.add("heat")
    first.notice("moved", reason="moved")
    first.kill()
    awaited += busy(shim, 50, 1)
    time.sleep(0.5)
    assert shim.eof is False and complaints == []
    second = pool.sessions["heat"] = FakeWorker(pool, 2)
    pool.parked.clear()
    shim.wait(lambda: len(shim.answers) >= len(awaited))
    eventually(lambda: second.applied == shim.journal.seq)
    check_applied(shim, second)
    answered_once(shim, awaited)


@pytest.fixture
def patient(pool: FakePool, complaints: list[str], tmp_path: Path) -> Iterator[Agent]:
    """The agent of a program that waits for its place."""
    agent = Agent(Options("heat", extra={"queue": True}), pool.user, pool.endpoints, complain=complaints.append)
    agent.start()
    yield agent
    agent.close()


def test_a_process_waits_for_its_place(pool: FakePool, patient: Agent, complaints: list[str]) -> None:
    pool.line = ["low waits before it", "80 MiB fits nowhere", "80 MiB fits nowhere"]
    threading.Thread(target=lambda: (eventually(lambda: len(complaints) == 2), pool.line.clear())).start()
    shim = start(patient)
    assert SessionFacts.decode(shim.welcome).name == "heat"
    assert complaints == ["rgpu: heat waits at position 1 of 1: low waits before it",
                          "rgpu: heat waits at position 1 of 1: 80 MiB fits nowhere"]
    awaited = busy(shim, 50)
    shim.wait(lambda: len(shim.answers) >= len(awaited))
    assert pool.said("session.withdraw") == []


@pytest.mark.parametrize("how", ["interrupted", "the program ended"])
def test_whoever_waits_no_more_says_so(pool: FakePool, patient: Agent, complaints: list[str], how: str) -> None:
    pool.line = ["full"]
    shim = FakeShim(str(patient.socket_path))
    end = patient.interrupted if how == "interrupted" else shim.sock.close
    done = threading.Thread(target=lambda: (eventually(lambda: complaints), end()))
    done.start()
    if how == "interrupted":
        shim.hello()
        assert "interrupted" in str(shim.refused)
    else:
        with pytest.raises((OSError, ValueError, AssertionError)):
            shim.hello()
    done.join()
    eventually(lambda: pool.said("session.withdraw"))
    (said,) = pool.said("session.withdraw")
    assert said["session"] == "heat" and said["program"]["pid"] == os.getpid() and how in said["reason"]
    pool.line = []
    if how == "interrupted":
        start(patient).goodbye()  # a later one is not meant


def test_divergence_is_reported_and_not_delivered(pool: FakePool, agent: Agent) -> None:
    shim = start(agent)
    seq = shim.call(SYNC, bytes(8), awaited=True)
    shim.wait(lambda: shim.answers)
    pool.sessions["heat"].kill()
    successor = FakeWorker(pool, 2)
    successor.lie = struct.pack("<Q", seq) + b"another answer"
    pool.sessions["heat"] = successor
    eventually(lambda: agent.statistics()["heat"]["divergences"] == 1)
    successor.lie = None
    second = shim.call(SYNC, bytes(8), awaited=True)
    shim.wait(lambda: len(shim.answers) == 2)
    answered_once(shim, [seq, second])


def test_a_move_ships_only_what_the_new_owner_lacks(pool: FakePool, agent: Agent) -> None:
    shim = start(agent)
    old = pool.sessions["heat"]
    awaited = busy(shim, 100)
    shim.wait(lambda: len(shim.answers) >= len(awaited))
    eventually(lambda: old.applied == shim.journal.seq)
    pool.sessions["heat"] = new = FakeWorker(pool, 2, applied=old.applied)
    old.notice("moved")
    awaited += busy(shim, 50, 5)
    shim.wait(lambda: len(shim.answers) >= len(awaited))
    eventually(lambda: new.applied == shim.journal.seq)
    assert new.first == 101
    check_applied(shim, new)
    answered_once(shim, awaited)


def test_an_owner_of_the_past_is_not_attached_to(pool: FakePool, agent: Agent) -> None:
    shim = start(agent)
    old = pool.sessions["heat"]
    shim.call(SYNC, bytes(8), awaited=True)
    shim.wait(lambda: shim.answers)
    pool.sessions["heat"] = new = FakeWorker(pool, 3)
    old.notice("moved")
    eventually(lambda: new.attached)
    attached = old.attached
    pool.sessions["heat"] = old  # a node that did not hear of it
    new.drop()
    time.sleep(0.6)
    assert old.attached == attached
    pool.sessions["heat"] = new
    second = shim.call(SYNC, bytes(8), awaited=True)
    shim.wait(lambda: len(shim.answers) == 2)
    assert {seq for seq, *_ in shim.answers} == {1, second}


def test_a_frozen_owner_is_left_when_the_pool_names_another(pool: FakePool, agent: Agent,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipper, "SILENCE_ASK", 0.3)
    shim = start(agent)
    old = pool.sessions["heat"]
    shim.call(SYNC, bytes(8), awaited=True)
    shim.wait(lambda: shim.answers)
    old.mute = True
    shim.call(SYNC, bytes(8), awaited=True)
    eventually(lambda: old.applied == 2)
    pool.sessions["heat"] = FakeWorker(pool, 2)
    shim.wait(lambda: len(shim.answers) == 2)
    answered_once(shim, [1, 2])


def test_a_silent_link_is_opened_anew_and_an_unreachable_owner_reported(
        pool: FakePool, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    from rgpu.client.session import attachment

    monkeypatch.setattr(shipper, "SILENCE_LIMIT", 0.5)
    monkeypatch.setattr(attachment, "UNREACHABLE_SECONDS", 0.5)
    shim = start(agent)
    worker = pool.sessions["heat"]
    worker.mute = True
    shim.call(SYNC, bytes(8), awaited=True)
    eventually(lambda: worker.attached > 1)
    worker.unlisten()
    worker.drop()
    eventually(lambda: pool.said("session.unreachable"))
    report = pool.said("session.unreachable")[0]
    assert report["host"] == "a" and report["epoch"] == 1 and report["seconds"] >= 0.5


def test_silence_counts_when_every_call_is_known_to_be_applied(pool: FakePool, agent: Agent,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """The program waits for an answer, and no ping is outstanding."""
    monkeypatch.setattr(shipper, "SILENCE_LIMIT", 1.0)
    shim = start(agent)
    worker = pool.sessions["heat"]
    worker.withholds = True
    shim.call(SYNC, bytes(8), awaited=True)
    eventually(lambda: agent._shippers["heat"].shipping.acknowledged == 1)
    shim.wait(lambda: shim.answers)
    assert worker.attached > 1
    answered_once(shim, [1])


def test_the_journal_is_cut_only_by_notices_of_this_epoch(pool: FakePool, agent: Agent) -> None:
    shim = start(agent)
    worker = pool.sessions["heat"]
    busy(shim, 400)
    eventually(lambda: worker.applied == 400)
    worker.notice("cut", epoch=0, position=400, image="x")
    worker.notice("cut", epoch=7, position=400, image="x")
    time.sleep(0.1)
    assert agent._shippers["heat"].journal.first_seq == 1
    worker.notice("cut", position=300, image="x")
    eventually(lambda: agent._shippers["heat"].journal.first_seq > 1)
    assert agent._shippers["heat"].journal.first_seq <= 301
    shim.wait(lambda: shim.released)
    worker.kill()
    successor = pool.sessions["heat"] = FakeWorker(pool, 2, applied=300)
    eventually(lambda: successor.applied == 400)
    check_applied(shim, successor)


@pytest.mark.parametrize("functions", [1, 4000])  # of one piece, and of several
def test_whoever_replays_a_load_is_told_where_its_variables_stood(pool: FakePool, agent: Agent, functions: int) -> None:
    """A device that holds less than the first worker's can put them there only if it knows."""
    shim = start(agent)
    worker = pool.sessions["heat"]
    table = module_table.ModuleTable(
        (module_table.FunctionInfo("f", (), (0,) * module_table.ATTRIBUTES),) * functions,
        (module_table.GlobalVariable("constants", 0x7FFD00200000, 112),))
    worker.lie = decoders.encode_reply("module_load", table=module_table.encode(table), log=b"")
    first, second = (shim.call("module_load", decoders.encode_args(
        "module_load", module=module, context=16, library=0, options=b""), b"binary", awaited=True)
        for module in (31, 32))
    shim.wait(lambda: len(shim.answers) == 2)
    worker.kill()
    successor = pool.sessions["heat"] = FakeWorker(pool, 2)
    places = [["constants", 0x7FFD00200000, 112]]
    eventually(lambda: successor.placed == [[[second, places], [first, places]]])
    successor.lie = worker.lie
    eventually(lambda: successor.applied == second)
    successor.notice("cut", position=first, image="x")
    eventually(lambda: agent._shippers["heat"].deliveries.placements.as_rows() == [(second, [tuple(places[0])])])


def test_a_journal_that_does_not_reach_back_ends_the_session(pool: FakePool, agent: Agent,
                                                             complaints: list[str]) -> None:
    shim = start(agent)
    worker = pool.sessions["heat"]
    busy(shim, 300)
    eventually(lambda: worker.applied == 300)
    worker.notice("cut", position=300)
    eventually(lambda: agent._shippers["heat"].journal.first_seq > 1)
    worker.kill()
    pool.sessions["heat"] = FakeWorker(pool, 2)
    shim.wait(lambda: shim.eof)
    eventually(lambda: complaints)
    assert "cannot be continued" in complaints[0]


def test_without_recovery_memory_goes_back_as_calls_are_applied(pool: FakePool, agent: Agent) -> None:
    pool.recover = False
    shim = start(agent, log_size=1 << 15)
    for number in range(8):
        busy(shim, 150, number)
    shim.wait(lambda: len(shim.released) > 10)
    worker = pool.sessions["heat"]
    eventually(lambda: worker.applied == shim.journal.seq)
    check_applied(shim, worker)


def test_spilling_and_shipping_again_from_files(pool: FakePool, agent: Agent, tmp_path: Path) -> None:
    shim = start(agent, log_size=1 << 16)
    worker = pool.sessions["heat"]
    for number in range(6):
        busy(shim, 150, number)
    awaited = [seq for seq, record in enumerate(shim.journal.wire, 1) if record[6] & 2]
    shim.wait(lambda: len(shim.answers) >= len(awaited))
    spilled = tmp_path / "journal" / "heat"
    eventually(lambda: list(spilled.glob("*.rgpuj")))
    shim.wait(lambda: shim.released)
    eventually(lambda: pool.said("session.checkpoint"))
    worker.kill()
    successor = pool.sessions["heat"] = FakeWorker(pool, 2)
    eventually(lambda: successor.applied == shim.journal.seq)
    check_applied(shim, successor)
    answered_once(shim, awaited)
    shim.goodbye()
    eventually(lambda: not list(spilled.glob("*.rgpuj")))


@pytest.mark.parametrize(("on_full", "state"), [("block", JOURNAL_FULL), ("unprotected", UNPROTECTED)])
def test_a_full_journal_follows_the_policy(pool: FakePool, on_full: str, state: int) -> None:
    agent = Agent(Options("heat", journal_limit=1 << 20, on_full=on_full), pool.user, pool.endpoints)
    agent.start()
    try:
        shim = start(agent, log_size=1 << 16)
        worker = pool.sessions["heat"]
        busy(shim, 300)
        shim.wait(lambda: shim.states)
        assert shim.states == [state]
        eventually(lambda: worker.stats.get("blocked_reason"))
        if on_full == "unprotected":
            shim.wait(lambda: shim.released)
        else:
            assert not shim.released
            eventually(lambda: worker.applied == shim.journal.seq)
            worker.notice("cut", position=worker.applied)
            shim.wait(lambda: shim.released and shim.states == [JOURNAL_FULL, RUNNING])
    finally:
        agent.close()


def test_a_large_answer_arrives_whole_and_once(pool: FakePool, agent: Agent) -> None:
    shim = start(agent)
    worker = pool.sessions["heat"]
    worker.big = random.Random(3).randbytes(3_000_000)
    seq = shim.call("memcpy_d2h", bytes(24), awaited=True)
    eventually(lambda: worker.applied == 1)
    worker.drop()
    shim.wait(lambda: shim.answers)
    time.sleep(0.3)
    poll = select.poll()  # not select(): a process of many tests has descriptors above 1023
    poll.register(shim.sock, select.POLLIN)
    while poll.poll(0):
        shim._receive()
    assert [(answer[0], answer[3]) for answer in shim.answers] == [(seq, worker.big)]


def test_an_ended_session_ends_the_programs_calls(pool: FakePool, agent: Agent, complaints: list[str]) -> None:
    shim = start(agent)
    shim.call(SYNC, bytes(8), awaited=True)
    shim.wait(lambda: shim.answers)
    pool.gone.add("heat")
    pool.sessions["heat"].kill()
    shim.wait(lambda: shim.eof)
    eventually(lambda: complaints)
    assert "it was killed" in complaints[0] and not pool.said("session.end")


def test_several_processes_get_sessions_of_their_own(pool: FakePool, agent: Agent) -> None:
    shims = [start(agent) for _ in range(3)]
    assert sorted(pool.sessions) == ["heat", "heat/2", "heat/3"]
    for shim in shims:
        seq = shim.call(SYNC, bytes(8), awaited=True)
        shim.wait(lambda shim=shim: shim.answers)  # type: ignore[misc]
        answered_once(shim, [seq])
    shims[1].close()  # a process that just goes
    eventually(lambda: [end["session"] for end in pool.said("session.end")] == ["heat/2"])
    shims[0].call(SYNC, bytes(8), awaited=True)
    shims[0].wait(lambda: len(shims[0].answers) == 2)


def test_a_refused_session(pool: FakePool, agent: Agent, complaints: list[str]) -> None:
    pool.sessions["heat"] = FakeWorker(pool, 1)
    shim = FakeShim(str(agent.socket_path))
    shim.hello()
    assert "session heat is there" in shim.refused
    assert complaints and "heat is there" in complaints[0]


@pytest.mark.parametrize("data", [b"", b"\xff" * 100, struct.pack("<II", 4, 3) + bytes(4),
                                  struct.pack("<II", 40, 1) + bytes(40), struct.pack("<II", 70_000, 1)])
def test_rubbish_on_the_socket_is_one_connections_trouble(pool: FakePool, agent: Agent, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(agent.socket_path))
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass
    shim = start(agent)
    shim.call(SYNC, bytes(8), awaited=True)
    shim.wait(lambda: shim.answers)


def test_a_hostile_journal_ends_its_own_session_only(pool: FakePool, agent: Agent, complaints: list[str]) -> None:
    good, bad = start(agent), start(agent)
    bad.call(SYNC, bytes(8))
    assert bad.journal.log is not None
    bad.journal.log.set(24, 1 << 40)
    bad.wake()
    bad.wait(lambda: bad.eof)
    eventually(lambda: complaints)
    assert "heat/2" in complaints[0]
    seq = good.call(SYNC, bytes(8), awaited=True)
    good.wait(lambda: good.answers)
    answered_once(good, [seq])
    assert [end["session"] for end in pool.said("session.end")] == ["heat/2"]


def test_a_ticket_that_runs_out_is_renewed(pool: FakePool, agent: Agent) -> None:
    pool.lifetime = 5.0
    shim = start(agent)
    eventually(lambda: agent._shippers["heat"].grant.expires > time.time() + 1000)
    pool.sessions["heat"].drop()
    shim.call(SYNC, bytes(8), awaited=True)
    shim.wait(lambda: shim.answers)


def test_an_awaited_call_is_quick(pool: FakePool, agent: Agent) -> None:
    """No polling sleeps on the way: the median of 200 is far below the 50 ms of the agent's sleep."""
    shim = start(agent)
    for _ in range(20):
        shim.call(SYNC, bytes(8), awaited=True)
    shim.wait(lambda: len(shim.answers) == 20)
    times = []
    for number in range(200):
        if number % 20 == 0:
            time.sleep(0.01)
        started = time.perf_counter()
        shim.call(SYNC, bytes(8), awaited=True)
        shim.wait(lambda number=number: len(shim.answers) > 20 + number)  # type: ignore[misc]
        times.append(time.perf_counter() - started)
    quick = sorted(times)[50]  # the lower quartile: a busy machine makes the others late, a polling sleep all of them
    print(f"awaited call, lower quartile: {quick * 1e6:.0f} us")
    assert quick < 0.010


def test_the_answer_is_what_workers_say() -> None:
    from rgpu.session.journal.record import Record

    assert answer_of(Record(3, 26, b"")) == struct.pack("<QI", 3, 26)


def test_a_pool_at_other_ports_is_found_by_its_description(pool: FakePool, complaints: list[str]) -> None:
    """The agent is not attached, and knows no address at which anybody listens."""
    agent = Agent(Options("heat", memory=1 << 20), pool.user, pool.endpoints, complain=complaints.append,
                  described=lambda: pool.files.read_description().endpoints)
    agent.start()
    try:
        shim = start(agent)
        awaited = busy(shim, 40)
        shim.wait(lambda: len(shim.answers) >= len(awaited))
        pool.move()
        pool.sessions["heat"].kill()
        second = pool.sessions["heat"] = FakeWorker(pool, 2)
        awaited += busy(shim, 40, 1)
        shim.wait(lambda: len(shim.answers) >= len(awaited))
        eventually(lambda: second.applied == shim.journal.seq)
        answered_once(shim, awaited)
        shim.goodbye()
        eventually(lambda: pool.said("session.end"))
    finally:
        agent.close()
    assert complaints == []


def test_an_untroubled_session_asks_now_and_then_who_the_nodes_are(
        pool: FakePool, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_nodes, "REFRESH_SECONDS", 0.5)
    shim = start(agent)
    pool.move(before=lambda: eventually(lambda: agent.requests.nodes.endpoints[0] == pool.endpoints[0]))
    pool.sessions["heat"].kill()
    second = pool.sessions["heat"] = FakeWorker(pool, 2)
    awaited = busy(shim, 40)
    shim.wait(lambda: len(shim.answers) >= len(awaited))
    assert second.attached == 1


def test_the_worker_tells_where_its_node_answers(pool: FakePool, agent: Agent) -> None:
    shim = start(agent)
    first = pool.sessions["heat"]
    eventually(lambda: first.attached)
    first.notice("control", address="tcp://127.0.0.1:1", public="x" * 40)  # of a node that nobody knows
    pool.move()
    first.notice("control", address=pool.endpoints[0].address, public=pool.endpoints[0].public)
    eventually(lambda: agent.requests.nodes.endpoints == pool.endpoints)
    first.kill()
    pool.sessions["heat"] = FakeWorker(pool, 2)
    awaited = busy(shim, 40)
    shim.wait(lambda: len(shim.answers) >= len(awaited))
