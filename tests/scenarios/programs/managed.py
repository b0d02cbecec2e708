"""Managed memory: CPU and kernels use it in turns, at one address; every byte is compared with a model.

At its gates the newest bytes are the CPU's alone, the device's alone, or being written by a kernel that runs.

usage: managed.py FOLDER
"""

import ctypes
import hashlib
import os
import threading

import numpy as np
from common import check, kernels, start
from cuda.bindings import driver
from gates import gate

N, ROUNDS = 200_000, 12  # 800 KB: a dozen units of 64 KiB
GLOBAL, HOST, SINGLE = 1, 2, 4
start()
module, step, busy, walk, count = kernels(b"""
struct Link { Link* next; unsigned value; };
__managed__ unsigned visits[3000] = {5, 6, 7};
__device__ unsigned plain = 1;
extern "C" __global__ void step(unsigned* a, unsigned by, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) a[i] = a[i] * 5u + by;
}
extern "C" __global__ void busy(unsigned* a, int turns) {
    unsigned v = a[threadIdx.x];
    for (int i = 0; i < turns; ++i) v = v * 1664525u + 1013904223u;
    a[threadIdx.x] = v;
}
extern "C" __global__ void walk(Link* first) { for (Link* at = first; at; at = at->next) at->value += 3 + plain; }
extern "C" __global__ void count(void) { visits[threadIdx.x] += threadIdx.x; visits[2999]++; }
""", "step", "busy", "walk", "count")
PTR, INT, UINT = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32


def managed(size, flags=GLOBAL):
    at = int(check(driver.cuMemAllocManaged(size, flags)))
    return at, np.frombuffer((ctypes.c_uint32 * (size // 4)).from_address(at), np.uint32)


def launch(kernel, values, types, stream=0, blocks=4, threads=64):
    check(driver.cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, (values, types), 0))


def same(a, model, where):
    assert np.array_equal(a, model), (where, np.flatnonzero(a != model)[:5], a[a != model][:5], model[a != model][:5])


def through_a_pipe(a, model):
    """write() of managed memory that only the device has, read() into it."""
    reads, writes = os.pipe()
    part = memoryview(a).cast("B")[4096:36864]
    assert os.write(writes, part) == len(part)
    assert os.read(reads, len(part)) == memoryview(model).cast("B")[4096:36864]
    launch(step, (at, 9, N), (PTR, UINT, INT))
    check(driver.cuCtxSynchronize())
    new = np.arange(len(part) // 4, dtype=np.uint32)
    os.write(writes, new.tobytes())
    with os.fdopen(reads, "rb", buffering=0) as file:
        assert file.readinto(part) == len(part)
    os.close(writes)
    model[:] = model * np.uint32(5) + np.uint32(9)
    model[1024:9216] = new


at, a = managed(N * 4)
model = np.zeros(N, np.uint32)
same(a, model, "new memory is zeros")
stream, own = (check(driver.cuStreamCreate(1)) for _ in range(2))
for number in range(ROUNDS):
    a[number::61] += np.uint32(number)
    model[number::61] += np.uint32(number)
    if number == 3:
        gate("host")  # what the CPU changed was not sent
    launch(step, (at, number, N), (PTR, UINT, INT), (0, stream, own)[number % 3])
    model[:] = model * np.uint32(5) + np.uint32(number)
    if number == 5:
        gate("device")  # what the kernel changed was not fetched
    check(driver.cuCtxSynchronize())
    if number % 2:
        same(a[: N // 2], model[: N // 2], number)  # the rest stays at the device
    if number == 7:
        through_a_pipe(a, model)
        gate("both")
same(a, model, "rounds")

# Work that nobody waits for: the touch does.
TURNS = 3_000_000
launch(busy, (at, TURNS), (PTR, INT), stream, blocks=1)
gate("busy")
multiplier, addend, by, plus = 1, 0, 1664525, 1013904223
while TURNS:  # the generator's power: by squaring
    if TURNS & 1:
        multiplier, addend = multiplier * by & 0xFFFFFFFF, addend * by + plus & 0xFFFFFFFF
    by, plus, TURNS = by * by & 0xFFFFFFFF, plus * (by + 1) & 0xFFFFFFFF, TURNS >> 1
model[:64] = model[:64] * np.uint32(multiplier) + np.uint32(addend)
same(a, model, "a touch waits for the work before it")

# A list that only its own pointers lead to, and variables of the module.
links, words = managed(16 * 100)
pairs = words.view(np.uint64).reshape(-1, 2)
pairs[:-1, 0] = links + 16 * np.arange(1, 100)
launch(walk, (links,), (PTR,), own, blocks=1, threads=1)
gate("list")
launch(walk, (links,), (PTR,), own, blocks=1, threads=1)
check(driver.cuStreamSynchronize(own))
assert pairs[:, 1].tolist() == [8] * 100
visits_at, size = check(driver.cuModuleGetGlobal(module, b"visits"))
visits = np.frombuffer((ctypes.c_uint32 * 3000).from_address(int(visits_at)), np.uint32)
assert size == 12000 and visits[:4].tolist() == [5, 6, 7, 0]
visits[1] = 100
launch(count, (), (), 0, blocks=1)
gate("variable")
check(driver.cuCtxSynchronize())
assert visits[:4].tolist() == [5, 101, 9, 3] and visits[63] == 63 and visits[2998] == 0

# Copies, memsets, prefetches; a stream of one's own; the CPU's own memory while kernels run.
device = int(check(driver.cuMemAlloc(N * 4)))
check(driver.cuMemcpyDtoD(device, at, N * 4))
a[100:200] = 1
back = np.empty(N, np.uint32)
check(driver.cuMemcpyDtoH(back.ctypes.data, device, N * 4))
same(back, model, "a copy of what the CPU had")
model[100:200] = 1
check(driver.cuMemsetD32(at + 4000, 77, 500))
model[1000:1500] = 77
check(driver.cuMemcpyHtoD(at + 8000, back[:100].ctypes.data, 400))
model[2000:2100] = back[:100]
place = driver.CUmemLocation()
place.type, place.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
check(driver.cuMemPrefetchAsync(at, N * 4, place, 0, stream))
launch(step, (at, 1, N), (PTR, UINT, INT), stream)
model[:] = model * np.uint32(5) + np.uint32(1)
mine_at, mine = managed(1 << 16, HOST)
check(driver.cuStreamAttachMemAsync(own, mine_at, 0, SINGLE))
mine[:] = 3
launch(step, (mine_at, 4, 1 << 14), (PTR, UINT, INT), own)
results = []
threads = [threading.Thread(target=lambda k=k: results.append(int(a[k::4].sum(dtype=np.uint32)))) for k in range(4)]
for each in threads:
    each.start()
for each in threads:
    each.join()
assert sorted(results) == sorted(int(model[k::4].sum(dtype=np.uint32)) for k in range(4))
assert (mine == 19).all()
check(driver.cuStreamAttachMemAsync(own, mine_at, 0, HOST))
launch(busy, (at, 300_000), (PTR, INT), stream, blocks=1)
mine[:] = 8  # while the kernel runs
gate("attached")
same(a[64:], model[64:], "the end")
digest = hashlib.sha256(a[64:].tobytes() + visits.tobytes() + mine.tobytes()).hexdigest()
for address in (at, links, mine_at):
    check(driver.cuMemFree(address))
print("digest", digest)
