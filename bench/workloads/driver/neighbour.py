"""A program beside others on a GPU: prints how much it did in each second. Needs no framework.

usage: neighbour.py endless BLOCKS      a kernel that does not end, of that many blocks of 256 threads
       neighbour.py tiny                kernels of some microseconds, each awaited: kernels a second
       neighbour.py queue TURNS         kernels of so many turns of a loop, sixteen queued at a time: kernels a second
"""

from __future__ import annotations

import ctypes
import sys
import time
from typing import Any

from cuda.bindings import driver
from loading import check, kernels

SOURCE = b"""
extern "C" __global__ void endless(volatile unsigned* word) { while (!*word) { } }
extern "C" __global__ void busy(unsigned* word, unsigned times) {
    unsigned x = threadIdx.x;
    for (unsigned i = 0; i < times; ++i) x = x * 1664525u + 1013904223u;
    if (x == 7u) *word = x;
}
"""
TINY = 10  #: turns of a thread's loop


def main() -> None:
    """Run until ended from outside."""
    endless, busy = kernels(SOURCE, b"endless", b"busy")
    word = int(check(driver.cuMemAlloc(8)))
    check(driver.cuMemsetD8(word, 0, 8))
    check(driver.cuCtxSynchronize())

    def launch(kernel: Any, blocks: int, *values: tuple[int, Any]) -> None:
        given, kinds = zip((word, ctypes.c_void_p), *values, strict=True)
        check(driver.cuLaunchKernel(kernel, blocks, 1, 1, 256, 1, 1, 0, 0, (given, kinds), 0))

    if sys.argv[1] == "endless":
        launch(endless, int(sys.argv[2]))
        print("launched", flush=True)
        time.sleep(3600)
    times, at_once, blocks = (TINY, 1, 4) if sys.argv[1] == "tiny" else (int(sys.argv[2]), 16, 264)
    print("up", flush=True)
    while True:
        begun, count = time.monotonic(), 0
        while time.monotonic() < begun + 1:
            for _ in range(at_once):
                launch(busy, blocks, (times, ctypes.c_uint32))
            check(driver.cuCtxSynchronize())
            count += at_once
        print(round(count / (time.monotonic() - begun), 1), flush=True)


if __name__ == "__main__":
    main()
