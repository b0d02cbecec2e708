"""Two threads, two streams that nothing orders but the host: A observes that its kernel is done, in one of six ways,
then tells B through an Event; B's kernel reads what A wrote, and A overwrites it in the next round.

A replay that gave B's launch to the device before A's was complete, or A's next one before B's, would end with
another sum. Checked against NumPy.
"""

import ctypes
import hashlib
import threading
import time

import numpy as np
from common import check, kernels, start
from cuda.bindings import driver
from gates import gate

ROUNDS, N, WORK, GATES = 240, 2048, 400, {60: "1", 121: "2", 182: "3"}
context = start()
module, fill, add = kernels(b"""
extern "C" __global__ void fill(unsigned* a, unsigned round, int n, int work) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { unsigned v = i; for (int k = 0; k < work; k++) v = v * 1664525u + round; a[i] = v; }
}
extern "C" __global__ void add(const unsigned* a, unsigned* sum, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) sum[i] = sum[i] * 31u + a[i];
}
""", "fill", "add")
data, total = (int(check(driver.cuMemAlloc(N * 4))) for _ in range(2))
check(driver.cuMemsetD32(total, 1, N))
check(driver.cuCtxSynchronize())  # the streams below do not wait for the legacy one
NON_BLOCKING = 1
stream_a, stream_b = (check(driver.cuStreamCreate(NON_BLOCKING)) for _ in range(2))
event = check(driver.cuEventCreate(2))
word = np.zeros(1, np.uint32)
POINTER, INT, UINT = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
a_done, b_done = threading.Event(), threading.Event()
failures = []


def launch(function, stream, values, types):
    check(driver.cuLaunchKernel(function, N // 256, 1, 1, 256, 1, 1, 0, stream, (values, types), 0))


def poll(query, handle):
    while int(error := query(handle)[0]) == 600:
        time.sleep(0.0002)  # lets the other thread have the interpreter
    assert int(error) == 0, error


WAYS = (
    lambda: check_(driver.cuStreamSynchronize(stream_a)),
    lambda: poll(driver.cuEventQuery, event),
    lambda: poll(driver.cuStreamQuery, stream_a),
    lambda: check_(driver.cuEventSynchronize(event)),
    lambda: check_(driver.cuMemcpyDtoHAsync(word.ctypes.data, data, 4, stream_a)),  # pageable: returns when done
    lambda: check_(driver.cuCtxSynchronize()),
)


def check_(result):
    assert int(result[0]) == 0, result


def a():
    check_(driver.cuCtxSetCurrent(context))
    for number in range(ROUNDS):
        launch(fill, stream_a, (data, number, N, WORK), (POINTER, UINT, INT, INT))
        check_(driver.cuEventRecord(event, stream_a))
        if number in GATES:
            gate(GATES[number])
        WAYS[number % len(WAYS)]()
        a_done.set()
        b_done.wait()
        b_done.clear()


def b():
    check_(driver.cuCtxSetCurrent(context))
    for number in range(ROUNDS):
        a_done.wait()
        a_done.clear()
        launch(add, stream_b, (data, total, N), (POINTER, POINTER, INT))
        check_(driver.cuStreamSynchronize(stream_b)) if number % 2 else poll(driver.cuStreamQuery, stream_b)
        b_done.set()


def guarded(work):
    def run():
        try:
            work()
        except BaseException as error:  # noqa: BLE001
            failures.append(repr(error))
            a_done.set()
            b_done.set()
    return run


threads = [threading.Thread(target=guarded(work), daemon=True) for work in (a, b)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failures, failures
result = np.zeros(N, np.uint32)
check(driver.cuMemcpyDtoH(result.ctypes.data, total, N * 4))
expected, index = np.ones(N, np.uint32), np.arange(N, dtype=np.uint32)
with np.errstate(over="ignore"):
    for number in range(ROUNDS):
        value = index
        for _ in range(WORK):
            value = value * np.uint32(1664525) + np.uint32(number)
        expected = expected * np.uint32(31) + value
assert np.array_equal(result, expected), "the threads' order was lost"
print("digest", hashlib.sha256(result.tobytes()).hexdigest())
