"""Moves between two workers on this machine's GPU (or GPUs): `pytest -m gpu tests/gpu/test_moves.py`.

By copy and by replay, of a deterministic program and of one whose kernels no replay can repeat. With
one GPU both workers share it: the cut then needs room for the pages that changed, beside both copies
of the session. What a move cost is printed (run with -s).
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.suite.outputs import parse
from tests.support.pools.fire import HEAT, OTHER, PACED
from tests.support.pools.pool import ROOT, LocalPool, Program, VerbError
from tests.support.pools.staged import Staged, moved_or_refused
from tests.support.pools.to_and_fro import to_and_fro

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs a CUDA GPU")]
SHOWN = ("mode", "downtime_ms", "brownout_ms", "total_ms", "bytes_sent", "rounds", "mismatched_pages", "repaired_bytes",
         "sampled_pages", "sampled_mismatches", "expected", "why", "fell_back", "pages_by", "pages_why", "spare",
         "phases_ms", "page_rounds")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    with LocalPool(tmp_path_factory.mktemp("gpu-moves"), nodes=3, device="cuda:0") as pool:
        yield pool


def moved(pool: LocalPool, name: str, mode: str) -> dict[str, Any]:
    """The result of a move to the next node; one that fails shows every log of the pool."""
    target = OTHER[pool.wait_state(name, "running")["host"]]
    try:
        result: dict[str, Any] = pool.rgpu("migrate", name, target, "--mode", mode, timeout=300)
    except VerbError as error:
        raise AssertionError(f"{error}\n{pool.logs()}") from None
    print({key: result.get(key) for key in SHOWN})
    return result


@pytest.mark.parametrize("mode", ["copy", "replay", "auto"])
def test_a_deterministic_program_moves_bit_for_bit(pool: LocalPool, tmp_path: Path, mode: str) -> None:
    expected = pool.heat(f"still-{mode}", rest=0, **HEAT).finish()
    released = tmp_path / "released"
    program = pool.run(sys.executable, "-W", "ignore", str(PACED), str(released),
                       *(part for key, value in HEAT.items() for part in (f"--{key}", str(value))), name=f"m-{mode}")
    program.wait_lines(4)
    for _ in range(2):
        result = moved(pool, f"m-{mode}", mode)
        assert result["outcome"] == "committed" and result["verified"], result
        assert mode == "auto" or result["mode"] == mode, f"{result['why']}; {result.get('fell_back')}\n{pool.logs()}"
        if result["mode"] == "replay":
            assert result["mismatched_pages"] == 0, "a deterministic program was replayed to other bytes"
    released.touch()
    assert program.finish() == expected, "the moved program computed something else"


def test_pages_are_pulled_between_workers_of_one_host(pool: LocalPool, tmp_path: Path) -> None:
    """Out of exported device memory, three times; and over the connection when that is asked for."""
    expected = pool.heat("still-peer", rest=0, **HEAT).finish()
    released = tmp_path / "released"
    program = pool.run(sys.executable, "-W", "ignore", str(PACED), str(released),
                       *(part for key, value in HEAT.items() for part in (f"--{key}", str(value))), name="peer")
    program.wait_lines(4)
    for pages, by in (("auto", "peer"), ("auto", "peer"), ("stream", "stream"), ("auto", "peer")):
        result = pool.rgpu("migrate", "peer", OTHER[pool.wait_state("peer", "running")["host"]], "--mode", "copy",
                           "--pages", pages)
        print({key: result.get(key) for key in SHOWN})
        assert result["outcome"] == "committed" and result["verified"], f"{result}\n{pool.logs()}"
        assert result["pages_by"] == by, f"{result['pages_why']}\n{pool.logs()}"
    released.touch()
    assert program.finish() == expected, "the moved program computed something else"


def test_what_a_replay_cannot_repeat_is_repaired(pool: LocalPool, tmp_path: Path) -> None:
    released = tmp_path / "released"
    program = pool.run(sys.executable, str(ROOT / "tests/scenarios/programs/witness.py"), str(released), name="witness")
    program.wait_lines(6)
    wrong = 0
    for _ in range(2):
        result = moved(pool, "witness", "replay")
        assert result["mode"] == "replay", f"the replay was given up: {result.get('fell_back')}\n{pool.logs()}"
        wrong += result["mismatched_pages"]
        program.wait_lines(len(program.lines) + 2)
    assert wrong > 0, "no page differed: a replay cannot have read the same times"
    released.touch()
    program.finish()


# -- everything that a driver can hold ------------------------------------------------------
TORCH_GATES = (20, 40)


def moving(pool: LocalPool, folder: Path, name: str) -> Program:
    folder.mkdir()
    return pool.run(sys.executable, "-W", "ignore", str(ROOT / "tests/gpu/programs/torch_moving.py"), str(folder),
                    name=name, options=("--memory", "8GiB"))


def digests(program: Program, seconds: float = 240) -> dict[str, str]:
    code = program.process.wait(seconds)
    for thread in program._threads:
        thread.join(5)
    assert code == 0, program.errors[-30:]
    printed = parse("\n".join(program.lines))
    assert printed.says["elapsed_positive"] == "True" and len(printed.digests) == 5, program.lines[-10:]
    return dict(printed.digests)


def wait_gate(program: Program, gate: int, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while f"gate {gate}" not in program.lines:
        assert program.process.poll() is None and time.monotonic() < deadline, (program.lines, program.errors[-30:])
        time.sleep(0.02)


@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
@pytest.mark.parametrize("mode", ["copy", "replay"])
def test_pytorch_in_mid_training_with_graph_mapped_memory_and_two_streams(pool: LocalPool, tmp_path: Path,
                                                                          mode: str) -> None:
    """A live CUDA graph, pinned memory with a device pointer, events across two streams: every byte as unmoved."""
    still = moving(pool, tmp_path / "still", f"torch-still-{mode}")
    for gate in TORCH_GATES:
        (tmp_path / "still" / str(gate)).touch()
    expected = digests(still)
    name = f"torch-{mode}"
    program = moving(pool, tmp_path / "moved", name)
    for gate in TORCH_GATES:
        wait_gate(program, gate)
        result = moved(pool, name, mode)
        assert result["outcome"] == "committed" and result["verified"], f"{result}\n{pool.logs()}"
        assert result["mode"] == mode, f"{result.get('fell_back')}\n{pool.logs()}"
        (tmp_path / "moved" / str(gate)).touch()
    found = digests(program)
    assert found == expected, [name for name in expected if found.get(name) != expected[name]]


@pytest.mark.timeout(300)
def test_addresses_of_globals_in_device_memory(pool: LocalPool, tmp_path: Path) -> None:
    """Modules loaded and unloaded in between: each move puts every variable where it was, or is refused by name."""
    still = Staged(pool, tmp_path, "pointers", name="pointers-still")
    still.open(9, 19, 29)
    digest = still.finish()
    staged = Staged(pool, tmp_path, "pointers")
    moved = 0
    for gate, mode in (("9", "copy"), ("19", "replay"), ("29", "auto")):
        row = staged.reach(gate)
        moved += moved_or_refused(pool, staged.name, OTHER[row["host"]], mode)
        staged.open(gate)
    assert staged.finish() == digest
    print(f"{moved} of 3 moves were made, the others refused by name")


def test_an_irreproducible_program_is_repaired_or_copied(pool: LocalPool, tmp_path: Path) -> None:
    """All of its memory differs after a replay: repaired when asked for, and it ends with what it was shown."""
    released = tmp_path / "released"
    program = pool.run(sys.executable, str(ROOT / "tests/scenarios/programs/unrepeatable.py"), str(released),
                       name="unrepeatable")
    program.wait_lines(3)
    for mode in ("replay", "auto"):
        result = moved(pool, "unrepeatable", mode)
        assert result["outcome"] == "committed" and result["verified"], result
        if mode == "replay" and "fell_back" not in result:
            assert result["mismatched_pages"] >= 64 and result["repaired_bytes"] >= 64 << 16, result
        program.wait_lines(len(program.lines) + 2)
    released.touch()
    program.finish()


@pytest.mark.timeout(600)
def test_two_hundred_moves_to_and_fro(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to_and_fro(tmp_path, capsys, 200, "cuda:0")
