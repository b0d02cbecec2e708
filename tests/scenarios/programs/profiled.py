"""A profiler's view of a session: the activity API as PyTorch's Kineto uses it, by ctypes. usage: profiled.py FOLDER

Every kernel, copy and memset is seen exactly once, with its name, form, stream and times, and with the launch that it
belongs to, whatever happens to the session meanwhile.
"""

import ctypes
import hashlib
import struct
import time

import numpy as np
from common import check, kernels, start
from cuda.bindings import driver, runtime
from gates import gate

MEMCPY, MEMSET, DRIVER, RUNTIME, KERNEL, SYNCHRONIZATION, EXTERNAL = 1, 2, 4, 5, 10, 38, 39
KINDS = (MEMCPY, MEMSET, DRIVER, KERNEL, SYNCHRONIZATION, EXTERNAL)
LAUNCH, ROUNDS, N = 307, 8, 256

cupti = ctypes.CDLL("libcupti.so.13")
U64 = ctypes.c_uint64
found: list[tuple[int, bytes]] = []
buffers: dict[int, ctypes.Array] = {}


def ok(result: int) -> None:
    assert result == 0, (result, cupti.cuptiGetLastError())


@ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t),
                  ctypes.POINTER(ctypes.c_size_t))
def requested(buffer, size, most):
    made = ctypes.create_string_buffer(4096)  # small: a flush needs many
    buffers[ctypes.addressof(made)] = made
    buffer[0], size[0], most[0] = ctypes.addressof(made), 4096, 0


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
def completed(context, stream, buffer, size, valid):
    record = ctypes.c_void_p()
    while not cupti.cuptiActivityGetNextRecord(ctypes.c_void_p(buffer), ctypes.c_size_t(valid), ctypes.byref(record)):
        left = buffer + valid - record.value
        kind = ctypes.c_uint32.from_address(record.value).value
        found.append((kind, ctypes.string_at(record.value, min(left, 216))))
    del buffers[buffer]


@ctypes.CFUNCTYPE(U64)
def clock():
    return time.perf_counter_ns()


def at(record: bytes, form: str, offset: int):
    values = struct.unpack_from("<" + form, record, offset)
    return values[0] if len(values) == 1 else values


version = ctypes.c_uint32()
ok(cupti.cuptiGetVersion(ctypes.byref(version)))
assert version.value == 130001
name = ctypes.c_char_p()
ok(cupti.cuptiGetResultString(27, ctypes.byref(name)))
assert name.value == b"CUPTI_ERROR_NOT_SUPPORTED"
assert cupti.cuptiPCSamplingEnable(None) == 27 and cupti.cuptiActivityEnable(20) == 27
assert cupti.cuptiActivityEnable(0) == 21 and cupti.cuptiActivityFlushAll(0) == 7

ok(cupti.cuptiActivityRegisterCallbacks(requested, completed))
ok(cupti.cuptiActivityRegisterTimestampCallback(clock))
for kind in KINDS:
    ok(cupti.cuptiActivityEnable(kind))
assert buffers  # one is out as soon as something may be recorded: Kineto flushes only then
begun = time.perf_counter_ns()
start()
module, work, tick = kernels(b"""
extern "C" __global__ void work(unsigned* p, unsigned n) {
    if (blockIdx.x) return;  // one block alone writes: a model tells what
    unsigned v = p[threadIdx.x];
    for (unsigned k = 0; k < n; k++) v = v * 1664525u + 1013904223u;
    p[threadIdx.x] = v;
}
extern "C" __global__ void tick(unsigned* p) { atomicAdd(p, 1u); }
""", "work", "tick")
memory = int(check(driver.cuMemAlloc(N * 4)))
stream = check(driver.cuStreamCreate(1))
number = ctypes.c_uint32()
ok(cupti.cuptiGetStreamId(None, ctypes.c_void_p(int(stream)), ctypes.byref(number)))
check(driver.cuMemsetD32(memory, 7, N))
check(driver.cuCtxSynchronize())
PTR, UINT = ctypes.c_void_p, ctypes.c_uint
host = np.zeros(N, np.uint32)
for step in range(1, ROUNDS + 1):
    ok(cupti.cuptiActivityPushExternalCorrelationId(3, U64(1000 + step)))
    for part in range(4):
        check(driver.cuLaunchKernel(work, step, 1, 1, N, 1, 1, 0, stream, ((memory, 2000 * step), (PTR, UINT)), 0))
        check(driver.cuLaunchKernel(tick, 1, 1, 1, 16 + part, 1, 1, 0, stream, ((memory,), (PTR,)), 0))
    if step in (2, 4, 6):
        gate(step)  # what was launched runs, or is not known to have ended
    last = U64()
    ok(cupti.cuptiActivityPopExternalCorrelationId(3, ctypes.byref(last)))
    assert last.value == 1000 + step
    check(driver.cuStreamSynchronize(stream))
    check(driver.cuMemcpyDtoH(host.ctypes.data, memory, host.nbytes))
    if step == 5:
        ok(cupti.cuptiActivityFlushAll(0))
assert cupti.cuptiActivityPopExternalCorrelationId(3, ctypes.byref(last)) == 18
ok(cupti.cuptiActivityFlushAll(1))
ended = time.perf_counter_ns()

model = np.full(N, 7, np.uint32)
for step in range(1, ROUNDS + 1):
    factor, term = 1, 0  # of 2000 * step rounds of the kernel's, composed
    for _ in range(2000 * step):
        factor, term = factor * 1664525 & 0xFFFFFFFF, term * 1664525 + 1013904223 & 0xFFFFFFFF
    for part in range(4):
        model = model * np.uint32(factor) + np.uint32(term)
        model[0] += np.uint32(16 + part)
assert np.array_equal(host, model)

of = {kind: [record for each, record in found if each == kind] for kind in KINDS}
launches = {at(record, "I", 32): record for record in of[DRIVER] if at(record, "I", 4) == LAUNCH}
outer = {at(record, "I", 16): at(record, "Q", 8) for record in of[EXTERNAL]}
runs = sorted(of[KERNEL], key=lambda record: at(record, "I", 92))
assert len(runs) == len(launches) == 8 * ROUNDS, (len(runs), len(launches))
assert [at(record, "I", 92) for record in runs] == sorted(launches)  # each kernel once, and by its launch
seen = 0
for index, record in enumerate(runs):
    step, part = index // 8 + 1, index // 2 % 4
    wanted = (b"tick", (1, 1, 1), (16 + part, 1, 1)) if index % 2 else (b"work", (step, 1, 1), (N, 1, 1))
    assert (ctypes.string_at(at(record, "Q", 104)), at(record, "3i", 52), at(record, "3i", 64)) == wanted, index
    first, last = at(record, "2Q", 16)
    launch = launches[at(record, "I", 92)]
    assert begun < at(launch, "Q", 8) <= at(launch, "Q", 16) < ended
    assert at(launch, "Q", 8) - 100_000 <= first < last <= ended, (index, at(launch, "Q", 8), first, last, ended)
    assert first >= seen, (index, first, seen)  # one stream: one after the other
    seen = last if index % 8 else first  # of another worker's clock after a disturbance, it may be off by a little
    assert at(record, "I", 48) == number.value and at(record, "I", 40) == 0
    assert outer[at(record, "I", 92)] == 1000 + step
copies = [record for record in of[MEMCPY] if record[4] == 2]
assert len(copies) == ROUNDS and all(at(record, "Q", 8) == host.nbytes for record in copies)
assert len(of[MEMSET]) == 1 and at(of[MEMSET][0], "I", 4) == 7 and at(of[MEMSET][0], "Q", 8) == N * 4
waits = [at(record, "I", 4) for record in of[SYNCHRONIZATION]]
assert waits.count(3) == ROUNDS and waits.count(4) == 1, waits
dropped = ctypes.c_size_t(1)
ok(cupti.cuptiActivityGetNumDroppedRecords(None, 0, ctypes.byref(dropped)))
assert dropped.value == 0
for kind in KINDS:
    ok(cupti.cuptiActivityDisable(kind))
check(driver.cuLaunchKernel(tick, 1, 1, 1, 16, 1, 1, 0, stream, ((memory,), (PTR,)), 0))
check(driver.cuStreamSynchronize(stream))
count = len(found)
ok(cupti.cuptiActivityFlushAll(1))
assert len(found) == count and not buffers  # nothing is recorded that is not enabled

# A long copy, which goes in several pieces, is one record.
long = np.zeros(1 << 20, np.uint32)
there = int(check(driver.cuMemAlloc(long.nbytes)))
ok(cupti.cuptiActivityEnable(MEMCPY))
check(driver.cuMemcpyHtoD(there, long.ctypes.data, long.nbytes))
check(driver.cuMemcpyDtoH(int(check(driver.cuMemHostAlloc(long.nbytes, 0))), there, long.nbytes))
ok(cupti.cuptiActivityFlushAll(1))
ok(cupti.cuptiActivityDisable(MEMCPY))
ok(cupti.cuptiActivityFlushAll(1))
assert [(kind, *record[4:7], at(record, "Q", 8)) for kind, record in found[count:]] == \
    [(MEMCPY, 1, 1, 3, long.nbytes), (MEMCPY, 2, 3, 2, long.nbytes)], "from pageable memory, to pinned"
count = len(found)

# A runtime's functions, with the correlation of the work that they give; what they call of the driver is not told.
for kind in (*KINDS, RUNTIME):
    ok(cupti.cuptiActivityEnable(kind))
ok(cupti.cuptiActivityPushExternalCorrelationId(3, U64(77)))
check(runtime.cudaMemset(memory, 1, N))
check(runtime.cudaDeviceSynchronize())
ok(cupti.cuptiActivityPopExternalCorrelationId(3, None))
ok(cupti.cuptiActivityFlushAll(1))
told = {}
for kind, record in found[count:]:
    if kind == RUNTIME:
        ok(cupti.cuptiGetCallbackName(2, at(record, "I", 4), ctypes.byref(name)))
        told[name.value] = at(record, "I", 32)
(memset,) = [record for kind, record in found[count:] if kind == MEMSET]
(wait,) = [record for kind, record in found[count:] if kind == SYNCHRONIZATION]
assert at(memset, "I", 44) == told[b"cudaMemset_v3020"], told
assert at(wait, "I", 24) == told[b"cudaDeviceSynchronize_v3020"], told
assert (77, told[b"cudaMemset_v3020"]) in [(at(record, "Q", 8), at(record, "I", 16))
                                           for kind, record in found[count:] if kind == EXTERNAL]
assert DRIVER not in [kind for kind, _ in found[count:]]
for kind in (*KINDS, RUNTIME):
    ok(cupti.cuptiActivityDisable(kind))
print("digest", hashlib.sha256(host.tobytes()).hexdigest())
