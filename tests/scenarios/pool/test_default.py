"""What a run gets that asks for nothing, by real processes: the default, one line on it, shared by its processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.pools.pool import ROOT, LocalPool, VerbError

PROGRAMS = ROOT / "tests" / "scenarios" / "programs"
MIB = 1 << 20


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    with LocalPool(tmp_path_factory.mktemp("default"), nodes=1) as found:
        yield found


def rgpu_run(pool: LocalPool, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in pool.environment.items() if name != "RGPU_QUIET"}
    return subprocess.run([sys.executable, "-m", "rgpu.cli.main", "run", *words], env=environment, text=True,
                          stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=False)


def test_one_line_says_what_was_given(pool: LocalPool) -> None:
    small = rgpu_run(pool, "--name", "small", "--", "true")
    assert small.returncode == 0 and small.stderr.count("\n") == 1, small.stderr
    assert small.stderr.startswith("rgpu: small: memory of a device (rgpu CPU device") and "1 GiB" in small.stderr
    assert small.stderr.endswith(") on node-a\n"), small.stderr
    assert rgpu_run(pool, "-q", "--name", "still", "--", "true").stderr == ""
    half = rgpu_run(pool, "--name", "half", "--gpus", "0.5", "--", "true")
    assert half.stderr.startswith("rgpu: half: 0.5 of a device (rgpu CPU device") and "4 GiB" in half.stderr


def test_a_pool_with_another_default_and_a_run_that_shares_it(pool: LocalPool) -> None:
    assert pool.rgpu("pool", "status")["default_gpus"] == ""
    with pytest.raises(VerbError, match="more than one GPU comes in whole ones"):
        pool.rgpu("pool", "set", "default-gpus", "1.5")
    assert pool.rgpu("pool", "set", "default-gpus", "0.25")["default_gpus"] == "0.25"
    assert pool.rgpu("pool", "status")["default_gpus"] == "0.25"
    program = pool.run(sys.executable, "-W", "ignore", str(PROGRAMS / "sharing.py"), name="family")
    ended = program.process.wait(120)
    assert ended == 0, (program.lines, program.errors)
    time.sleep(0.2)
    seen = {line.split()[0]: int(line.split()[1]) for line in program.lines}
    assert seen["whole"] == 2048, "a quarter of 8 GiB"
    assert (seen["child"], seen["took"], seen["parent"]) == (848, 448, 448), "what the parent has, its child has not"
    assert seen["more"] == 648 and seen["again"] == 848, "what the child has, its parent has not, until it ended"
    assert any("by the processes of this run" in line for line in program.errors), program.errors


def test_refused_with_the_largest_share_that_is_free(pool: LocalPool, tmp_path: Path) -> None:
    pool.rgpu("pool", "set", "default-gpus", "1")
    held = pool.run(sys.executable, "-c", "import time; time.sleep(60)", name="held", options=("--gpus", "0.5"))
    eventually(lambda: pool.rgpu("ps") or held.process.poll() is not None, lambda: held.errors, 30, every=0.2)
    assert held.process.poll() is None, held.errors
    witness = tmp_path / "started"
    done = rgpu_run(pool, "--name", "whole", "--", "touch", str(witness))
    assert done.returncode and not witness.exists()
    assert "no GPU is free (the default of this pool" in done.stderr, done.stderr
    assert "the largest share that is free is 0.5 of cpu:0 of node-a: --gpus 0.5" in done.stderr, done.stderr
    held.stop()
    pool.rgpu("pool", "set", "default-gpus", "auto")
    assert pool.rgpu("pool", "status")["default_gpus"] == ""
