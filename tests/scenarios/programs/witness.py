"""A program whose kernels write what no replay can write again, and that remembers what it saw.

usage: witness.py FILE. Until FILE appears, each step's kernel writes the device's timer to a page
of its own, twice in one launch; the program copies one of them out at once. At the end all of
device memory must be what it saw step by step, and the events that it recorded must lie in order
and not further apart than the program ran. Prints ``digest`` of the word when all is well.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

import numpy as np
from cuda.bindings import driver

PTX = rb"""
.version 7.0
.target sm_75
.address_size 64
.visible .global .align 8 .u64 steps;
.visible .entry mark(.param .u64 buffer, .param .u64 offset)
{
    .reg .u64 %rd<8>;
    ld.param.u64 %rd1, [buffer];
    ld.param.u64 %rd2, [offset];
    add.u64 %rd3, %rd1, %rd2;
    mov.u64 %rd4, %globaltimer;
    st.global.u64 [%rd3], %rd4;
    st.global.u64 [%rd3+8], %rd4;
    ld.global.u64 %rd5, [steps];
    add.u64 %rd5, %rd5, 1;
    st.global.u64 [steps], %rd5;
    ret;
}
"""
PAGE = 64 << 10
PAGES = 96
PATIENCE = 120.0


def check(result: tuple) -> object:
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        raise SystemExit(f"witness: {error.name}")
    return values[0] if len(values) == 1 else values


def main() -> None:
    released = Path(sys.argv[1])
    check(driver.cuInit(0))
    check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(0))))
    module = check(driver.cuModuleLoadData(PTX + b"\0"))
    mark = check(driver.cuModuleGetFunction(module, b"mark"))
    counter, _ = check(driver.cuModuleGetGlobal(module, b"steps"))
    buffer = check(driver.cuMemAlloc(PAGES * PAGE))
    check(driver.cuMemsetD8(buffer, 0, PAGES * PAGE))
    stream = check(driver.cuStreamCreate(0))
    first, last = check(driver.cuEventCreate(0)), check(driver.cuEventCreate(0))
    check(driver.cuEventRecord(first, stream))
    seen, one, step = np.zeros(PAGES, np.uint64), np.zeros(1, np.uint64), 0
    began = time.monotonic()
    while step < PAGES or not released.exists():
        index = step % PAGES
        values = (np.uint64(int(buffer)), np.uint64(index * PAGE))
        holders = [np.array([value]) for value in values]
        arguments = np.array([holder.ctypes.data for holder in holders], np.uint64)
        check(driver.cuLaunchKernel(mark, 1, 1, 1, 1, 1, 1, 0, stream, arguments.ctypes.data, 0))
        check(driver.cuMemcpyDtoHAsync(one.ctypes.data, int(buffer) + index * PAGE, 8, stream))
        check(driver.cuStreamSynchronize(stream))
        check(driver.cuEventRecord(last, stream))
        seen[index] = one[0]
        step += 1
        if step % 20 == 0:
            print(f"step {step}", flush=True)
        time.sleep(0.005)
        if time.monotonic() - began > PATIENCE:
            raise SystemExit("nobody released the program")
    check(driver.cuEventSynchronize(last))
    elapsed, ran = float(check(driver.cuEventElapsedTime(first, last))), (time.monotonic() - began) * 1000
    whole = np.zeros(PAGES * PAGE // 8, np.uint64)
    check(driver.cuMemcpyDtoH(whole.ctypes.data, buffer, whole.nbytes))
    check(driver.cuMemcpyDtoH(one.ctypes.data, counter, 8))
    table = whole.reshape(PAGES, PAGE // 8)
    if int(one[0]) != step:
        raise SystemExit(f"the device counted {one[0]} steps, the program made {step}")
    for column in (0, 1):
        wrong = np.flatnonzero(table[:, column] != seen)
        if len(wrong):
            raise SystemExit(f"{len(wrong)} of {PAGES} times differ from what the program saw, first at {wrong[0]}")
    if not ran * 0.2 < elapsed <= ran * 1.05 + 50:
        raise SystemExit(f"the events lie {elapsed:.0f} ms apart, the program ran for {ran:.0f} ms")
    print("digest", hashlib.sha256(b"as seen").hexdigest(), flush=True)


if __name__ == "__main__":
    main()
