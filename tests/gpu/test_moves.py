"""Moves between two workers on this machine's GPU (or GPUs): `pytest -m gpu tests/gpu/test_moves.py`.

By copy and by replay, of a deterministic program and of one whose kernels no replay can repeat. With
one GPU both workers share it: the cut then needs room for the pages that changed, beside both copies
of the session. What a move cost is printed (run with -s).
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scenarios.fire import HEAT, OTHER, PACED
from tests.scenarios.pool import ROOT, LocalPool

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs a CUDA GPU")]
SHOWN = ("mode", "downtime_ms", "brownout_ms", "total_ms", "bytes_sent", "rounds", "mismatched_pages", "repaired_bytes",
         "sampled_pages", "sampled_mismatches", "expected", "why", "fell_back")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    with LocalPool(tmp_path_factory.mktemp("gpu-moves"), nodes=3, device="cuda:0") as pool:
        yield pool


@pytest.mark.parametrize("mode", ["copy", "replay", "auto"])
def test_a_deterministic_program_moves_bit_for_bit(pool: LocalPool, tmp_path: Path, mode: str) -> None:
    expected = pool.heat(f"still-{mode}", **HEAT).finish()
    released = tmp_path / "released"
    program = pool.run(sys.executable, "-W", "ignore", str(PACED), str(released),
                       *(part for key, value in HEAT.items() for part in (f"--{key}", str(value))), name=f"m-{mode}")
    program.wait_lines(4)
    for _ in range(2):
        result = pool.rgpu("migrate", f"m-{mode}", OTHER[pool.wait_state(f"m-{mode}", "running")["host"]],
                           "--mode", mode)
        print({key: result.get(key) for key in SHOWN})
        assert result["outcome"] == "committed" and result["verified"], result
        assert mode == "auto" or result["mode"] == mode, f"{result['why']}; {result.get('fell_back')}\n{pool.logs()}"
        if result["mode"] == "replay":
            assert result["mismatched_pages"] == 0, "a deterministic program was replayed to other bytes"
    released.touch()
    assert program.finish() == expected, "the moved program computed something else"


def test_what_a_replay_cannot_repeat_is_repaired(pool: LocalPool, tmp_path: Path) -> None:
    released = tmp_path / "released"
    program = pool.run(sys.executable, str(ROOT / "tests/scenarios/programs/witness.py"), str(released), name="witness")
    program.wait_lines(6)
    wrong = 0
    for _ in range(2):
        result = pool.rgpu("migrate", "witness", OTHER[pool.wait_state("witness", "running")["host"]],
                           "--mode", "replay")
        print({key: result.get(key) for key in SHOWN})
        assert result["mode"] == "replay", f"the replay was given up: {result.get('fell_back')}\n{pool.logs()}"
        wrong += result["mismatched_pages"]
        program.wait_lines(len(program.lines) + 2)
    assert wrong > 0, "no page differed: a replay cannot have read the same times"
    released.touch()
    program.finish()
