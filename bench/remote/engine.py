"""What the worker's hot path costs: tiny launches, awaited round trips, bulk both ways, over sealed loopback TCP.

    python bench/remote/engine.py            on the machine's GPU (the launch needs cuda-bindings and NVRTC)
    python bench/remote/engine.py --fake     on the tests' fake driver: the engine's own cost, no GPU needed

The agent's end is this same process, so its sealing and opening are in the
figures. Prints µs per launch, µs per round trip, GB/s to and from the device.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCE = b'extern "C" __global__ void add_one(unsigned* p, unsigned n) { if (threadIdx.x < n) ++p[threadIdx.x]; }'


def on_the_fake_driver() -> None:
    """Start again where the fake driver is libcuda.so.1."""
    from tests.support import fake_driver

    folder = tempfile.mkdtemp(prefix="rgpu-bench-")
    environment = {**fake_driver.build(Path(folder)), "RGPU_BENCH_FAKE": "1"}
    environment.pop("RGPU_ENGINE_RING"), environment.pop("RGPU_ENGINE_ARENA")
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def binary(fake: bool) -> bytes:
    if fake:
        return b"add_one 12\n"
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(SOURCE, b"bench.cu", 0, [], [])
    (error,) = nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=compute_75"])
    if int(error):
        raise SystemExit(f"NVRTC: error {int(error)}")
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = b" " * size
    nvrtc.nvrtcGetPTX(program, text)
    return text


def median_of(times: int, run: Any) -> float:
    return statistics.median(run() for _ in range(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fake", action="store_true", help="use the tests' fake driver")
    parser.add_argument("--size", type=int, default=256, help="MiB of a bulk copy")
    options = parser.parse_args()
    fake = bool(os.environ.get("RGPU_BENCH_FAKE"))
    if options.fake and not fake:
        on_the_fake_driver()
    from rgpu.server.device.cuda.device import CudaDevice
    from rgpu.server.worker.apply.runtime import SessionRuntime
    from rgpu.session.addresses import DEVICE_BASE as BASE
    from tests.support.fake_driver.support import Agent, Journal, linked

    size = options.size << 20
    device = CudaDevice(0)
    runtime = SessionRuntime("bench", 1, device)
    link, connection = linked(runtime)
    agent, journal = Agent(connection), Journal()
    agent.send(b"".join([
        journal("session_open", version=1, pid=1, environment=b""),
        journal("context_create", context=16, device=0, flags=0, primary=1),
        journal("memory_map", address=BASE, size=size, device=0),
        journal("memory_allocate", address=BASE, size=size),
        journal("module_load", binary(fake), module=17, context=16, library=0, options=b""),
        journal("stream_create", stream=18, context=16, flags=1, priority=0)]))
    if agent.answer(5)[0]:
        raise SystemExit("the module does not load")

    def wait() -> None:
        agent.send(journal("stream_synchronize", stream=18))
        if code := agent.answer(journal.seq, 60)[0]:
            raise SystemExit(f"the device answers {code}")

    def launches(count: int = 2000, batch: int = 32) -> float:
        data = [b"".join(journal.add_one(BASE, 4) for _ in range(batch)) for _ in range(count // batch)]
        began = time.perf_counter()
        for piece in data:
            agent.send(piece)
        wait()
        return (time.perf_counter() - began) / count * 1e6

    def applying(count: int = 2000) -> float:
        """The engine alone, without the link: records straight into feed()."""
        data = b"".join(journal.add_one(BASE, 4) for _ in range(count))
        began = time.perf_counter()
        runtime.loop.take(data)
        spent = time.perf_counter() - began
        device.drain(10)
        return spent / count * 1e6

    def round_trip() -> float:
        record = journal.read(4)
        began = time.perf_counter()
        agent.send(record)
        agent.answer(journal.seq)
        spent = time.perf_counter() - began
        agent.send(journal("completed", observed=journal.seq))
        return spent * 1e6

    def to_device() -> float:
        record = journal.write(block)
        began = time.perf_counter()
        agent.send(record)
        wait()
        return size / (time.perf_counter() - began) / 1e9

    def from_device() -> float:
        record = journal.read(size)
        began = time.perf_counter()
        agent.send(record)
        agent.answer(journal.seq, 60)
        spent = time.perf_counter() - began
        agent.send(journal("completed", observed=journal.seq))
        return size / spent / 1e9

    block = bytes(size)
    rows = [("tiny launch, engine alone", "µs", median_of(5, applying)),
            ("tiny launch, over the link", "µs", median_of(5, launches)),
            ("awaited round trip (4 bytes from the device)", "µs", median_of(500, round_trip)),
            (f"host to device, {options.size} MiB", "GB/s", median_of(3, to_device)),
            (f"device to host, {options.size} MiB", "GB/s", median_of(3, from_device))]
    print(f"{device.facts.name}{' (fake driver)' if fake else ''}, sealed frames over loopback TCP")
    for name, unit, value in rows:
        print(f"  {name:<46}{value:10.2f} {unit}")
    link.close()
    device.close()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
