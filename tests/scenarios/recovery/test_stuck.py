"""A session whose kernel never ends: what would wait for it is refused at once, and says which kernel it is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pools.pool import ROOT, LocalPool, VerbError

PROGRAM = ROOT / "tests" / "scenarios" / "programs" / "spinning.py"
KERNEL = r"kernel waits_for_ever \(call \d+\) has not ended for 3\.\d s"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    with LocalPool(tmp_path_factory.mktemp("stuck"), nodes=2, lease=8.0) as running:
        yield running


def test_verbs_name_the_kernel_and_change_nothing(pool: LocalPool, tmp_path: Path) -> None:
    program = pool.run(sys.executable, str(PROGRAM), name="stuck")
    program.wait_lines(1)
    host = pool.wait_state("stuck", "running")["host"]
    other = next(each for each in ("node-a", "node-b") if each != host)
    before = pool.session("stuck")
    for verb in (("migrate", "stuck", other), ("migrate", "stuck", other, "--mode", "replay"),
                 ("migrate", "stuck", other, "--dry-run"), ("checkpoint", "stuck")):
        with pytest.raises(VerbError, match=KERNEL) as refused:
            pool.rgpu(*verb)
        assert refused.value.code == 5, verb
    after = pool.session("stuck")
    assert (after["host"], after["epoch"], after["state"]) == (before["host"], before["epoch"], "running")
    decisions = [event["decision"] for event in pool.rgpu("history", "stuck")]
    assert "begin_move" not in decisions, "a move was begun for it"
    with pytest.raises(VerbError, match=f"blocked: .*{KERNEL}"):
        pool.rgpu("drain", host, "--timeout", "8s")
    assert "drain_blocked" in [event["decision"] for event in pool.rgpu("history", "stuck")]
    pool.rgpu("uncordon", host)
    pool.rgpu("kill", "stuck")
    program.stop()
