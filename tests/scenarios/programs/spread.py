"""One process with devices of several hosts: a ring of kernels and copies, and what crosses hosts.

usage: spread.py FOLDER [long]

Checks itself at each step; stands at the gates 1 to 4, where its sessions may be disturbed. Natively too, where six
devices are in one host. ``long``: the ring goes on until there is a file FOLDER/enough.
"""

import ctypes
import hashlib
import sys
import threading
from itertools import count as numbers
from pathlib import Path

import numpy as np
from common import check, ptx
from cuda.bindings import driver
from gates import gate

N, ROUNDS, GATES = 4096, 24, {4: 1, 9: 2, 14: 3, 19: 4}
LONG = sys.argv[2:] == ["long"]
TIMING_OFF, NON_BLOCKING = 2, 1
PTR, UINT = ctypes.c_void_p, ctypes.c_uint
SOURCE = b"""
__device__ unsigned rounds;
extern "C" __global__ void mix(unsigned* out, const unsigned* in, unsigned salt) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = out[i] * 2654435761u + in[i] + salt + rounds;
}
extern "C" __global__ void count() { rounds += 1u; }
extern "C" __global__ void add(unsigned* p, unsigned value) { p[blockIdx.x * blockDim.x + threadIdx.x] += value; }
"""

check(driver.cuInit(0))
COUNT = check(driver.cuDeviceGetCount())
devices = [check(driver.cuDeviceGet(n)) for n in range(COUNT)]
assert len({bytes(check(driver.cuDeviceGetUuid(device)).bytes) for device in devices}) == COUNT
assert len({check(driver.cuDeviceGetPCIBusId(20, device)) for device in devices}) == COUNT
assert int(check(driver.cuCtxGetCurrent())) == 0
contexts = [check(driver.cuDevicePrimaryCtxRetain(device)) for device in devices]
FAR = COUNT // 2  # a device of another host than device 0


def use(n: int) -> None:
    check(driver.cuCtxSetCurrent(contexts[n]))


def launch(function, stream, values, types, blocks=N // 256):
    check(driver.cuLaunchKernel(function, blocks, 1, 1, 256, 1, 1, 0, stream, (values, types), 0))


def values(address, count=N):
    host = np.zeros(count, np.uint32)
    check(driver.cuMemcpyDtoH(host.ctypes.data, address, host.nbytes))
    return host


text = ptx(SOURCE)
modules, mix, add, count, memory, inbox, streams, events, variables = [], [], [], [], [], [], [], [], []
for n in range(COUNT):
    use(n)
    assert int(check(driver.cuCtxGetDevice())) == int(devices[n])
    modules.append(check(driver.cuModuleLoadData(text)))
    mix.append(check(driver.cuModuleGetFunction(modules[n], b"mix")))
    add.append(check(driver.cuModuleGetFunction(modules[n], b"add")))
    count.append(check(driver.cuModuleGetFunction(modules[n], b"count")))
    variables.append(int(check(driver.cuModuleGetGlobal(modules[n], b"rounds"))[0]))
    memory.append(int(check(driver.cuMemAlloc(N * 4))))
    inbox.append(int(check(driver.cuMemAlloc(N * 4))))
    streams.append(check(driver.cuStreamCreate(NON_BLOCKING)))
    events.append(check(driver.cuEventCreate(TIMING_OFF)))
    check(driver.cuMemsetD32(memory[n], n + 1, N))
    check(driver.cuMemsetD32(inbox[n], 0, N))
assert len({*memory, *inbox}) == 2 * COUNT, "addresses name their device"

# -- contexts of several hosts on one stack ------------------------------------------
check(driver.cuCtxPushCurrent(contexts[0]))
check(driver.cuCtxPushCurrent(contexts[FAR]))
check(driver.cuCtxSetCurrent(contexts[1]))
assert int(check(driver.cuCtxPopCurrent())) == int(contexts[1])
assert int(check(driver.cuCtxPopCurrent())) == int(contexts[0])
assert int(check(driver.cuCtxGetCurrent())) == int(contexts[COUNT - 1])
elsewhere: list[int] = []
thread = threading.Thread(target=lambda: elsewhere.append(int(check(driver.cuCtxGetCurrent()))))
thread.start()
thread.join()
assert elsewhere == [0]
assert int(check(driver.cuPointerGetAttribute(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                              memory[0]))) == 0
assert int(check(driver.cuStreamGetCtx(streams[0]))) == int(contexts[0])

# -- a ring: each device mixes in what the one before it made ------------------------------
state = [np.full(N, n + 1, np.uint32) for n in range(COUNT)]
before = [np.zeros(N, np.uint32) for _ in range(COUNT)]
for number in numbers():
    if number >= ROUNDS and (not LONG or (Path(sys.argv[1]) / "enough").exists()):
        break
    for n in range(COUNT):
        use(n)
        launch(mix[n], streams[n], (memory[n], inbox[n], number), (PTR, PTR, UINT))
        check(driver.cuLaunchKernel(count[n], 1, 1, 1, 1, 1, 1, 0, streams[n], 0, 0))
        check(driver.cuEventRecord(events[n], streams[n]))
        state[n] = state[n] * np.uint32(2654435761) + before[n] + np.uint32(2 * number)
    for n in range(COUNT):
        after = (n + 1) % COUNT
        use(after)
        check(driver.cuStreamWaitEvent(streams[after], events[n], 0))
        if number % 2:
            check(driver.cuMemcpyPeerAsync(inbox[after], contexts[after], memory[n], contexts[n], N * 4,
                                           streams[after]))
        else:
            check(driver.cuMemcpyDtoDAsync(inbox[after], memory[n], N * 4, streams[after]))
        before[after] = state[n]
    for n in range(COUNT):  # nobody changes what is still being copied
        use(n)
        check(driver.cuEventRecord(events[n], streams[n]))
    for n in range(COUNT):
        use(n)
        check(driver.cuStreamWaitEvent(streams[n], events[(n + 1) % COUNT], 0))
    if number % 5 == 4:
        check(driver.cuStreamSynchronize(streams[number % COUNT]))
    if number in GATES:
        gate(GATES[number])
digest = hashlib.sha256()
for n in range(COUNT):
    use(n)
    check(driver.cuCtxSynchronize())
    found = values(memory[n])
    assert (found == state[n]).all(), f"device {n}"
    assert (values(inbox[n]) == before[n]).all(), f"inbox {n}"
    assert values(variables[n], 1)[0] == number, f"variable {n}"
    digest.update(found.tobytes())

# -- copies that are awaited, of rows, of another context's memory -----------------------------
use(0)
check(driver.cuMemcpyPeer(inbox[FAR], contexts[FAR], memory[0], contexts[0], N * 4))
assert (values(inbox[FAR]) == state[0]).all(), "memory of a device whose context is not current"
check(driver.cuMemcpyDtoD(inbox[0], inbox[FAR], N * 4))
assert (values(inbox[0]) == state[0]).all()
for _ in range(50):  # behind the work of both default streams
    launch(add[0], 0, (memory[0], 1), (PTR, UINT))
check(driver.cuMemcpyDtoD(inbox[FAR], memory[0], N * 4))
launch(add[0], 0, (memory[0], 5), (PTR, UINT))
assert (values(inbox[FAR]) == state[0] + 50).all()
rows = driver.CUDA_MEMCPY2D()
rows.srcMemoryType = rows.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
rows.srcDevice, rows.srcPitch, rows.srcXInBytes, rows.srcY = memory[FAR], 256, 32, 1
rows.dstDevice, rows.dstPitch, rows.WidthInBytes, rows.Height = inbox[0], 128, 64, 7
use(FAR)
check(driver.cuMemsetD32(inbox[0], 7, N))
for n in (0, FAR):  # the copy's stream waits for no default stream, the host for no memset of device memory
    use(n)
    check(driver.cuCtxSynchronize())
check(driver.cuMemcpy2DAsync(rows, streams[FAR]))
check(driver.cuStreamSynchronize(streams[FAR]))
expected = np.full(N, 7, np.uint32)
expected[:7 * 32].reshape(7, 32)[:, :16] = state[FAR].reshape(-1, 64)[1:8, 8:24]
assert (values(inbox[0]) == expected).all(), "rows"

# -- pinned memory: written by one host's device, read by another's, in the order of streams ---------
use(0)
pinned = int(check(driver.cuMemHostAlloc(N * 4, 1)))
view = np.ctypeslib.as_array((ctypes.c_uint32 * N).from_address(pinned))
view[:] = 0
for _ in range(4):
    use(0)
    launch(add[0], streams[0], (memory[0], 1), (PTR, UINT))
    check(driver.cuMemcpyDtoHAsync(pinned, memory[0], N * 4, streams[0]))
    check(driver.cuEventRecord(events[0], streams[0]))
    use(FAR)
    check(driver.cuStreamWaitEvent(streams[FAR], events[0], 0))
    check(driver.cuMemcpyHtoDAsync(inbox[FAR], pinned, N * 4, streams[FAR]))
    check(driver.cuEventRecord(events[FAR], streams[FAR]))
    use(0)
    check(driver.cuStreamWaitEvent(streams[0], events[FAR], 0))
use(FAR)
check(driver.cuStreamSynchronize(streams[FAR]))
assert (values(inbox[FAR]) == state[0] + 59).all(), "pinned memory"
assert (view == values(memory[0])).all()
# copies of another host's device in this host's stream
use(0)
launch(add[0], streams[0], (memory[0], 1), (PTR, UINT))
check(driver.cuMemcpyDtoHAsync(pinned, memory[0], N * 4, streams[0]))
check(driver.cuMemcpyHtoDAsync(memory[FAR], pinned, N * 4, streams[0]))
check(driver.cuMemcpyDtoHAsync(pinned, inbox[FAR], N * 4, streams[0]))
launch(add[0], streams[0], (memory[0], 1), (PTR, UINT))
check(driver.cuStreamSynchronize(streams[0]))
assert (values(memory[FAR]) == state[0] + 60).all() and (view == state[0] + 59).all()
check(driver.cuMemFreeHost(pinned))

# -- streams that wait for each other crosswise ------------------------------------------
ready, order = threading.Event(), []
crossed = []
for n in (0, FAR):
    use(n)
    crossed += [check(driver.cuStreamCreate(NON_BLOCKING)) for _ in range(2)]
marks = []
for n in (0, 0, FAR, FAR):
    use(n)
    marks.append(check(driver.cuEventCreate(TIMING_OFF)))
HOST = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
late = HOST(lambda _: (ready.wait(60), order.append("late")))
use(FAR)
check(driver.cuLaunchHostFunc(crossed[3], ctypes.cast(late, ctypes.c_void_p).value, 0))
check(driver.cuEventRecord(marks[3], crossed[3]))
use(0)
check(driver.cuStreamWaitEvent(crossed[0], marks[3], 0))  # waits for long
check(driver.cuMemsetD32Async(memory[0], 1, N, crossed[1]))
check(driver.cuEventRecord(marks[1], crossed[1]))
use(FAR)
check(driver.cuStreamWaitEvent(crossed[2], marks[1], 0))  # that must not delay this one
check(driver.cuMemcpyPeerAsync(inbox[FAR], contexts[FAR], memory[0], contexts[0], N * 4, crossed[2]))
check(driver.cuStreamSynchronize(crossed[2]))

assert not order and (values(inbox[FAR]) == 1).all()
assert int(driver.cuStreamQuery(crossed[0])[0]) == 600
ready.set()
use(0)
check(driver.cuStreamSynchronize(crossed[0]))
assert order == ["late"]

# -- managed memory is one host's -----------------------------------------------------------
use(0)
managed = int(check(driver.cuMemAllocManaged(N * 4, 1)))
shared = np.ctypeslib.as_array((ctypes.c_uint32 * N).from_address(managed))
shared[:] = 5
launch(add[0], 0, (managed, 2), (PTR, UINT))
check(driver.cuCtxSynchronize())
assert (shared == 7).all()
use(FAR)
assert int(driver.cuMemAllocManaged(N * 4, 1)[0]) in (0, 801)
check(driver.cuMemFree(managed))

# -- a library belongs to no context ---------------------------------------------------------
library = check(driver.cuLibraryLoadData(text, [], [], 0, [], [], 0))
kernel = check(driver.cuLibraryGetKernel(library, b"add"))
assert check(driver.cuKernelGetName(kernel)) == b"add"
for n in range(COUNT):
    use(n)
    check(driver.cuMemsetD32(inbox[n], n, N))
    launch(check(driver.cuKernelGetFunction(kernel)), 0, (inbox[n], 10), (PTR, UINT))
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = N // 256, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ, config.hStream = 256, 1, 1, streams[n]
    check(driver.cuCtxSynchronize())
    check(driver.cuLaunchKernelEx(config, driver.CUfunction(int(kernel)), ((inbox[n], 100), (PTR, UINT)), 0))
    check(driver.cuCtxSynchronize())
    assert (values(inbox[n]) == n + 110).all()
check(driver.cuLibraryUnload(library))
assert int(driver.cuKernelGetFunction(kernel)[0]) == 400

# -- what does not go together ------------------------------------------------------------
timed = []
for n in (0, FAR):
    use(n)
    timed.append(check(driver.cuEventCreate(0)))
    check(driver.cuEventRecord(timed[-1], streams[n]))
    check(driver.cuStreamSynchronize(streams[n]))
use(0)
assert int(driver.cuEventElapsedTime(timed[0], timed[1])[0]) == 400
assert int(driver.cuEventRecord(events[FAR], streams[0])[0]) == 400
assert int(driver.cuLaunchKernel(add[FAR], 1, 1, 1, 1, 1, 1, 0, streams[0], ((memory[0], 0), (PTR, UINT)), 0)[0]) == 400
for n in range(COUNT):
    use(n)
    check(driver.cuMemFree(memory[n]))
    check(driver.cuModuleUnload(modules[n]))
    check(driver.cuDevicePrimaryCtxRelease(devices[n]))
print("digest", digest.hexdigest(), flush=True)
