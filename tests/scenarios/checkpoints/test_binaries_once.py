"""A module binary goes to a node once, and only the part of it that the device can run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.eventually import eventually
from tests.support.pools.pool import LocalPool
from tests.support.pools.staged import Staged

NOISE = 300_000  #: bytes of each entry that this device cannot use (programs/binaries.py)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[LocalPool]:
    with LocalPool(tmp_path, nodes=2) as running:
        yield running


def cached(pool: LocalPool, host: str) -> list[Path]:
    return sorted((pool.folder / "pool" / "nodes" / host / "modules").glob("[0-9a-f]*"))


def wait_cached(pool: LocalPool, host: str) -> Path:
    found = eventually(lambda: [path for path in cached(pool, host) if len(path.name) == 64],
                       f"{host} keeps no module binary", 10)
    assert len(found) == 1
    return found[0]


def wait_row(staged: Staged, wanted: Any) -> dict[str, Any]:
    """The session's row once its figures, which come every second, are as wanted."""
    return eventually(lambda: row if wanted(row := staged.pool.session(staged.name)) else {},
                      lambda: staged.pool.session(staged.name), 15, every=0.2)


def run(pool: LocalPool, name: str, host: str = "node-a", program: str = "binaries") -> Staged:
    return Staged(pool, pool.folder / "gates", program, name=name, options=("--host", host))


def finish(staged: Staged) -> str:
    staged.open(1, 2)
    return staged.finish()


def test_binaries_go_once(pool: LocalPool) -> None:
    first = run(pool, "first")
    first.reach(1)
    row = wait_row(first, lambda row: row["module_bytes"])
    assert 16_384 < row["module_bytes"] < NOISE and row["module_bytes_saved"] == 0  # the PTX alone
    binary = wait_cached(pool, "node-a")
    assert binary.stat().st_size == row["module_bytes"]
    (kind, sums), = row["modules"]["loads"]["kinds"].items()
    slowest = row["modules"]["loads"]["slowest"][0]
    assert (kind, sums["loads"], sums["bytes"], sums["failed"]) == ("fatbin", 1, row["module_bytes"], 0)
    assert sums["ms"] == slowest["ms"] and sums["ms"]["compile"] > 0 and slowest["kernels"] == sums["kernels"] > 0
    wait_row(first, lambda row: row["modules"]["derived"]["stored"] > 0 == row["modules"]["derived"]["hits"])
    expected = finish(first)

    second = run(pool, "second")
    second.reach(1)
    again = wait_row(second, lambda row: row["module_bytes_saved"])
    assert (again["module_bytes"], again["module_bytes_saved"]) == (0, row["module_bytes"])
    assert again["modules"]["hits"] == 1 and again["modules"]["misses"] == 0
    # What the first one compiled.
    wait_row(second, lambda row: row["modules"]["derived"]["hits"] > 0 == row["modules"]["derived"]["misses"])
    assert finish(second) == expected

    binary.write_bytes(binary.read_bytes()[:-1])
    third = run(pool, "third")
    third.reach(1)
    assert wait_row(third, lambda row: row["module_bytes"])["modules"]["damaged"] == 1
    assert finish(third) == expected
    assert wait_cached(pool, "node-a").stat().st_size == row["module_bytes"]  # repaired by what was sent

    # The node dies; the other one has never seen the module binary, and gets it from the client's journal.
    fourth = run(pool, "fourth")
    before = fourth.reach(1)
    wait_row(fourth, lambda row: row["module_bytes_saved"])
    assert not cached(pool, "node-b")
    for pid in (pool.node("node-a")["pid"], before["worker_pid"]):
        os.kill(pid, signal.SIGKILL)
    fourth.wait_epoch(before["epoch"] + 1)
    fourth.open(1)
    row = fourth.reach(2)
    assert row["host"] == "node-b"
    assert wait_row(fourth, lambda row: row["module_bytes"])["modules"]["misses"] == 1
    wait_cached(pool, "node-b")
    assert finish(fourth) == expected


@pytest.mark.gpu
def test_real_code_goes_once(tmp_path: Path) -> None:
    """Real cubins of eight architectures: the GPU runs what is left of them, and a second program sends nothing."""
    with LocalPool(tmp_path, nodes=1, device="cuda:0") as pool:
        digests, size = [], 0
        for name in ("first", "second"):
            staged = run(pool, name, program="binaries_gpu")
            staged.reach(1)
            whole = int(next(line for line in staged.lines if line.startswith("whole")).split()[1])
            if name == "first":  # whether the library's binary was named depends on how fast the disk took the module's
                size = wait_cached(pool, "node-a").stat().st_size
                assert 16_384 <= size < whole / 4, (size, whole)
            row = wait_row(staged, lambda row, size=size: 2 * size == sum(
                row[name] or 0 for name in ("module_bytes", "module_bytes_saved")))
            assert row["module_bytes"] in ((size, 2 * size) if name == "first" else (0,)), (size, row)
            staged.open(1)
            digests.append(staged.finish())
        assert digests[0] == digests[1]


TORCH = """
import hashlib, sys, time
import torch
torch.manual_seed(1)
a = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
x = torch.randn(8, 3, 64, 64, device="cuda")
c = torch.nn.functional.conv2d(x, torch.randn(16, 3, 3, 3, device="cuda"))
s = torch.softmax((a @ a).float(), dim=1).sort(dim=1).values.cumsum(1)
data = s.cpu().numpy().tobytes() + c.relu().mean().cpu().numpy().tobytes()
print("computed", flush=True)
time.sleep(float(sys.argv[1]))
print("digest", hashlib.sha256(data).hexdigest())
"""


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_pytorch_s_binaries_go_once(tmp_path: Path) -> None:
    """PyTorch with cuBLAS and cuDNN: results equal to a native run's, and the second run sends no module binary."""
    pytest.importorskip("torch")
    script = tmp_path / "images_torch.py"
    script.write_text(TORCH)
    native = subprocess.run([sys.executable, str(script), "0"], capture_output=True, text=True, timeout=180)
    assert native.returncode == 0, f"PyTorch does not run natively here: {native.stderr[-2000:]}"
    digest = native.stdout.split("digest ")[1].strip()
    with LocalPool(tmp_path / "pool", nodes=1, device="cuda:0") as pool:
        for name in ("first", "second"):
            program = pool.run(sys.executable, str(script), "6", name=name, options=("--memory", "4GiB"))
            program.wait_lines(1, 240)
            time.sleep(3)  # figures come every second
            row = pool.session(name)
            print(f"{name}: {row['module_bytes']:,} bytes of module binaries sent, {row['module_bytes_saved']:,} named")
            assert program.finish() == digest, f"{name} run: another result than natively"
            if name == "second":
                assert row["module_bytes"] == 0, f"module binaries were sent again: {row}"
                assert row["module_bytes_saved"] > 1 << 20, row
