"""Many moves of a session that trains all the while, between two nodes, on any device.

The result is an unmoved run's, NumPy's at every look, and nobody's memory, descriptors or threads grow: figures are
printed (`-s` shows them at once, a sweep's output always).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.support.pools.growth import Growth, every, look
from tests.support.pools.pool import ROOT, LocalPool

MODES = ("copy", "replay", "auto")
TRAINER = ROOT / "tests" / "scenarios" / "programs" / "trainer.py"
MANY = 100  #: moves from which on there are enough samples behind the warm ones


def to_and_fro(folder: Path, capsys: pytest.CaptureFixture[str], moves: int, device: str = "cpu") -> None:
    #: Growth that counts: share, MiB, pieces. Of a few moves the early ones are still warming up.
    counts = (0.15, 12.0, 6) if moves >= MANY else (0.5, 48.0, 24)
    until = folder / "until"
    held: dict[str, Growth] = defaultdict(Growth)
    lines: list[str] = []
    with LocalPool(folder / "pool", nodes=2, lease=8.0, device=device) as pool:
        program = pool.run(sys.executable, str(TRAINER), "--until", str(until), name="trainer",
                           options=("--journal-limit", "8MiB"))
        program.wait_lines(3)
        pids = {row["host"]: row["pid"] for row in pool.living()}
        for number in range(moves):
            row = pool.wait_state("trainer", "running")
            host = "node-b" if row["host"] == "node-a" else "node-a"
            result = pool.rgpu("migrate", "trainer", host, "--mode", MODES[number % len(MODES)], timeout=120)
            assert result["outcome"] == "committed" and result["verified"], (number, result)
            assert result["epoch"] == number + 2, "every move and nothing else raises the epoch"
            program.wait_lines(len(program.lines) + 2)
            after = pool.wait_state("trainer", "running")
            assert after["host"] == host
            held["agent"].add(look(program.process.pid))
            held[f"worker on {host}"].add(look(after["worker_pid"]))
            for name, pid in pids.items():
                held[f"daemon of {name}"].add(look(pid))
            lines.append(f"move {number + 1:3d} by {result['mode']:6s} downtime {result['downtime_ms']:7.1f} ms, agent "
                         f"{held['agent'].samples[-1].resident_mib:.0f} MiB, mismatched {result['mismatched_pages']}")
        until.touch()
        digest = program.finish(300)
        steps = next(line.split()[1] for line in reversed(program.lines) if line.startswith("steps "))
        still = pool.run(sys.executable, str(TRAINER), "--steps", steps, name="still")
        unmoved = still.finish(600)
    with capsys.disabled():
        print(f"\n{moves} moves of a session that trained {steps} steps meanwhile, {device}", *every(lines, 12),
              *(f"{who}: {growth.text()}" for who, growth in sorted(held.items())), sep="\n  ")
    assert digest == unmoved, "the moved session trained something else"
    grown = {who: found for who, growth in held.items() if (found := growth.grown(*counts))}
    assert not grown, grown
