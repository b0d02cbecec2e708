#!/usr/bin/env python3
"""A program to be moved: holds memory, changes a known part of it at each step, prints its steps and a digest.

    python bench/move_load.py --kind weights|train|atomics --mib N [--steps S | --until FILE]

Driver API only, kernels in PTX, so that it runs natively and on any device of
ours. `weights`: 1 % of the memory changes each second. `train`: every element
changes at each step, deterministically (the shape of a training step's
optimizer). `atomics`: as train, with a term that float atomics sum up in
whatever order they come. Memory is touched before the first line is printed.
Each line: `step N T` with T the time in seconds, so that its reader sees
how long the program stood. All memory is read only for the digest at the end
(not for atomics, whose result is its own).
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver

PTX = rb"""
.version 7.0
.target sm_75
.address_size 64

.visible .entry touch(.param .u64 data, .param .u32 count, .param .u32 add)
{
    .reg .pred %p; .reg .b32 %r<8>; .reg .b64 %d<4>;
    ld.param.u64 %d1, [data]; ld.param.u32 %r1, [count]; ld.param.u32 %r5, [add];
    mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x;
    mad.lo.u32 %r2, %r2, %r3, %r4;
    setp.ge.u32 %p, %r2, %r1;
    @%p bra end;
    mul.wide.u32 %d2, %r2, 4; add.u64 %d1, %d1, %d2;
    ld.global.u32 %r6, [%d1];
    mad.lo.u32 %r6, %r6, 1664525, %r5;
    add.u32 %r6, %r6, %r2;
    st.global.u32 [%d1], %r6;
end: ret;
}

.visible .entry sum(.param .u64 data, .param .u32 count, .param .u64 total)
{
    .reg .pred %p; .reg .b32 %r<8>; .reg .b64 %d<6>; .reg .f32 %f<4>;
    ld.param.u64 %d1, [data]; ld.param.u32 %r1, [count]; ld.param.u64 %d3, [total];
    mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x;
    mad.lo.u32 %r2, %r2, %r3, %r4;
    setp.ge.u32 %p, %r2, %r1;
    @%p bra end;
    cvt.rn.f32.u32 %f1, %r2; mul.f32 %f1, %f1, 0f3DCCCCCD;
    atom.global.add.f32 %f2, [%d3], %f1;
end: ret;
}
"""
BLOCK = 256
CHUNK = 1 << 28  #: bytes of one allocation


def check(result: Any) -> Any:
    error, *values = result
    if int(error):
        raise SystemExit(f"move_load: {driver.CUresult(int(error)).name}")
    return values[0] if len(values) == 1 else values


def launch(function: Any, count: int, *values: Any) -> None:
    held = [np.array([value], kind) for value, kind in values]
    pointers = np.array([one.ctypes.data for one in held], np.uint64)
    check(driver.cuLaunchKernel(function, -(-count // BLOCK), 1, 1, BLOCK, 1, 1, 0, 0, pointers.ctypes.data, 0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=("weights", "train", "atomics"), required=True)
    parser.add_argument("--mib", type=int, required=True)
    parser.add_argument("--steps", type=int, default=0, help="so many steps; 0: until the file of --until is there")
    parser.add_argument("--until", type=Path, default=Path("/nonexistent"))
    options = parser.parse_args()
    check(driver.cuInit(0))
    context = check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(0))))
    check(driver.cuCtxSetCurrent(context))
    module = check(driver.cuModuleLoadData(PTX + b"\0"))
    touch, total_of = (check(driver.cuModuleGetFunction(module, name)) for name in (b"touch", b"sum"))
    sizes = [min(CHUNK, (options.mib << 20) - at) for at in range(0, options.mib << 20, CHUNK)]
    chunks = [(int(check(driver.cuMemAlloc(size))), size // 4) for size in sizes]
    total = int(check(driver.cuMemAlloc(4096)))
    check(driver.cuMemsetD8(total, 0, 4096))
    for address, count in chunks:
        check(driver.cuMemsetD32(address, 1, count))
        launch(touch, count, (address, np.uint64), (count, np.uint32), (7, np.uint32))
    check(driver.cuCtxSynchronize())
    number = 0
    while (number < options.steps) if options.steps else not options.until.exists():
        number += 1
        if options.kind == "weights":
            step_weights(touch, chunks, number)
            check(driver.cuCtxSynchronize())
            time.sleep(0.01)
        else:
            for address, count in chunks:
                launch(touch, count, (address, np.uint64), (count, np.uint32), (number, np.uint32))
            if options.kind == "atomics":
                launch(total_of, 65536, (0, np.uint64), (65536, np.uint32), (total, np.uint64))
                check(driver.cuMemcpyDtoD(chunks[0][0], total, 4))
            check(driver.cuCtxSynchronize())
        print(f"step {number} {time.time():.6f}", flush=True)
    digest = hashlib.sha256()
    for address, count in chunks if options.kind != "atomics" else ():
        data = np.empty(count, np.uint32)
        check(driver.cuMemcpyDtoH(data.ctypes.data, address, 4 * count))
        digest.update(data)
    print("digest", digest.hexdigest(), flush=True)
    return 0


def step_weights(touch: Any, chunks: list[tuple[int, int]], number: int) -> None:
    """One of a hundred steps a second, so 1/10,000 of the memory: 1 % a second."""
    words = max(1024, sum(count for _, count in chunks) // 10000)
    address, count = chunks[number % len(chunks)]
    at = (number * words) % max(1, count - words)
    launch(touch, words, (address + 4 * at, np.uint64), (words, np.uint32), (number, np.uint32))


if __name__ == "__main__":
    sys.exit(main())
