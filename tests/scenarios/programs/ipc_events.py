"""Two processes order their work on shared memory by each other's events alone: `ipc_events.py MODE`.

`order`: each step of one waits, on its stream, for the last step of the other; the digest is that of one process.
`late`: an event that is not complete when it is opened, asked for, waited for. `wrong`: what is refused.
"""

import hashlib
import subprocess
import sys
import time

import numpy as np
from common import check, kernels, start
from cuda.bindings import driver

COUNT = 300_001
ROUNDS = 12
SOURCE = rb"""
extern "C" __global__ void step(unsigned *x, unsigned n, unsigned k) {
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) x[i] = x[i] * k + i;
}
"""
FLAGS = int(driver.CUevent_flags.CU_EVENT_INTERPROCESS) | int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)


def code(result) -> int:
    return int(result[0])


class Side:
    def __init__(self) -> None:
        start()
        self.module, self.kernel = kernels(SOURCE, "step")
        self.stream = check(driver.cuStreamCreate(1))
        self.event = check(driver.cuEventCreate(FLAGS))

    def handle(self) -> str:
        return bytes(check(driver.cuIpcGetEventHandle(self.event)).reserved).hex()

    def open_event(self, text: str):
        handle = driver.CUipcEventHandle()
        handle.reserved = bytes.fromhex(text)
        return driver.cuIpcOpenEventHandle(handle)

    def open_memory(self, text: str):
        handle = driver.CUipcMemHandle()
        handle.reserved = bytes.fromhex(text)
        return check(driver.cuIpcOpenMemHandle(handle, 1))

    def step(self, memory, k: int) -> None:
        values = np.array([int(memory)], np.uint64), np.array([COUNT], np.uint32), np.array([k], np.uint32)
        pointers = np.array([one.ctypes.data for one in values], np.uint64)
        check(driver.cuLaunchKernel(self.kernel, 16, 1, 1, 128, 1, 1, 0, self.stream, pointers.ctypes.data, 0))
        check(driver.cuEventRecord(self.event, self.stream))

    def read(self, memory) -> np.ndarray:
        host = np.zeros(COUNT, np.uint32)
        check(driver.cuMemcpyDtoHAsync(host.ctypes.data, memory, host.nbytes, self.stream))
        check(driver.cuStreamSynchronize(self.stream))
        return host


def expected() -> str:
    x = np.arange(COUNT, dtype=np.uint32)
    for k in range(2 * ROUNDS):
        x = (x * np.uint32(2 * k + 3) + np.arange(COUNT, dtype=np.uint32)).astype(np.uint32)
    return hashlib.sha256(x.tobytes()).hexdigest()[:16]


def child() -> None:
    side = Side()
    print(side.handle(), flush=True)
    memory, event = sys.stdin.readline().split()
    memory, event = side.open_memory(memory), check(side.open_event(event))
    print("ready", flush=True)
    for line in sys.stdin:
        what, *rest = line.split()
        if what == "step":
            check(driver.cuStreamWaitEvent(side.stream, event, 0))
            side.step(memory, int(rest[0]))
            print("given", flush=True)
        elif what == "late":
            first = code(driver.cuEventQuery(event))
            check(driver.cuStreamWaitEvent(side.stream, event, 0))
            busy = code(driver.cuStreamQuery(side.stream))
            print("asked", first, busy, flush=True)
            host = side.read(memory)
            check(driver.cuEventSynchronize(event))
            print("found", *np.unique(host), code(driver.cuEventQuery(event)), flush=True)
        elif what == "wrong":
            print("record", code(driver.cuEventRecord(event, side.stream)),
                  "elapsed", code(driver.cuEventElapsedTime(event, event)),
                  "handle", code(driver.cuIpcGetEventHandle(event)), flush=True)
        elif what == "open":
            print("open", code(side.open_event(rest[0])), flush=True)
        elif what == "destroy":
            print("destroyed", code(driver.cuEventDestroy(event)), code(driver.cuEventQuery(event)), flush=True)


def main(mode: str) -> None:
    if mode == "expected":
        print(expected())
        return
    side = Side()
    memory = check(driver.cuMemAlloc(4 * COUNT))
    host = np.arange(COUNT, dtype=np.uint32)
    check(driver.cuMemcpyHtoD(memory, host.ctypes.data, host.nbytes))
    handle = bytes(check(driver.cuIpcGetMemHandle(memory)).reserved).hex()
    gate = check(driver.cuMemAlloc(4))
    check(driver.cuMemsetD32(gate, 0, 1))
    check(driver.cuCtxSynchronize())
    if mode == "late":  # recorded before the handle is taken, as PyTorch does it
        check(driver.cuStreamWaitValue32(side.stream, gate, 1, 0))
        check(driver.cuMemsetD32Async(memory, 7, COUNT, side.stream))
        check(driver.cuEventRecord(side.event, side.stream))
    other = subprocess.Popen([sys.executable, __file__, "child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             text=True)

    def ask(*words) -> str:
        print(*words, file=other.stdin, flush=True)
        return other.stdout.readline().strip()

    theirs = check(side.open_event(other.stdout.readline().strip()))
    assert ask(handle, side.handle()) == "ready"
    if mode == "order":
        for k in range(0, 2 * ROUNDS, 2):
            check(driver.cuStreamWaitEvent(side.stream, theirs, 0))
            side.step(memory, 2 * k + 3)
            assert ask("step", 2 * k + 5) == "given"
        check(driver.cuStreamWaitEvent(side.stream, theirs, 0))
        print(hashlib.sha256(side.read(memory).tobytes()).hexdigest()[:16])
    elif mode == "late":
        print(ask("late"))
        time.sleep(0.3)
        check(driver.cuStreamWriteValue32(check(driver.cuStreamCreate(1)), gate, 1, 0))
        print(other.stdout.readline().strip())
    else:
        plain = check(driver.cuEventCreate(0))
        print("plain", code(driver.cuIpcGetEventHandle(plain)), "timed",
              code(driver.cuEventCreate(int(driver.CUevent_flags.CU_EVENT_INTERPROCESS))))
        own = side.handle()
        print("own", code(side.open_event(own)), "nothing", code(side.open_event(bytes(64).hex())),
              "memory", code(side.open_event(handle)))
        print(ask("wrong"))
        print(ask("open", own[:-2] + f"{int(own[-2:], 16) ^ 1:02x}"), ask("open", own))
        check(driver.cuEventDestroy(side.event))
        print(ask("open", own), ask("destroy"))
    other.stdin.close()
    print("end", other.wait(), flush=True)


child() if sys.argv[1] == "child" else main(sys.argv[1])
