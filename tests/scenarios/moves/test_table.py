"""The sweep's table names who broke in every case there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pools import fault_cases, move_cases, table
from tests.support.pools.fire import Outcome

CASES = (move_cases.WORKER_CASES + move_cases.REPLAY_CASES + move_cases.DAEMON_CASES
         + move_cases.LOST_CASES + move_cases.NODE_CASES + move_cases.LINK_CASES
         + fault_cases.ACTOR_CASES + fault_cases.LAPSE_CASES + fault_cases.LINK_CASES)


def test_every_case_says_who_and_how() -> None:
    for case in CASES:
        said = table.who(case)
        assert said.split()[0].removesuffix("'s") in ("source", "destination", "coordinator", "agent", "page"), case
        assert any(how in said for how in table.HOW.values()) and len(said) < table.WHO, (case, said)


@pytest.mark.parametrize("case, said", [
    ("replay.probe:kill", "destination worker killed"),
    ("replay.sample:stop", "source worker frozen, woken"),
    ("mover.write_commit.done:lost", "coordinator gets no answer"),
    ("daemon.activate:kill", "destination daemon killed"),
    ("daemon.send:stop", "source daemon frozen, woken"),
    ("verify/destination", "destination node killed"),
    ("flip/source moving", "source's link flips a bit (moving)"),
    ("round/source worker/freeze", "source worker frozen, woken"),
    ("round/page link/cut", "page link is cut mid-frame"),
])
def test_who(case: str, said: str) -> None:
    assert table.who(case) == said


def test_rows_are_kept_in_order_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RGPU_SWEEP_OUT", str(tmp_path))
    order = ["round:kill", "replay.probe:kill"]
    for case, digest in (("replay.probe:kill", "1" * 64), ("round:kill", "2" * 64), ("replay.probe:kill", "3" * 64)):
        table.record("sweep", order, Outcome(case, "committed", digest, 1, True, 2.5, ["node-b@2"]))
    (path,) = tmp_path.iterdir()
    head, first, second = path.read_text().splitlines()
    assert head == table.HEAD and first.startswith("round:kill") and "2222" in first
    assert second.split()[:4] == ["replay.probe:kill", "destination", "worker", "killed"]
    assert "33333333" in second and "node-b@2" in second and second.endswith("committed")
