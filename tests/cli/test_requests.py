"""What `rgpu run` and `rgpu rebalance` make of their options."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from rgpu.api.settings import Settings
from rgpu.cli.command_line import cli
from rgpu.cli.moves import rebalance
from rgpu.cli.sessions import starting
from rgpu.migrate.leader.requests import read_wants
from rgpu.migrate.records.schema import Wants
from rgpu.session.errors import UsageError


def requested(**values: Any) -> dict[str, Any]:
    given = {"host": None, "gpus": None, "compute": None, "models": (), "priority": 0, "anti_affinity": None,
             "queue": False, **values}
    return starting.requested(**given)


def test_what_is_not_asked_for_is_not_sent() -> None:
    assert requested() == {} and requested(host="a") == {"host": "a"}
    asked = requested(gpus="0.25", models=("H200", "B200"), priority=-1, anti_affinity="g", queue=True)
    assert asked == {"gpus": "0.25", "models": ["H200", "B200"], "priority": -1, "anti_affinity": "g", "queue": True}
    assert read_wants(asked) == (Wants(compute=25, models=["H200", "B200"], priority=-1, anti_affinity="g"), 25)


@pytest.mark.parametrize("gpus", ["7", "1.5", "0", "many"])
def test_what_cannot_be_had_is_refused_before_the_program_starts(gpus: str) -> None:
    with pytest.raises(UsageError):
        requested(gpus=gpus)


def test_memory_that_nobody_set_is_left_to_the_pool() -> None:
    assert not Settings({}, {"RGPU_CONFIG": ""}).given("memory")
    assert Settings({"memory": "1GiB"}, {}).given("memory") and Settings({}, {"RGPU_MEMORY": "1GiB"}).given("memory")


def test_a_plan_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    move = {"session": "x", "from": "a", "to": "b", "device": "cpu:0", "gain": 0.0, "reason": "x leaves a for s"}
    found = {"auto": False, "paused": "", "fragmentation": 0.125, "reason": "s fits on a after 1 move",
             "moves": [move], "applied": False}
    rebalance._show(found)
    said = capsys.readouterr().out
    assert "rebalancing is off; 12.5% of the pool is fragmented" in said and "x: a -> b cpu:0: x leaves a for s" in said
    assert "--apply" in said
    rebalance._show({**found, "applied": True, "results": [{"session": "x", "outcome": "committed",
                                                           "downtime_ms": 31.4}]})
    said = capsys.readouterr().out
    assert "(committed, 31 ms of downtime)" in said and "--apply" not in said


def test_apply_and_auto_do_not_go_together() -> None:
    done = CliRunner().invoke(cli, ["rebalance", "--apply", "--auto", "on"])
    assert done.exit_code == 2
