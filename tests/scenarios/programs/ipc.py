"""Two processes share device memory by handle, in both directions: `ipc.py MODE [FILE]`.

`exchange`: each changes what the other exported, with kernels and copies; the digest is that of one process.
`hold`: both hold memory of each other until FILE is there, then go on. `wrong`: handles that may not be opened.
"""

import hashlib
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from common import check, kernels, start
from cuda.bindings import driver

COUNT = 900_001  # of numbers: more than one granule, no multiple of a page
SMALL = 1000  # … in a granule with others
ROUNDS = 5
SOURCE = rb"""
extern "C" __global__ void step(unsigned *x, unsigned n, unsigned k) {
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) x[i] = x[i] * k + i;
}
"""
LAZY = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value


def step(x: np.ndarray, k: int) -> np.ndarray:
    return (x * np.uint32(k) + np.arange(len(x), dtype=np.uint32)).astype(np.uint32)


class Side:
    """One process: what it has, what it opened of the other."""

    def __init__(self, seed: int) -> None:
        start()
        self.module, self.kernel = kernels(SOURCE, "step")
        self.seed = seed
        check(driver.cuMemAlloc(512))  # so that the next one is not the first of its granule
        self.small, self.large = check(driver.cuMemAlloc(4 * SMALL)), check(driver.cuMemAlloc(4 * COUNT))
        for memory, count in ((self.small, SMALL), (self.large, COUNT)):
            host = np.arange(count, dtype=np.uint32) * np.uint32(seed)
            check(driver.cuMemcpyHtoD(memory, host.ctypes.data, host.nbytes))

    def handles(self) -> list[bytes]:
        return [bytes(check(driver.cuIpcGetMemHandle(memory)).reserved) for memory in (self.small, self.large)]

    def open(self, handles: list[bytes]) -> None:
        self.theirs = [check(driver.cuIpcOpenMemHandle(handle(data), LAZY)) for data in handles]

    def step(self, memory, count: int, k: int) -> None:
        arguments = np.array([int(memory)], np.uint64), np.array([count], np.uint32), np.array([k], np.uint32)
        pointers = np.array([one.ctypes.data for one in arguments], np.uint64)
        check(driver.cuLaunchKernel(self.kernel, 64, 1, 1, 128, 1, 1, 0, 0, pointers.ctypes.data, 0))

    def round(self, k: int) -> None:
        for memory, count in zip(self.theirs, (SMALL, COUNT), strict=True):
            self.step(memory, count, k)
        check(driver.cuCtxSynchronize())

    def digest(self, memories) -> str:
        found = hashlib.sha256()
        for memory, count in zip(memories, (SMALL, COUNT), strict=True):
            host = np.zeros(count, np.uint32)
            check(driver.cuMemcpyDtoH(host.ctypes.data, memory, host.nbytes))
            found.update(host.tobytes())
        return found.hexdigest()[:16]


def handle(data: bytes) -> driver.CUipcMemHandle:
    made = driver.CUipcMemHandle()
    made.reserved = data
    return made


def expected() -> str:
    found = []
    for seed in (3, 7):
        one = hashlib.sha256()
        for count in (SMALL, COUNT):
            x = np.arange(count, dtype=np.uint32) * np.uint32(seed)
            for k in range(ROUNDS):
                x = step(x, 2 * k + 3)
            one.update(x.tobytes())
        found.append(one.hexdigest()[:16])
    return " ".join(found)


def say(pipe, *words) -> None:
    print(*[word.hex() if isinstance(word, bytes) else word for word in words], file=pipe, flush=True)


def read(pipe) -> list[str]:
    line = pipe.readline()
    if not line:
        raise SystemExit("the other process has gone")
    return line.split()


def child() -> None:
    """Does what it is told, line by line."""
    side = Side(7)
    say(sys.stdout, *side.handles())
    side.open([bytes.fromhex(word) for word in read(sys.stdin)])
    say(sys.stdout, "ready")
    while True:
        what, *rest = read(sys.stdin)
        if what == "round":
            side.round(int(rest[0]))
            say(sys.stdout, "done")
        elif what == "digest":
            say(sys.stdout, side.digest((side.small, side.large)), side.digest(side.theirs))
        elif what == "code":
            data = bytes.fromhex(rest[0])
            say(sys.stdout, int(driver.cuIpcOpenMemHandle(handle(data), LAZY)[0]))
        elif what == "close":
            codes = [int(driver.cuIpcCloseMemHandle(memory)[0]) for memory in side.theirs]
            codes += [int(driver.cuIpcCloseMemHandle(side.theirs[0])[0])]
            codes += [int(driver.cuMemsetD8(side.theirs[0], 0, 1)[0])]
            say(sys.stdout, *codes)
        elif what == "end":
            return


class Other:
    """The other process, and a session of its own."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, __file__, "child"], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)

    def ask(self, *words) -> list[str]:
        say(self.process.stdin, *words)
        return read(self.process.stdout)

    def end(self) -> int:
        say(self.process.stdin, "end")
        return self.process.wait()


def wrong(side: Side, other: Other) -> None:
    small, large = side.handles()
    assert side.handles() == [small, large]  # the same allocation has one handle
    print("own", int(driver.cuIpcOpenMemHandle(handle(small), LAZY)[0]))
    print("flags", int(driver.cuIpcOpenMemHandle(handle(small), 0)[0]))
    print("nothing", int(driver.cuIpcOpenMemHandle(handle(bytes(64)), LAZY)[0]))
    codes = set()
    for bit in range(0, 512, 7):
        data = bytearray(large)
        data[bit // 8] ^= 1 << bit % 8
        codes.add(other.ask("code", bytes(data))[0])
    print("flipped", *sorted(codes))
    pooled = check(driver.cuMemAllocAsync(4096, 0))
    print("pooled", int(driver.cuIpcGetMemHandle(pooled)[0]))
    print("host", int(driver.cuIpcGetMemHandle(4096)[0]))
    print("imported", int(driver.cuIpcGetMemHandle(side.theirs[0])[0]), int(driver.cuMemFree(side.theirs[0])[0]))
    print("inside", bytes(check(driver.cuIpcGetMemHandle(int(side.large) + 5000)).reserved) == large)
    again = check(driver.cuIpcOpenMemHandle(handle(side.given[0]), LAZY))
    print("again", int(again) == int(side.theirs[0]), int(driver.cuIpcCloseMemHandle(again)[0]))
    print("range", [int(one) for one in check(driver.cuMemGetAddressRange(int(side.theirs[1]) + 17))]
          == [int(side.theirs[1]), 4 * COUNT])
    freed = check(driver.cuMemAlloc(4 * COUNT))
    token = bytes(check(driver.cuIpcGetMemHandle(freed)).reserved)
    check(driver.cuMemFree(freed))
    print("freed", *other.ask("code", token))
    back = check(driver.cuMemAlloc(4 * COUNT))
    assert int(back) == int(freed), "the address is used again"
    print("reused", *other.ask("code", token), bytes(check(driver.cuIpcGetMemHandle(back)).reserved) != token)
    print("closed", *other.ask("close"))


def main(mode: str, *rest: str) -> None:
    if mode == "expected":
        print(expected())
        return
    side, other = Side(3), Other()
    side.given = [bytes.fromhex(word) for word in read(other.process.stdout)]
    side.open(side.given)
    assert other.ask(*side.handles()) == ["ready"]
    rounds = range(ROUNDS)
    if mode == "wrong":
        wrong(side, other)
    elif mode == "export":
        print("handle", side.handles()[1].hex(), flush=True)
    else:
        for k in rounds:
            if k == 2 and mode == "hold":
                print("holding", flush=True)
                while not Path(rest[0]).exists():
                    time.sleep(0.05)
                    side.digest(side.theirs)
                    assert other.ask("digest")
            assert other.ask("round", 2 * k + 3) == ["done"]
            side.round(2 * k + 3)
        theirs, mine = other.ask("digest")
        assert (theirs, mine) == (side.digest(side.theirs), side.digest((side.small, side.large)))
        print(mine, theirs, flush=True)
    if mode == "export":
        while not Path(rest[0]).exists():
            time.sleep(0.05)
    print("end", other.end(), flush=True)


child() if sys.argv[1] == "child" else main(*sys.argv[1:])
