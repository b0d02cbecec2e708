"""What bench/remote/paired.py computes, and that sides take turns: with a workload that needs no GPU."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import bench.support.workload
from bench.remote.paired import NATIVE, Paired, condition_of, summary
from bench.support.player import Player, PlayerLost
from bench.support.workload import Side

WORKLOAD = """
import os, sys
sys.path.insert(0, {common!r})
import common
common.DEVICE = "cpu"
seen = []
common.measured("first", "us", lambda: seen.append(1), 3, lambda s: float(os.environ["VALUE"]))
if os.environ.get("FAILS"):
    sys.exit("no more of it")
common.measured("second", "ms", lambda: seen.append(1), 2, lambda s: float(len(seen)))
"""


def test_each_round_is_compared_with_itself() -> None:
    """The machine gets three times slower halfway: medians of both sides say nothing, the rounds' ratios do."""
    native = [1.0, 1.0, 1.0, 3.0, 3.0]
    found = summary({NATIVE: native, "loopback": [value * 1.1 for value in native], "lost": []})
    assert set(found) == {"loopback"}
    assert found["loopback"]["ratio"] == pytest.approx(1.1) and found["loopback"]["rounds"] == 5
    assert found["loopback"]["ratio_low"] == pytest.approx(1.1) == found["loopback"]["ratio_high"]
    assert summary({NATIVE: [2.0], "loopback": [3.0]})["loopback"]["ratio_high"] == 1.5


def test_sides_and_their_settings() -> None:
    assert condition_of("loopback") == ("loopback", {})
    assert condition_of("rtt-1:A=1:B=x=y") == ("rtt-1", {"A": "1", "B": "x=y"})
    assert condition_of("rtt-2.5") == ("rtt-2.5", {})
    for wrong in ("loopbak", "loopback:A", "native", "rtt-", "rtt-loopback"):
        with pytest.raises(ValueError, match="loopback"):
            condition_of(wrong)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # noqa: ANN201
    (tmp_path / "toy.py").write_text(WORKLOAD.format(common=str(bench.support.workload.WORKLOADS)))
    monkeypatch.setattr(bench.support.workload, "WORKLOADS", tmp_path)
    started: list[Player] = []

    def one(name: str, **settings: str) -> Player:
        started.append(Player(name, Side(name), "toy", [], tmp_path / f"{name}.err", 60, settings))
        return started[-1]

    yield one
    for player in started:
        player.close()


def quiet() -> Paired:
    return Paired(2, time.monotonic() + 600, say=lambda *args, **options: None)


def test_sides_take_turns_and_every_row_is_played(start) -> None:  # noqa: ANN001
    paired = quiet()
    paired.play("toy", [start(NATIVE, VALUE="2"), start("loopback", VALUE="3")])
    assert not paired.errors
    first, second = paired.rows
    assert (first["name"], first["unit"], first["condition"]) == ("first", "us", "loopback")
    assert first["ratio"] == 1.5 and first["rounds"] == 2 and first["samples"] == [3.0] * 2
    # The second row's action counts what ran before it.
    assert second["ratio"] == 1.0 and len(set(second["samples"])) == 2


def test_a_side_that_ends_drops_out_and_is_named(start) -> None:  # noqa: ANN001
    paired = quiet()
    paired.play("toy", [start(NATIVE, VALUE="2"), start("a", VALUE="3", FAILS="1"), start("b", VALUE="4")])
    assert [(row["name"], row["condition"]) for row in paired.rows] == \
        [("first", "a"), ("first", "b"), ("second", "b")]
    assert len(paired.errors) == 1 and paired.errors[0].startswith("a: ended with 1")
    assert "no more of it" in paired.errors[0]


def test_without_its_native_side_a_workload_is_over(start) -> None:  # noqa: ANN001
    paired = quiet()
    paired.play("toy", [start(NATIVE, VALUE="2", FAILS="1"), start("b", VALUE="4")])
    assert [row["name"] for row in paired.rows] == ["first"] and "native" in paired.errors[0]


def test_sides_at_different_rows_are_not_compared(start) -> None:  # noqa: ANN001
    paired, behind = quiet(), start("b", VALUE="4")
    assert behind.next_row() == ("first", "us")
    behind.leave_row()
    paired.play("toy", [start(NATIVE, VALUE="2"), behind])
    assert not paired.rows and len(paired.errors) == 1 and "different rows" in paired.errors[0]


def test_a_silent_side_is_waited_for_no_longer_than_its_limit(start) -> None:  # noqa: ANN001
    player = start("b", VALUE="1")
    assert player.next_row() == ("first", "us")
    player.limit = 0.5  # its start may take longer
    with pytest.raises(PlayerLost, match="nothing for 0.5 s"):
        player.next_row()
