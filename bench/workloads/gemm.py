"""Matrix products of 8192: their rate, and whether the kernels or the time between them make it lower."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from common import DEVICE, QUICK, chosen, counted, measured, sampled, synchronize

n = 8192 if DEVICE == "cuda" else 256


def rate(seconds: float) -> float:
    return 2 * n**3 / seconds / 1e12


def parts(action: Callable[[], Any], count: int = 60) -> tuple[float, float]:
    """Return medians of the GPU's own seconds in one action, and between two of them, in a queue of ``count``."""
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for _ in range(4):  # the queue is never empty while it is measured
        action()
    for begin, end in marks:
        begin.record()
        action()
        end.record()
    synchronize()
    within = [begin.elapsed_time(end) for begin, end in marks]
    between = [before[1].elapsed_time(after[0]) for before, after in zip(marks, marks[1:], strict=False)]
    return statistics.median(within) / 1e3, statistics.median(between) / 1e3


for name, dtype, count in (("GEMM 8192, bf16", torch.bfloat16, 60), ("GEMM 8192, fp32", torch.float32, 8)):
    if chosen(name):
        a, b = (torch.randn(n, n, device=DEVICE, dtype=dtype) for _ in range(2))
        c = torch.empty_like(a)

        def product(a: Any = a, b: Any = b, c: Any = c) -> Any:
            return torch.mm(a, b, out=c)

        measured(name, "TFLOP/s", product, max(4, count // (1 + QUICK)), rate)
        if dtype == torch.bfloat16 and DEVICE == "cuda":
            measured(f"{name}, 600 in a row", "TFLOP/s", product, 600, rate)
            sampled(f"{name}, the kernel alone", "TFLOP/s", lambda: rate(parts(product)[0]))
            sampled(f"{name}, between two kernels", "us", lambda: parts(product)[1] * 1e6)
        counted(name, product, 8)
