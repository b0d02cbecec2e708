"""A session whose kernel never ends: what would wait for it is refused at once, and says which kernel it is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rgpu.session.errors import UsageError
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


def test_a_kernel_above_the_pool_s_limit_ends_its_session_alone(pool: LocalPool) -> None:
    for value in ("0", "-1", "1.5", "soon", "99999999999999"):
        with pytest.raises(VerbError) as refused:
            pool.rgpu("pool", "set", "max-kernel-seconds", value)
        assert refused.value.code == UsageError.exit_code, value
    neighbour = pool.heat("beside", steps=600, rest=0.05)
    program = pool.run(sys.executable, str(PROGRAM), name="endless")
    program.wait_lines(1)
    assert pool.rgpu("pool", "status")["max_kernel_seconds"] == 0 and pool.session("endless")["state"] == "running"
    # The cpu device compiles a kernel at its first launch, beside the endless one, while other tests run.
    assert pool.rgpu("pool", "set", "max-kernel-seconds", "10") == {"max_kernel_seconds": 10}
    assert pool.ends("endless", 60)
    story = [event["reason"] for event in pool.rgpu("history", "endless") if event["decision"] == "end"]
    assert len(story) == 1 and "kernel waits_for_ever" in story[0] and "max-kernel-seconds" in story[0], story
    assert len(neighbour.finish(120)) == 64
    assert pool.rgpu("pool", "set", "max-kernel-seconds", "off") == {"max_kernel_seconds": 0}
    program.stop()
