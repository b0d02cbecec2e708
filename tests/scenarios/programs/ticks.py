"""A small session that lasts until told to end, and knows at any moment what its device must hold.

usage: ticks.py FILE [REST]. Until FILE appears, each step's kernel mixes the step's number into 1,024
words; the program does the same on the host. Each fourth step it copies the words out and compares,
then rests for REST seconds (0.05). At the end it prints ``mirror`` with the digest of its own words and
``digest`` with that of the device's: they must be equal. Made to be run forty times side by side: PTX, no compiler.
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
.visible .entry mix(.param .u64 words, .param .u32 step)
{
    .reg .u32 %r<8>;
    .reg .u64 %rd<4>;
    ld.param.u64 %rd1, [words];
    ld.param.u32 %r1, [step];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.u32 %r5, %r2, %r3, %r4;
    mul.wide.u32 %rd2, %r5, 4;
    add.u64 %rd3, %rd1, %rd2;
    ld.global.u32 %r6, [%rd3];
    mul.lo.u32 %r6, %r6, 1664525;
    add.u32 %r6, %r6, 1013904223;
    add.u32 %r6, %r6, %r5;
    xor.b32 %r6, %r6, %r1;
    st.global.u32 [%rd3], %r6;
    ret;
}
"""
WORDS = 1024
PATIENCE = 1800.0  #: s


def check(result: tuple) -> object:
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        raise SystemExit(f"ticks: {error.name}")
    return values[0] if len(values) == 1 else values


def main() -> None:
    released, rest = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.05
    check(driver.cuInit(0))
    check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(0))))
    module = check(driver.cuModuleLoadData(PTX + b"\0"))
    mix = check(driver.cuModuleGetFunction(module, b"mix"))
    memory = check(driver.cuMemAlloc(4 * WORDS))
    check(driver.cuMemsetD8(memory, 0, 4 * WORDS))
    index = np.arange(WORDS, dtype=np.uint32)
    mine, device, step = np.zeros(WORDS, np.uint32), np.zeros(WORDS, np.uint32), 0
    began = time.monotonic()
    while step % 4 or not released.exists():
        address, number = np.array([int(memory)], np.uint64), np.array([step & 0xFFFFFFFF], np.uint32)
        arguments = np.array([address.ctypes.data, number.ctypes.data], np.uint64)
        check(driver.cuLaunchKernel(mix, WORDS // 128, 1, 1, 128, 1, 1, 0, 0, arguments.ctypes.data, 0))
        mine = (mine * np.uint32(1664525) + np.uint32(1013904223) + index) ^ number[0]
        step += 1
        if step % 4 == 0:
            check(driver.cuMemcpyDtoH(device.ctypes.data, memory, device.nbytes))
            if not np.array_equal(mine, device):
                raise SystemExit(f"ticks: {np.count_nonzero(mine != device)} words differ after step {step}")
            time.sleep(rest)
        if step % 40 == 0:
            print(f"step {step}", flush=True)
        if time.monotonic() - began > PATIENCE:
            raise SystemExit("nobody released the program")
    check(driver.cuMemcpyDtoH(device.ctypes.data, memory, device.nbytes))
    check(driver.cuMemFree(memory))
    print("mirror", hashlib.sha256(mine.tobytes()).hexdigest(), flush=True)
    print("digest", hashlib.sha256(device.tobytes()).hexdigest(), flush=True)


if __name__ == "__main__":
    main()
