"""A program none of whose memory a replay can compute again, and that knows every byte of it.

usage: unrepeatable.py FILE. Each step's kernels write the device's timer to a word and mix that word into all of
memory; the program reads the word back and does the same to a model of its own. When FILE is there all of memory is
compared with the model: it must be what the program was shown, not what a replay came to. Prints ``digest`` of the
word when all is well.
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
.visible .entry stamp(.param .u64 word)
{
    .reg .b32 %r<2>; .reg .b64 %d<3>;
    ld.param.u64 %d1, [word];
    mov.u64 %d2, %globaltimer;
    cvt.u32.u64 %r1, %d2;
    st.global.u32 [%d1], %r1;
    ret;
}
.visible .entry mix(.param .u64 data, .param .u64 word)
{
    .reg .b32 %r<8>; .reg .b64 %d<4>;
    ld.param.u64 %d1, [data]; ld.param.u64 %d3, [word];
    mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x;
    mad.lo.u32 %r2, %r2, %r3, %r4;
    ld.global.u32 %r5, [%d3];
    mul.wide.u32 %d2, %r2, 4; add.u64 %d1, %d1, %d2;
    ld.global.u32 %r6, [%d1];
    mad.lo.u32 %r6, %r6, 1664525, %r5;
    add.u32 %r6, %r6, %r2;
    st.global.u32 [%d1], %r6;
    ret;
}
"""
WORDS = 1 << 20  #: 64 pages of 64 KiB
BLOCK = 256
REST = 0.01  #: s after each step
PATIENCE = 180.0


def check(result: tuple) -> object:
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        raise SystemExit(f"unrepeatable: {error.name}")
    return values[0] if len(values) == 1 else values


def launch(function: object, blocks: int, threads: int, *addresses: int) -> None:
    holders = [np.array([address], np.uint64) for address in addresses]
    arguments = np.array([holder.ctypes.data for holder in holders], np.uint64)
    check(driver.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, 0, arguments.ctypes.data, 0))


def main() -> None:
    released = Path(sys.argv[1])
    check(driver.cuInit(0))
    check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(0))))
    module = check(driver.cuModuleLoadData(PTX + b"\0"))
    stamp, mix = (check(driver.cuModuleGetFunction(module, name)) for name in (b"stamp", b"mix"))
    data, word = int(check(driver.cuMemAlloc(4 * WORDS))), int(check(driver.cuMemAlloc(4096)))
    check(driver.cuMemsetD32(data, 1, WORDS))
    model, index = np.ones(WORDS, np.uint32), np.arange(WORDS, dtype=np.uint32)
    shown, step, began = np.zeros(1, np.uint32), 0, time.monotonic()
    while step < 20 or not released.exists():
        launch(stamp, 1, 1, word)
        launch(mix, WORDS // BLOCK, BLOCK, data, word)
        check(driver.cuMemcpyDtoH(shown.ctypes.data, word, 4))
        model *= np.uint32(1664525)
        model += shown
        model += index
        step += 1
        if step % 10 == 0:
            print(f"step {step}", flush=True)
        time.sleep(REST)
        if time.monotonic() - began > PATIENCE:
            raise SystemExit("nobody released the program")
    found = np.zeros(WORDS, np.uint32)
    check(driver.cuMemcpyDtoH(found.ctypes.data, data, found.nbytes))
    wrong = np.flatnonzero(found != model)
    if len(wrong):
        raise SystemExit(f"{len(wrong)} of {WORDS} words are not what the program was shown, first at {wrong[0]}")
    print("digest", hashlib.sha256(b"as shown").hexdigest(), flush=True)


if __name__ == "__main__":
    main()
