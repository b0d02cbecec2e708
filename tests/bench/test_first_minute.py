"""What bench/remote/first_minute.py computes, and what it runs: one round on the cpu device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.remote.first_minute import link_of, summary, text
from tests.support.pools.pool import ROOT


def test_ratios_say_how_much_slower() -> None:
    rows = summary({"wait": {"native": [1.0, 3.0], "loopback": [4.0]}, "rate": {"native": [8.0], "loopback": [2.0]},
                    "remote only": {"loopback": [1.0]}}, {"wait": "ms", "rate": "GB/s", "remote only": "ms"})
    assert [row["ratios"] for row in rows] == [{"loopback": 2.0}, {"loopback": 4.0}, {}]
    assert rows[0]["medians"] == {"native": 2.0, "loopback": 4.0}
    assert "(4.00x)" in text(rows, ["native", "loopback"])


def test_links() -> None:
    assert link_of("10g,0.2ms") == (10.0, 0.2)
    for wrong in ("10", "g,0.2ms", "10g", "0g,1ms"):
        with pytest.raises(ValueError, match="is no link"):
            link_of(wrong)


@pytest.mark.timeout(300)
def test_one_round_on_the_cpu_device(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.driver")
    done = subprocess.run(
        [sys.executable, "bench/remote/first_minute.py", "--device", "cpu", "--rounds", "1", "--together", "2",
         "--sides", "loopback", "--large-mib", "2", "--output", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (path,) = tmp_path.glob("*-first-minute.json")
    found = json.loads(path.read_text())
    rows = {row["row"]: row["medians"] for row in found["rows"]}
    assert set(rows["run true, first round"]) == {"native", "loopback"} and not found["errors"]
    assert rows["driver: 1 MB from the device, pageable"]["loopback"] > 0
    (modules,) = found["modules"]
    assert modules["modules"]["loads"]["kinds"]["ptx"]["loads"] == 1
