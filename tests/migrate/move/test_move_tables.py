"""The tables of a move are what its shells do: a method for each command, no decision beside them, diagrams in step."""

from __future__ import annotations

import ast
import inspect
from dataclasses import replace
from typing import Any

import pytest

from rgpu.migrate.leader.moving.mover import Mover
from rgpu.migrate.move import coordinator, destination, diagram, forecast, source
from rgpu.migrate.move.forecast import Measured
from rgpu.migrate.move.machine import Event, Machine
from rgpu.migrate.move.options import MoveOptions
from rgpu.migrate.move.sampling import Sampled
from rgpu.migrate.move.source import SOURCE, Compared, Round, Shipped, SourceRole, role_for
from rgpu.server.worker.move.arrival import Arrival
from rgpu.server.worker.move.departure import Departure

SHELLS: list[tuple[type, Machine[Any]]] = [
    (Departure, SOURCE), (Arrival, destination.DESTINATION), (Mover, coordinator.COORDINATOR)]
#: They say how it ended to whoever asked, in the words that this one knows.
TELL = frozenset({"do_report_failed"})


@pytest.mark.parametrize(("shell", "machine"), SHELLS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_shell_has_one_method_for_each_command(shell: type, machine: Machine[Any]) -> None:
    methods = {name.removeprefix("do_") for name in dir(shell) if name.startswith("do_")}
    assert methods == machine.commands


@pytest.mark.parametrize(("shell", "machine"), SHELLS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_shell_decides_nothing(shell: type, machine: Machine[Any]) -> None:
    """No branch of a command's method looks at the role or at what was wished for, and no method changes the role."""
    tree = ast.parse(inspect.getsource(inspect.getmodule(shell)))  # type: ignore[arg-type]
    (body,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == shell.__name__)
    methods = [node for node in body.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for method in methods:
        for node in ast.walk(method):
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if method.name not in ("__init__", "run"):
                    assert not any(isinstance(found, ast.Attribute) and found.attr == "role" for found in targets), \
                        f"{method.name} changes the role"
            if method.name.startswith("do_") and method.name not in TELL \
                    and isinstance(node, ast.If | ast.IfExp | ast.While | ast.Match | ast.comprehension):
                tests = node.ifs if isinstance(node, ast.comprehension) else [
                    node.subject if isinstance(node, ast.Match) else node.test]
                looked_at = {found.attr for test in tests for found in ast.walk(test)
                             if isinstance(found, ast.Attribute)}
                assert not looked_at & {"role", "options"}, f"{method.name} decides at line {node.lineno}"


@pytest.mark.parametrize(("shell", "machine"), SHELLS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_table_is_whole(shell: type, machine: Machine[Any]) -> None:
    """Every state is led to, a guard's row is followed by others, and each guard is used."""
    assert {row.state for row in machine.rows} - {"idle"} <= {row.next for row in machine.rows}
    assert {row.guard for row in machine.rows} - {""} == set(machine.guards)
    seen: dict[tuple[str, str], bool] = {}
    for row in machine.rows:
        assert not seen.get((row.state, row.event)), f"{row} is behind one that always fits"
        seen[row.state, row.event] = not row.guard
        assert row.reason, row


def test_the_diagrams_are_of_these_tables() -> None:
    assert diagram.main(["--check"]) == 0, "run python -m rgpu.migrate.move.diagram"


# -- decisions by figures ----------------------------------------------------------------------

SECOND = 10_000 * forecast.PAGE_BYTES  #: bytes/s at which 10,000 pages take a second


def after(role: SourceRole, state: str, kind: str, found: Any = None, now: float = 1.0) -> SourceRole:
    step = SOURCE.step(replace(role, state=state), Event(kind, now, found=found))
    assert not step.stale
    return step.role


def test_rounds_end_when_they_gain_nothing() -> None:
    role = role_for(MoveOptions(mode="copy", max_downtime=5.0))
    role = after(role, "copying", "round_done", Round(100_000, sent=100_000 << 16, seconds=10.0))
    assert (role.state, role.rounds, role.speed) == ("copying", 1, 100_000 * 65536 / 10)
    role = after(role, "copying", "round_done", Round(50_000))
    assert role.state == "copying" and role.expected is not None and role.expected.downtime == pytest.approx(5.0)
    slower = after(role, "copying", "round_done", Round(45_000))
    assert slower.state == "pausing" and "gain nothing" in slower.reason
    assert after(role, "copying", "round_done", Round(64)).state == "pausing"
    for _ in range(4):
        role = after(role, "copying", "round_done", Round(int(role.pages * 0.5)))
    assert role.state == "pausing" and "after 6 rounds" in role.reason


def test_a_stop_that_would_be_too_long_does_not_begin() -> None:
    role = role_for(MoveOptions(mode="copy", max_downtime=0.5))
    role = after(role, "copying", "round_done", Round(20_000, sent=20_000 << 16, seconds=2.0))
    ended = after(role, "copying", "round_done", Round(19_000))
    assert ended.state == "running" and "1.90 s, more than the 0.50 s allowed" in ended.reason
    patient = role_for(MoveOptions(mode="copy", max_downtime=0.5, on_timeout="freeze"))
    patient = after(patient, "copying", "round_done", Round(20_000, sent=20_000 << 16, seconds=2.0))
    assert after(patient, "copying", "round_done", Round(19_000)).state == "pausing"


def test_auto_chooses_and_says_why() -> None:
    busy = Measured(pages=100_000, differing=20_000, changed=((0.1, 15_000),), speed=SECOND, free_pages=100_000)
    role = after(SourceRole(options=MoveOptions(max_downtime=0.5), rounds=1), "choosing", "measured", busy)
    assert (role.state, role.mode) == ("tapping", "replay") and "only the replay keeps" in role.reason
    stuck = after(SourceRole(options=MoveOptions(max_downtime=0.5), rounds=1), "choosing", "measured",
                  replace(busy, replay_refused="pinned memory"))
    assert stuck.state == "running" and "cannot be kept" in stuck.reason and "pinned memory" in stuck.reason
    asked = after(role_for(MoveOptions(mode="replay", max_downtime=0.5)), "choosing", "measured", busy)
    assert (asked.state, asked.why) == ("tapping", "replay was asked for")


def test_a_replay_is_followed_until_it_is_close_and_was_sampled() -> None:
    measured = Measured(pages=1000, differing=100, changed=((0.1, 10),), speed=SECOND, free_pages=1000)
    role = SourceRole(options=MoveOptions(mode="replay", max_downtime=2.0), mode="replay", measured=measured, heard=1.0,
                      better_at=1.0, began=1.0)

    def shipped(now: float, **values: Any) -> SourceRole:
        return after(role, "replaying", "shipped", Shipped(**{"heard": now, **values}), now)

    good, bad = Sampled(500, 0, 1000), Sampled(500, 450, 10**7)
    assert shipped(1.5, lag=0.05).state == "replaying", "no sample was compared yet"
    caught = shipped(1.5, lag=0.05, samples=((good, 0.1),))
    assert caught.state == "pausing_for_replay" and "50 ms behind" in caught.reason
    assert shipped(1.5, lag=0.05, waiting=1 << 20, samples=((good, 0.1),)).state == "replaying"
    role = shipped(1.5, lag=0.05)
    assert shipped(3.0, lag=0.05).state == "replaying" and shipped(3.6, lag=0.05).state == "pausing_for_replay"
    role = replace(role, best=source.FAR, better_at=1.0, sample_by=0.0)
    role = shipped(2.0, lag=0.4, samples=((good, 0.4),))
    assert shipped(3.9, lag=0.35).state == "replaying"
    assert shipped(6.1, lag=0.35).state == "pausing_for_replay", "it comes no closer, and that may be waited for"
    for values, why in (({"overflowed": True}, "do not fit"), ({"heard": 1.0, "now": 17.0}, "nothing for 16"),
                        ({"broken": True}, "failed on its own"), ({"trouble": "no sample"}, "no sample"),
                        ({"samples": ((bad, 0.1),)}, "longer than the 2.0 s")):
        now = float(values.pop("now", 2.0))  # type: ignore[arg-type]
        ended = shipped(now, lag=0.4, **values)
        assert ended.state == "running" and why in ended.reason, ended
        assert ended.copy_may_help == ("on its own" not in why)


def test_what_differs_is_repaired_if_there_is_time() -> None:
    role = SourceRole(mode="replay", speed=SECOND)
    assert after(role, "comparing", "compared", Compared(5_000, 0.6)).state == "repairing"
    ended = after(role, "comparing", "compared", Compared(5_000, 0.4))
    assert ended.state == "running" and ended.copy_may_help and "5000 pages differ" in ended.reason


def test_the_source_waits_no_longer_than_was_promised() -> None:
    role = after(role_for(MoveOptions(mode="copy", max_downtime=0.5)), "pausing", "drained", now=10.0)
    assert (role.paused_at, role.deadline) == (10.0, 10.5)
    assert after(role, "sending", "verified", now=10.49).state == "offering"
    late = after(role, "sending", "verified", now=10.6)
    assert late.state == "running" and "0.60 s, more than the 0.50 s" in late.reason
    assert SOURCE.step(after(role, "offering", "promised", now=10.4), Event("tick", 10.49)).stale
    role = after(role, "offered", "tick", now=10.5)
    assert role.state == "withdrawing" and role.reason == "no commit came within the promised 0.50 s"
    assert role.deadline == 10.5 + source.ASK_AGAIN_SECONDS
    assert SOURCE.step(role, Event("tick", 10.6)).stale and after(role, "withdrawing", "tick", now=11.1).deadline > 11.1
    freeze = MoveOptions(mode="copy", max_downtime=0.5, on_timeout="freeze")
    frozen = after(role_for(freeze), "pausing", "drained", now=10.0)
    assert frozen.deadline > 3000
