#!/usr/bin/env python3
"""GPT-2 124M training steps in bf16 under torch.profiler, as its users take one; for `bench/remote/profiles.py`.

    python profiled_gpt2.py OUT.json [--steps 5] [--small]

OUT.json: `kernels` (name → [count, microseconds]), seconds a step without and with the profiler, the loss's bits, and
`trace`: the events of the last profiled step, (row, name, begin, microseconds), of the Chrome trace that was exported.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with it

import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile, record_function  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "gpu" / "programs"))
from models import Gpt2, small  # noqa: E402

MARK = "last step"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    step = training(options.small)
    for _ in range(8):
        loss = step()
    plain = timed(step, options.steps)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        seen = timed(step, options.steps - 1)
        with record_function(MARK):
            loss = step()
            torch.cuda.synchronize()
    after = timed(step, options.steps)
    kernels: dict[str, tuple[int, float]] = {}
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and event.name != MARK:
            count, spent = kernels.get(event.name, (0, 0.0))
            kernels[event.name] = count + 1, spent + event.device_time
    options.out.write_text(json.dumps({
        "torch": torch.__version__, "steps": options.steps, "loss": struct.pack("<f", loss).hex(), "kernels": kernels,
        "step_s": {"plain": plain, "profiled": seen, "after": after}, "trace": trace(found)}))


def training(little: bool) -> Callable[[], float]:
    """A step that returns its loss."""
    torch.manual_seed(2)
    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda")
    model = (small(97) if little else Gpt2()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    rows, length = (2, 16) if little else (8, 512)
    batch = torch.randint(0, model.tokens, (rows, length + 1)).to(device)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model.loss(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return step


def timed(step: Callable[[], float], count: int) -> float:
    """Seconds a step."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


def trace(found: Any) -> list[tuple[str, str, float, float]]:
    """The events of the marked step in the Chrome trace: on which row, what, when it began, for how long (us)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    marks = [event for event in events if event["name"] == MARK and event.get("cat") == "user_annotation"]
    begin, end = marks[0]["ts"], marks[0]["ts"] + marks[0]["dur"]
    names = {"kernel": "GPU", "gpu_memcpy": "GPU", "gpu_memset": "GPU", "cuda_runtime": "CUDA runtime",
             "cuda_driver": "CUDA driver", "cpu_op": "operators"}
    rows = [(f"{names[event['cat']]}, {'stream' if names[event['cat']] == 'GPU' else 'thread'} {event['tid']}",
             event["name"], event["ts"] - begin, event.get("dur", 0.0))
            for event in events if event.get("cat") in names and begin <= event["ts"] <= end]
    return sorted(rows, key=lambda row: (row[0], row[2]))


if __name__ == "__main__":
    main()
