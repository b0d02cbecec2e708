"""The benchmarks' own parts: tables and targets, the delaying proxy, counting at marks, judging memory."""

from __future__ import annotations

import hashlib
import os
import random
import socket
import threading
import time
from pathlib import Path

import pytest

import bench.support.workload
from bench.remote.long_run import Memory, slope, verdict
from bench.support.pool import BenchPool
from bench.support.proxy import DelayProxy, Echo, build
from bench.support.tables import Table, Target, reached
from bench.support.workload import Outcome, Runner, Side


def outcome(**rows: tuple[str, float]) -> Outcome:
    return Outcome(rows={name.replace("_", " "): value for name, value in rows.items()})


def test_medians_ratios_and_targets(tmp_path: Path) -> None:
    table = Table(tmp_path / "t.json", {"date": "2026-01-02"})
    for native, remote in ((10.0, 11.0), (12.0, 50.0), (11.0, 12.1)):
        table.add("cnn", "native", outcome(CNN_training_step=("ms", native)))
        table.add("cnn", "loopback", outcome(CNN_training_step=("ms", remote)))
    table.add("gemm", "native", outcome(GEMM_8192=("TFLOP/s", 100.0)))
    table.add("gemm", "loopback", outcome(GEMM_8192=("TFLOP/s", 99.5)))
    failed = Outcome(error="exit 1\nwhy")
    failed.counts = {"CNN training step": {"awaited_calls": 0.5, "agent_cpu_s": 1e-4}}
    table.add("cnn", "loopback", failed)
    rows = {row["name"]: row for row in table.rows()}
    assert rows["CNN training step"]["native"] == 11.0 and rows["CNN training step"]["ratio"] == pytest.approx(1.1)
    assert rows["CNN training step"]["awaited_calls_per_step"] == 0.5
    text = table.verdicts()
    assert "reached  CNN training step (loopback): ratio 1.100" in text and "reached  GEMM 8192" in text
    assert ".item() (loopback): not measured" in text and "100 us" in table.text()
    table.save()
    assert "\"errors\"" in (tmp_path / "t.json").read_text() and "exit 1" in (tmp_path / "t.json").read_text()


@pytest.mark.parametrize(("unit", "remote", "target", "good"), [
    ("GB/s", 6.5, Target("x", "loopback", value=6.0), True), ("GB/s", 5.9, Target("x", "loopback", value=6.0), False),
    ("us", 119.0, Target("x", "loopback", value=120.0), True), ("us", 121.0, Target("x", "l", value=120.0), False),
    ("TFLOP/s", 98.0, Target("x", "loopback", ratio=1.01), False), ("ms", 101.0, Target("x", "l", ratio=1.01), True),
])
def test_a_target_knows_which_way_is_better(unit: str, remote: float, target: Target, good: bool) -> None:
    assert reached({"unit": unit, "remote": remote, "ratio": remote / 100}, target) is good


def quickest(port: int, turns: int = 30) -> float:
    """Seconds of the fastest of some round trips: a busy machine makes any of them longer and none shorter."""
    trips = []
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.sendall(b"e")
        for _ in range(turns):
            began, got = time.perf_counter(), 0
            link.sendall(b"x" * 64)
            while got < 64:
                got += len(link.recv(64))
            trips.append(time.perf_counter() - began)
    return min(trips)


@pytest.mark.timeout(120)
def test_the_proxy_delays_without_reordering(tmp_path: Path) -> None:
    binary, echo = build(tmp_path), Echo()
    for milliseconds in (2.0, 20.0):
        proxy = DelayProxy(binary, echo.port, milliseconds / 1e3)
        trip = quickest(proxy.port) * 1e3
        assert milliseconds <= trip <= milliseconds + 8, f"{trip:.2f} ms for {milliseconds} ms"
        proxy.close()
    proxy = DelayProxy(binary, echo.port, 0.02)
    data = random.Random(1).randbytes(16 << 20)
    with socket.create_connection(("127.0.0.1", proxy.port)) as link:
        link.sendall(b"e")

        def send() -> None:
            link.sendall(data)
            link.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        got = hashlib.sha256()
        while piece := link.recv(1 << 20):
            got.update(piece)
        sender.join()
    assert got.digest() == hashlib.sha256(data).digest()
    proxy.close()
    echo.close()


WORKLOAD = """
import ctypes, json, sys
d = ctypes.CDLL("libcuda.so.1")
context, p = ctypes.c_void_p(), ctypes.c_uint64()
assert d.cuInit(0) == 0 and d.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert d.cuCtxSetCurrent(context) == 0 and d.cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t(4096)) == 0
print(json.dumps({"row": "fake", "unit": "ms", "value": 2.5, "samples": 1}))
for at in ("begin", "end"):
    print(json.dumps({"mark": "fake", "at": at, "steps": 50}), flush=True)
    sys.stdin.readline()
    for _ in range(50 if at == "begin" else 0):
        d.cuMemsetD8_v2(p, 1, ctypes.c_size_t(4096))
    d.cuCtxSynchronize()
print(json.dumps({"digest": "abc"}))
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.timeout(150)
def test_calls_are_counted_between_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a real pool behind a proxy: 50 memsets are 50 calls; a failing workload is told in a few lines."""
    (tmp_path / "fake.py").write_text(WORKLOAD)
    monkeypatch.setattr(bench.support.workload, "WORKLOADS", tmp_path)
    with BenchPool(tmp_path / "pool", "cpu", (1.0,)) as pool:
        assert pool.measured[0]["asked_ms"] == 1.0 and pool.measured[0]["added_ms"] < 100  # the delay: test above
        side = Side("rtt-1", pool, ("--host", "rtt-1ms", "--memory", "64MiB"))
        found = Runner(side, "fake", ["0"], tmp_path / "good.jsonl", 60).run()
        assert not found.error, found.error
        assert found.rows == {"fake": ("ms", 2.5)} and found.digest == "abc"
        assert 1 <= found.counts["fake"]["calls"] < 4 and found.counts["fake"]["bytes"] > 40
        assert found.counts["fake"]["agent_cpu_s"] >= 0 and "worker_cpu_s" in found.counts["fake"]
        bad = Runner(side, "fake", ["3"], tmp_path / "bad.jsonl", 60).run()
        assert bad.error.startswith("exit 3") and len(bad.error.splitlines()) <= 5
    assert os.path.exists(tmp_path / "good.jsonl")


def test_a_workload_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow.py").write_text("import time; print('{\"digest\": \"d\"}', flush=True); time.sleep(600)")
    monkeypatch.setattr(bench.support.workload, "WORKLOADS", tmp_path)
    found = Runner(Side("native"), "slow", [], tmp_path / "slow.jsonl", 6).run()
    assert "limit" in found.error and found.digest == "d"


def test_memory_is_judged() -> None:
    times = [float(t) for t in range(200)]
    flat = Memory(times, [100 << 20] * 20 + [200 << 20] * 180)
    grows = Memory(times, [(100 << 20) + t * (1 << 20) for t in range(200)])
    assert flat.summary()["flat"] and not grows.summary()["flat"] and not Memory().summary()["flat"]
    assert slope(times, grows.sizes) == pytest.approx(1 << 20)
    runs = [{"side": "native", "digest": "a", "memory": {"program": grows.summary()}},
            {"side": "recover-on", "digest": "a", "memory": {"agent": flat.summary()}}]
    assert verdict(runs)
    assert not verdict([*runs, {"side": "recover-off", "digest": "b", "memory": {}}])
    assert not verdict([*runs, {"side": "recover-off", "digest": "a", "memory": {"agent": grows.summary()}}])
