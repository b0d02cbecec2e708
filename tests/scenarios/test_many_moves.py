"""A session that trains all the while goes to and fro: 200 moves in `make sweep`, 6 in `make test`.

The result is an unmoved run's, NumPy's at every look, and nobody's memory, descriptors or threads grow: figures are
printed (`-s` shows them at once, a sweep's output always).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.scenarios.conftest import SWEEP
from tests.scenarios.growth import Growth, Held, every, look
from tests.scenarios.pool import ROOT, LocalPool

MOVES = 200 if SWEEP else 6
MODES = ("copy", "replay", "auto")
TRAINER = ROOT / "tests" / "scenarios" / "programs" / "trainer.py"
#: Growth that counts. Of six moves the early ones are still warming up.
SHARE, MIB, PIECES = (0.15, 12.0, 6) if SWEEP else (0.5, 48.0, 24)


@pytest.mark.timeout(3600 if SWEEP else 300)
def test_to_and_fro(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    until = tmp_path / "until"
    held: dict[str, Growth] = defaultdict(Growth)
    lines: list[str] = []
    with LocalPool(tmp_path / "pool", nodes=2, lease=8.0) as pool:
        program = pool.run(sys.executable, str(TRAINER), "--until", str(until), name="trainer",
                           options=("--journal-limit", "8MiB"))
        program.wait_lines(3)
        pids = {row["host"]: row["pid"] for row in pool.rgpu("nodes")}
        for number in range(MOVES):
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
        print(f"\n{MOVES} moves of a session that trained {steps} steps meanwhile", *every(lines, 12),
              *(f"{who}: {growth.text()}" for who, growth in sorted(held.items())), sep="\n  ")
    assert digest == unmoved, "the moved session trained something else"
    grown = {who: found for who, growth in held.items() if (found := growth.grown(SHARE, MIB, PIECES))}
    assert not grown, grown


def test_growth_is_seen_and_noise_is_not() -> None:
    """What the assertion above would say of a leak, of one outlier, and of a process that only warms up."""
    def series(values: list[float], pieces: list[int]) -> Growth:
        return Growth([Held(mib, piece, 5) for mib, piece in zip(values, pieces, strict=True)])

    flat = series([100.0 + n % 3 for n in range(200)], [40] * 200)
    assert flat.grown(0.15, 12.0, 6) == []
    spiky = series([100.0 if n != 180 else 900.0 for n in range(200)], [40] * 200)
    assert spiky.grown(0.15, 12.0, 6) == []
    warming = series([min(50.0 + 5 * n, 110.0) for n in range(200)], [min(20 + n, 40) for n in range(200)])
    assert warming.grown(0.15, 12.0, 6) == []
    leaking = series([100.0 + 0.4 * n for n in range(200)], [40 + n // 10 for n in range(200)])
    assert [text.split()[0] for text in leaking.grown(0.15, 12.0, 6)] == ["resident_mib", "descriptors"]
    assert len(every([str(n) for n in range(200)], 12)) == 12 and every(["a"], 12) == ["a"]
