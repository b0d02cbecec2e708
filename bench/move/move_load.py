#!/usr/bin/env python3
"""A program to be moved: holds memory, changes a known part of it at each step, prints its steps and a digest.

    python bench/move/move_load.py --kind weights|train|few|atomics|timer --mib N [--steps S | --until FILE]

Driver API only, kernels in PTX, so that it runs natively and on any device of
ours. Memory is touched before the first line is printed. Each line: `step N T`
with T the time in seconds, so that its reader sees how long the program stood.

=========  =====================================================================================================
weights    1 % of the memory changes each second
train      every element changes at each step (the shape of a training step's optimizer)
few        as train, and one page holds what no replay can repeat: the device's timer
atomics    as train, with a term that float atomics sum up in whatever order they come: soon all memory differs
timer      the same with the device's timer as the term: for devices whose atomics come in one order
=========  =====================================================================================================

With --share it rests after each step (but `weights`, which rests anyway), so that the device has room for a replay
beside it. Of the first three the memory is read at the end and its digest printed, which :func:`expected_digest`
computes without any device.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from cuda.bindings import driver

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.worker.kernels import PTX  # noqa: E402

KINDS = ("weights", "train", "few", "atomics", "timer")
DETERMINISTIC = ("weights", "train", "few")
FACTOR, FIRST = 1664525, 7
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
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--mib", type=int, required=True)
    parser.add_argument("--steps", type=int, default=0, help="so many steps; 0: until the file of --until is there")
    parser.add_argument("--until", type=Path, default=Path("/nonexistent"))
    parser.add_argument("--share", type=float, default=1.0, help="of its time that it works, else it rests")
    options = parser.parse_args()
    check(driver.cuInit(0))
    context = check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(0))))
    check(driver.cuCtxSetCurrent(context))
    module = check(driver.cuModuleLoadData(PTX + b"\0"))
    names = ("touch", "sum", "stamp", "mix")
    functions = {name: check(driver.cuModuleGetFunction(module, name.encode())) for name in names}
    touch = functions["touch"]
    chunks = [(int(check(driver.cuMemAlloc(4 * count))), count) for count in counts(options.mib)]
    total = int(check(driver.cuMemAlloc(4096)))
    check(driver.cuMemsetD8(total, 0, 4096))
    for address, count in chunks:
        check(driver.cuMemsetD32(address, 1, count))
        launch(touch, count, (address, np.uint64), (count, np.uint32), (FIRST, np.uint32))
    check(driver.cuCtxSynchronize())
    number = 0
    while (number < options.steps) if options.steps else not options.until.exists():
        number += 1
        began = time.monotonic()
        if options.kind == "weights":
            step_weights(touch, chunks, number)
            check(driver.cuCtxSynchronize())
            time.sleep(0.01)
        else:
            step_all(options.kind, functions, chunks, total, number)
            check(driver.cuCtxSynchronize())
            time.sleep((time.monotonic() - began) * (1 / options.share - 1))
        print(f"step {number} {time.time():.6f}", flush=True)
    digest = blake3(max_threads=blake3.AUTO)
    for address, count in chunks if options.kind in DETERMINISTIC else ():
        data = np.empty(count, np.uint32)
        check(driver.cuMemcpyDtoH(data.ctypes.data, address, 4 * count))
        digest.update(data.view(np.uint8))
    print("digest", digest.hexdigest(), flush=True)
    return 0


def counts(mib: int) -> list[int]:
    """Words of each allocation."""
    return [min(CHUNK, (mib << 20) - at) // 4 for at in range(0, mib << 20, CHUNK)]


def window(words_of: list[int], number: int) -> tuple[int, int, int]:
    """(chunk, first word, words) that step ``number`` of `weights` changes.

    One of a hundred steps a second, so 1/10,000 of the memory: 1 % a second.
    """
    words = min(max(1024, sum(words_of) // 10000), min(words_of))
    chunk = number % len(words_of)
    return chunk, (number * words) % max(1, words_of[chunk] - words), words


def step_weights(touch: Any, chunks: list[tuple[int, int]], number: int) -> None:
    chunk, at, words = window([count for _, count in chunks], number)
    launch(touch, words, (chunks[chunk][0] + 4 * at, np.uint64), (words, np.uint32), (number, np.uint32))


def step_all(kind: str, functions: dict[str, Any], chunks: list[tuple[int, int]], total: int, number: int) -> None:
    """A step that changes every element; ``total`` is where a term lies that cannot be repeated."""
    if kind == "atomics":
        launch(functions["sum"], 65536, (0, np.uint64), (65536, np.uint32), (total, np.uint64))
    elif kind in ("few", "timer"):
        launch(functions["stamp"], 1, (total, np.uint64))
    for address, count in chunks:
        if kind in ("atomics", "timer"):
            launch(functions["mix"], count, (address, np.uint64), (count, np.uint32), (total, np.uint64))
        else:
            launch(functions["touch"], count, (address, np.uint64), (count, np.uint32), (number, np.uint32))


def expected_digest(kind: str, mib: int, steps: int) -> str:
    """What a deterministic load prints after so many steps. All arithmetic is modulo 2³²."""
    digest = blake3(max_threads=blake3.AUTO)
    words_of = counts(mib)
    factor = slope = constant = 0  # of n steps over everything: x → factor · x + slope · i + constant
    if kind != "weights":
        factor = 1
        for number in range(1, steps + 1):
            factor, slope, constant = ((one * FACTOR + more) % 2**32 for one, more in
                                       ((factor, 0), (slope, 1), (constant, number)))

    def memory(chunk: int) -> Any:
        data: Any
        index = np.arange(words_of[chunk], dtype=np.uint32)
        if kind == "weights":
            data = index + np.uint32(FACTOR + FIRST)
            for number in range(1, steps + 1):
                where, at, words = window(words_of, number)
                if where == chunk:
                    part = data[at:at + words]
                    part *= np.uint32(FACTOR)
                    part += index[:words]
                    part += np.uint32(number)
            return data
        data = index * np.uint32((factor + slope) % 2**32)
        data += np.uint32((factor * (FACTOR + FIRST) + constant) % 2**32)
        return data

    workers = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:  # numpy computes beside others; 64 GiB one after the other take minutes
        ahead = deque(pool.submit(memory, chunk) for chunk in range(min(workers, len(words_of))))
        for following in range(len(ahead), len(words_of) + len(ahead)):
            data: Any = ahead.popleft().result()
            if following < len(words_of):
                ahead.append(pool.submit(memory, following))
            digest.update(data.view(np.uint8))
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
