"""The chaos' plans, table and programs' catalogue: what needs no pool."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from bench.chaos import catalog, sockets, table
from bench.chaos.disturb import Deed
from bench.chaos.plan import DECK, FIRST, LAST, LASTING, STEPS, InjectedFault, Plan, session_plan
from bench.chaos.running import Running, first_difference
from bench.chaos.session import HUNG, SAME, WRONG, Case

KINDS = [kind.name for kind in catalog.KINDS]
FAULTS = 10
MANY = [session_plan(seed, number, KINDS, FAULTS) for seed in range(4) for number in range(60)]


# -- plans ------------------------------------------------------------------------------------
def test_a_seed_is_a_schedule() -> None:
    assert session_plan(7, 12, KINDS, FAULTS) == session_plan(7, 12, KINDS, FAULTS)
    assert session_plan(7, 12, KINDS, FAULTS) != session_plan(8, 12, KINDS, FAULTS)
    assert session_plan(7, 12, KINDS, FAULTS).faults != session_plan(7, 13, KINDS, FAULTS).faults


def test_a_plan_does_not_depend_on_who_is_asked_for_before() -> None:
    alone = session_plan(3, 41, KINDS, FAULTS)
    assert [session_plan(3, number, KINDS, FAULTS) for number in range(42)][41] == alone


def test_kinds_take_turns_and_no_disturbance_is_left_out() -> None:
    plans = [session_plan(5, number, KINDS, FAULTS) for number in range(2 * len(KINDS))]
    assert set(Counter(plan.kind for plan in plans).values()) == {2}
    dealt = [fault.what for plan in plans for fault in plan.faults]
    whole = len(dealt) // sum(DECK.values())
    for what, count in DECK.items():
        assert whole * count <= dealt.count(what) <= (whole + 1) * count, what


def test_every_plan_has_its_faults_in_their_order() -> None:
    for plan in MANY:
        own = [fault.at for fault in plan.faults if fault.after is None]
        assert len(plan.faults) == FAULTS and plan.faults[0].after is None
        assert own == sorted(own) and FIRST <= own[0] and own[-1] <= LAST


def test_what_comes_during_another_follows_one_that_lasts() -> None:
    during = together = 0
    for plan in MANY:
        for before, fault in zip(plan.faults, plan.faults[1:], strict=False):
            if fault.after:
                during += 1
                assert before.what in LASTING and fault.at == before.at, plan
            elif fault.after == 0.0:
                together += 1
    assert during > len(MANY) and together > len(MANY) / 4, (during, together)


def test_no_worker_is_killed_three_times_in_one_place() -> None:
    """By rule such a session is given up: docs/developers/ownership.md, "Losses"."""
    for plan in MANY:
        kills = 0
        for fault in plan.faults:
            kills = (kills if fault.after is not None else 0) + (fault.what == "kill worker")
            assert kills <= 2, plan


def test_what_cannot_be_done_here_is_not_planned() -> None:
    can = [what for what in DECK if what != "full store"]
    assert all(fault.what in can for number in range(40) for fault in session_plan(1, number, KINDS, FAULTS,
                                                                                   can).faults)


def test_the_leader_dies_at_every_step() -> None:
    steps = {fault.step.partition(", ")[0] for plan in MANY for fault in plan.faults if fault.step}
    assert steps == set(STEPS)


# -- verdicts ---------------------------------------------------------------------------------
def case(verdict: str, kind: str = "prefetch", number: int = 4) -> Case:
    found = Case(Plan(9, number, kind, ()), verdict, "differs from step 30", 2.5, 31, 60.0)
    found.deeds = [Deed(InjectedFault("kill worker", 0.2), 20, 3.0, "done"),
                   Deed(InjectedFault("move by copy", 0.2, 0.4), 21, 3.4, "broken: unknown_outcome: no answer"),
                   Deed(InjectedFault("checkpoint", 0.5), 50, 9.0, "refused: refused: not now"),
                   Deed(InjectedFault("cut link", 0.9), 90, 12.0, "missed: the program was over")]
    return found


def test_the_table_counts_what_was_done() -> None:
    cases = [case(SAME), case(WRONG, "jax"), case(HUNG, "jax", 5)]
    lines = {line.split()[0]: line.split() for line in table.kinds(cases)[1:]}
    assert lines["prefetch"][1:8] == ["1", "1", "0", "0", "0", "0", "2"]
    assert lines["jax"][1:8] == ["2", "0", "1", "0", "1", "0", "4"]
    assert lines["all"][1:8] == ["3", "1", "1", "0", "1", "0", "6"]
    done = {line[:24].strip(): line[24:].split() for line in table.disturbances(cases)[1:]}
    assert done["kill worker"] == ["3", "3", "0", "0", "0", "0"]
    assert done["move by copy"] == ["3", "3", "3", "3", "0", "0"]
    assert done["all"] == ["12", "6", "3", "3", "3", "3"]
    assert table.as_json(cases, {}, {})["verdicts"] == {"same": 1, "WRONG": 1, "LOST": 0, "HUNG": 1, "LATE": 0}


def test_a_failure_says_how_to_repeat_it() -> None:
    text = table.text([case(SAME), case(WRONG, "jax", 17)], {"numba": "no such module"}, {"date": "today"}, "chaos -x")
    assert "WRONG: jax, session 17 of seed 9: differs from step 30" in text
    assert "repeat: chaos -x --seed 9 --session 17" in text and "not run: numba: no such module" in text
    assert "session 4 of seed 9" not in text


def test_the_first_difference_is_where_both_looked() -> None:
    assert first_difference(["", "a", "", "b"], ["", "a", "c", "d"]) == 3
    assert first_difference(["", "a"], ["", "a", "b"]) is None


# -- programs -----------------------------------------------------------------------------------
def test_there_are_enough_kinds_and_each_has_its_program() -> None:
    assert len(catalog.chosen("cuda:0")) >= 10 and len(catalog.chosen("cpu")) >= 6
    assert all((catalog.PROGRAMS / kind.program).is_file() for kind in catalog.KINDS)
    with pytest.raises(ValueError, match="no such kind: cobol"):
        catalog.chosen("cpu", ["cobol"])


PROGRAM = """
import sys, time
sys.path.insert(0, {programs!r})
from common import Steps, last_of_burst, skip
if "skip" in sys.argv:
    skip("nothing here")
steps = Steps()
for number in steps:
    if last_of_burst(number):
        steps.saw(number * 7)
    if number == 25 and "slow" in sys.argv:
        time.sleep(1.5)
steps.end(b"end")
"""


def run(tmp_path: Path, *words: str) -> tuple[Running, int | None]:
    source = PROGRAM.format(programs=str(catalog.PROGRAMS))
    program = Running([sys.executable, "-c", source, *words], os.environ, tmp_path / "-".join(words))
    return program, program.wait(60)


def test_pace_changes_nothing_that_is_computed(tmp_path: Path) -> None:
    fast, code = run(tmp_path, "40", "0")
    slow, other = run(tmp_path, "40", "1", "slow")
    assert code == other == 0 and fast.digest == slow.digest and fast.marks == slow.marks
    assert len(fast.marks) == 40 and [bool(mark) for mark in fast.marks].count(True) == 4
    assert slow.gap >= 1.4 and slow.gap_step == 25, (slow.gap, slow.gap_step)
    assert slow.last - slow.began >= 2.0


def test_a_program_says_what_it_lacks(tmp_path: Path) -> None:
    program, code = run(tmp_path, "40", "0", "skip")
    assert code == 77 and program.skip == "nothing here" and not program.digest


def test_a_program_that_stands_still_is_ended(tmp_path: Path) -> None:
    source = "import time; print('step 0', flush=True); time.sleep(600)"
    program = Running([sys.executable, "-c", source], os.environ, tmp_path / "still")
    while not program.marks:
        time.sleep(0.01)
    os.kill(program.process.pid, signal.SIGSTOP)
    program.end()
    assert not program.alive


# -- cutting --------------------------------------------------------------------------------------
@pytest.mark.skipif(bool(sockets.unavailable()), reason=f"connections cannot be cut here: {sockets.unavailable()}")
def test_a_connection_of_another_process_is_cut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        text = ("import socket, sys\nlink = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
                "print('there', flush=True)\nprint(len(link.recv(1)), flush=True)")
        child = subprocess.Popen([sys.executable, "-c", text, str(listener.getsockname()[1])], stdout=subprocess.PIPE,
                                 text=True)
        with child:
            near, _ = listener.accept()
            assert child.stdout is not None and child.stdout.readline() == "there\n"
            assert sockets.cut(child.pid) == 1
            assert child.stdout.readline() == "0\n" and near.recv(1) == b""
            near.close()


def test_half_of_the_killed_daemons_come_back_on_other_ports() -> None:
    killed = [fault for plan in MANY for fault in plan.faults if fault.what == "kill daemon"]
    assert 0.3 < sum(fault.elsewhere for fault in killed) / len(killed) < 0.7
    assert not any(fault.elsewhere for plan in MANY for fault in plan.faults if fault.what != "kill daemon")
