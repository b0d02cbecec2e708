"""Trains all the while: momentum towards batches that the host uploads; NumPy does the same, bit for bit.

usage: trainer.py --until FILE | --steps N. Prints ``step N`` every 20 steps, at which a piece of the weights is
compared with NumPy's; at the end all of weights and momentum is, and its digest is printed behind ``steps N``.
With --until it rests after each step, so that it does not starve what moves it.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from pathlib import Path

import numpy as np
from cuda.bindings import driver

PTX = rb"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry train(.param .u64 weights, .param .u64 momentum, .param .u64 batch)
{
    .reg .b32 %r<5>; .reg .b64 %d<6>; .reg .f32 %f<8>;
    ld.param.u64 %d1, [weights]; ld.param.u64 %d2, [momentum]; ld.param.u64 %d3, [batch];
    mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x;
    mad.lo.u32 %r1, %r1, %r2, %r3;
    mul.wide.u32 %d4, %r1, 4;
    add.u64 %d1, %d1, %d4; add.u64 %d2, %d2, %d4; add.u64 %d3, %d3, %d4;
    ld.global.f32 %f1, [%d1]; ld.global.f32 %f2, [%d2]; ld.global.f32 %f3, [%d3];
    sub.rn.f32 %f4, %f1, %f3;
    mul.rn.f32 %f2, %f2, 0f3F666666;
    add.rn.f32 %f2, %f2, %f4;
    mul.rn.f32 %f5, %f2, 0f3C23D70A;
    sub.rn.f32 %f1, %f1, %f5;
    st.global.f32 [%d1], %f1; st.global.f32 [%d2], %f2;
    ret;
}
"""
COUNT = 1 << 16  #: a batch is 256 KiB, which has a segment of its own
BLOCK = 256
BATCHES = 16  #: made once; another one is uploaded every 10 steps
LOOK = 256  #: weights that are compared on the way
REST = 0.004  #: s
PATIENCE = 3600.0


def check(result: tuple) -> object:
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        raise SystemExit(f"trainer: {error.name}")
    return values[0] if len(values) == 1 else values


class Model:
    """The same in NumPy; every operation is rounded once, as the kernel's are."""

    def __init__(self) -> None:
        chance = np.random.default_rng(3)
        self.weights = chance.standard_normal(COUNT, np.float32)
        self.momentum = np.zeros(COUNT, np.float32)
        self.batches = chance.standard_normal((BATCHES, COUNT), np.float32)

    def step(self, number: int) -> None:
        gradient = self.weights - self.batches[number // 10 % BATCHES]
        self.momentum *= np.uint32(0x3F666666).view(np.float32)
        self.momentum += gradient
        self.weights -= self.momentum * np.uint32(0x3C23D70A).view(np.float32)


def read(address: int, count: int) -> np.ndarray:
    found = np.empty(count, np.float32)
    check(driver.cuMemcpyDtoH(found.ctypes.data, address, found.nbytes))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--until", type=Path, default=Path("/nonexistent"))
    parser.add_argument("--steps", type=int, default=0)
    options = parser.parse_args()
    check(driver.cuInit(0))
    check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(0))))
    module = check(driver.cuModuleLoadData(PTX + b"\0"))
    train = check(driver.cuModuleGetFunction(module, b"train"))
    model = Model()
    weights, momentum, batch = (int(check(driver.cuMemAlloc(4 * COUNT))) for _ in range(3))
    check(driver.cuMemcpyHtoD(weights, model.weights.ctypes.data, 4 * COUNT))
    check(driver.cuMemsetD32(momentum, 0, COUNT))
    holders = [np.array([address], np.uint64) for address in (weights, momentum, batch)]
    arguments = np.array([holder.ctypes.data for holder in holders], np.uint64)
    number, began = 0, time.monotonic()
    while number < options.steps or not (options.steps or options.until.exists()):
        if number % 10 == 0:
            check(driver.cuMemcpyHtoD(batch, model.batches[number // 10 % BATCHES].ctypes.data, 4 * COUNT))
        check(driver.cuLaunchKernel(train, COUNT // BLOCK, 1, 1, BLOCK, 1, 1, 0, 0, arguments.ctypes.data, 0))
        model.step(number)
        number += 1
        if number % 20 == 0:
            at = number % (COUNT - LOOK)
            if not np.array_equal(read(weights + 4 * at, LOOK), model.weights[at:at + LOOK]):
                raise SystemExit(f"weights differ from NumPy's after step {number}")
            print(f"step {number}", flush=True)
        if not options.steps:
            time.sleep(REST)
        if time.monotonic() - began > PATIENCE:
            raise SystemExit("nobody ended the training")
    check(driver.cuCtxSynchronize())
    digest = hashlib.sha256()
    for name, address, wanted in (("weights", weights, model.weights), ("momentum", momentum, model.momentum)):
        found = read(address, COUNT)
        if not np.array_equal(found, wanted):
            raise SystemExit(f"{np.count_nonzero(found != wanted)} of {COUNT} {name} differ from NumPy's")
        digest.update(found)
    print(f"steps {number}", flush=True)
    print("digest", digest.hexdigest(), flush=True)


if __name__ == "__main__":
    main()
