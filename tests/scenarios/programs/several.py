"""Two devices in one session: contexts, streams, events, copies, peers, graphs. usage: several.py FOLDER [remote]

Checks itself at each step; stands at the gates 1 to 4, where its session may be disturbed. ``remote``: also what a
driver on the spot does another way: where memory lies, and that host functions hold up one device only.
"""

import ctypes
import hashlib
import sys
import threading

import numpy as np
from common import check, ptx
from cuda.bindings import driver
from gates import gate

N, ROUNDS, GATES = 4096, 24, {4: 1, 9: 2, 14: 3, 19: 4}
REMOTE = sys.argv[2:] == ["remote"]
NOT_READY, TIMING_OFF, CAPTURE_RELAXED = 600, 2, 2
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
assert check(driver.cuDeviceGetCount()) == 2
devices = [check(driver.cuDeviceGet(n)) for n in range(2)]
assert len({bytes(check(driver.cuDeviceGetUuid(device)).bytes) for device in devices}) == 2
assert all(check(driver.cuDeviceCanAccessPeer(a, b)) == (a != b) for a in devices for b in devices)
contexts = [check(driver.cuDevicePrimaryCtxRetain(device)) for device in devices]


def use(n: int) -> None:
    check(driver.cuCtxSetCurrent(contexts[n]))


def launch(function, stream, values, types, blocks=N // 256):
    check(driver.cuLaunchKernel(function, blocks, 1, 1, 256, 1, 1, 0, stream, (values, types), 0))


def values(address, count=N):
    host = np.zeros(count, np.uint32)
    check(driver.cuMemcpyDtoH(host.ctypes.data, address, host.nbytes))
    return host


modules, mix, add, count, memory, streams, rounds, events = [], [], [], [], [], [], [], []
text = ptx(SOURCE)
for n in range(2):
    use(n)
    free, total = check(driver.cuMemGetInfo())
    modules.append(check(driver.cuModuleLoadData(text)))
    mix.append(check(driver.cuModuleGetFunction(modules[n], b"mix")))
    add.append(check(driver.cuModuleGetFunction(modules[n], b"add")))
    count.append(check(driver.cuModuleGetFunction(modules[n], b"count")))
    rounds.append(int(check(driver.cuModuleGetGlobal(modules[n], b"rounds"))[0]))
    memory.append(int(check(driver.cuMemAlloc(N * 4))))
    used = free - check(driver.cuMemGetInfo())[0]  # natively: whatever else is on the GPU, too
    assert not REMOTE or used <= 2 << 20, "each device has a quota of its own"
    streams.append(check(driver.cuStreamCreate(1)))
    events.append(check(driver.cuEventCreate(TIMING_OFF)))
    check(driver.cuMemsetD32(memory[n], n + 1, N))
    error = driver.cuCtxEnablePeerAccess(contexts[1 - n], 0)[0]
    assert int(error) == 0 and int(driver.cuCtxEnablePeerAccess(contexts[1 - n], 0)[0]) == 704
    check(driver.cuCtxSynchronize())
assert rounds[0] != rounds[1], "each device has its own variable"
assert int(driver.cuIpcGetMemHandle(memory[0])[0]) == 0, "NCCL's sign that devices reach each other"
assert int(driver.cuIpcGetMemHandle(64)[0]) == 1
assert not REMOTE or (memory[0] >> 43) != (memory[1] >> 43), "and its own range"

# -- a graph of each device ---------------------------------------------------------
graphs = []
for n in range(2):
    use(n)
    check(driver.cuStreamBeginCapture(streams[n], driver.CUstreamCaptureMode(CAPTURE_RELAXED)))
    launch(add[n], streams[n], (memory[n], 7 + n), (PTR, UINT))
    graphs.append(check(driver.cuGraphInstantiate(check(driver.cuStreamEndCapture(streams[n])), 0)))

# -- a graph of both: 0 changes its memory, 1 reads that and changes its own, 0 reads that ----------------------------
joints = []
for n in range(2):
    use(n)
    joints.append(check(driver.cuEventCreate(TIMING_OFF)))
check(driver.cuStreamBeginCapture(streams[0], driver.CUstreamCaptureMode(CAPTURE_RELAXED)))
use(0)
launch(add[0], streams[0], (memory[0], 3), (PTR, UINT))
check(driver.cuEventRecord(joints[0], streams[0]))
use(1)
check(driver.cuStreamWaitEvent(streams[1], joints[0], 0))
launch(mix[1], streams[1], (memory[1], memory[0], 11), (PTR, PTR, UINT))
launch(add[1], streams[1], (memory[1], 5), (PTR, UINT))
check(driver.cuEventRecord(joints[1], streams[1]))
use(0)
check(driver.cuStreamWaitEvent(streams[0], joints[1], 0))
launch(mix[0], streams[0], (memory[0], memory[1], 13), (PTR, PTR, UINT))
captured = check(driver.cuStreamEndCapture(streams[0]))
both = check(driver.cuGraphInstantiate(captured, 0))
model = [values(memory[n]) for n in range(2)]
for number in range(6):
    use(number % 2)
    check(driver.cuGraphLaunch(both, streams[number % 2]))
    model[0] += np.uint32(3)
    model[1] = model[1] * np.uint32(2654435761) + model[0] + np.uint32(16)
    model[0] = model[0] * np.uint32(2654435761) + model[1] + np.uint32(13)
for n in range(2):
    use(n)
    check(driver.cuStreamSynchronize(streams[n]))  # a launch in either is work of both devices
for n in range(2):
    use(n)
    assert (values(memory[n]) == model[n]).all(), f"device {n}"
# what was captured is changed: a kernel of device 1, by its own node
nodes = check(driver.cuGraphGetNodes(captured, 4))[0][:4]
changed = [node for node in nodes if int(check(driver.cuGraphKernelNodeGetParams(node)).func) == int(add[1])]
assert len(changed) == 1
parameters = check(driver.cuGraphKernelNodeGetParams(changed[0]))
words = (ctypes.c_uint64(memory[1]), ctypes.c_uint32(6))
pointers = (ctypes.c_void_p * 2)(*(ctypes.addressof(word) for word in words))
parameters.kernelParams = ctypes.addressof(pointers)
check(driver.cuGraphExecKernelNodeSetParams(both, changed[0], parameters))
check(driver.cuGraphDestroy(captured))

# -- steps: each device reads what the other made, ordered by events ------------------
for number in range(ROUNDS):
    for n in range(2):
        use(n)
        check(driver.cuStreamWaitEvent(streams[n], events[1 - n], 0))
        launch(mix[n], streams[n], (memory[n], memory[1 - n], number), (PTR, PTR, UINT))  # reads the peer's memory
        check(driver.cuLaunchKernel(count[n], 1, 1, 1, 1, 1, 1, 0, streams[n], 0, 0))
        check(driver.cuGraphLaunch(graphs[n], streams[n]))
        check(driver.cuEventRecord(events[n], streams[n]))
    if number % 4 == 3:  # in the streams of both in turn: behind the other one's work, and before its next
        n = number // 4 % 2
        use(n)
        check(driver.cuStreamWaitEvent(streams[n], events[1 - n], 0))
        check(driver.cuGraphLaunch(both, streams[n]))
        check(driver.cuEventRecord(events[n], streams[n]))
    if number % 3 == 2:
        check(driver.cuStreamSynchronize(streams[number % 2]))
    if number in GATES:
        gate(GATES[number])
for n in range(2):
    use(n)
    check(driver.cuCtxSynchronize())
    assert values(rounds[n], 1)[0] == ROUNDS
use(0)
result = [values(memory[0])]
use(1)
result.append(values(memory[1]))

# -- copies between them, memory in stream order ----------------------------------------
use(1)
ordered = int(check(driver.cuMemAllocAsync(N * 4, streams[1])))
assert not REMOTE or ordered >> 43 == memory[1] >> 43
check(driver.cuMemcpyDtoDAsync(ordered, memory[0], N * 4, streams[1]))
check(driver.cuStreamSynchronize(streams[1]))
assert (values(ordered) == result[0]).all()
check(driver.cuMemcpyPeer(memory[1], contexts[1], memory[0], contexts[0], N * 4))
assert (values(memory[1]) == result[0]).all()
check(driver.cuMemFreeAsync(ordered, streams[1]))
# in a legacy stream it is behind the work of both devices' legacy streams, and their later work behind it
for n in range(2):
    use(n)
    for _ in range(200):
        launch(add[n], 0, (memory[n], 1), (PTR, UINT))
use(0)
check(driver.cuMemcpyDtoD(memory[1], memory[0], N * 4))
use(1)
launch(add[1], 0, (memory[1], 5), (PTR, UINT))
check(driver.cuStreamSynchronize(0))
assert (values(memory[1]) == result[0] + 205).all()
use(0)
check(driver.cuMemsetD32(memory[0], 0, N))
check(driver.cuMemcpyDtoD(memory[0], memory[1], N * 4))
launch(add[0], 0, (memory[0], (1 << 32) - 205), (PTR, UINT))
check(driver.cuStreamSynchronize(0))
assert (values(memory[0]) == result[0]).all()

# -- what does not go together (CUDA C++ Programming Guide, "Multi-Device System") -----------
timed = []
for n in range(2):
    use(n)
    timed.append(check(driver.cuEventCreate(0)))
    check(driver.cuEventRecord(timed[n], streams[n]))
    check(driver.cuStreamSynchronize(streams[n]))
use(0)
values_of, types = (memory[0], 0), (PTR, UINT)
assert int(driver.cuLaunchKernel(add[0], 1, 1, 1, 1, 1, 1, 0, streams[1], (values_of, types), 0)[0]) == 400
assert int(driver.cuEventRecord(events[0], streams[1])[0]) == 400
assert int(driver.cuEventElapsedTime(timed[0], timed[1])[0]) == 400
check(driver.cuMemcpyDtoDAsync(memory[0], memory[0], 16, streams[1]))  # a copy does
check(driver.cuStreamSynchronize(streams[1]))

# -- pinned memory, written by both ------------------------------------------------------
pinned = int(check(driver.cuMemHostAlloc(N * 4, 1)))
view = np.ctypeslib.as_array((ctypes.c_uint32 * N).from_address(pinned))
view[:] = 5
for n in range(2):
    use(n)
    launch(add[n], streams[n], (pinned, 10 * (n + 1)), (PTR, UINT))
    check(driver.cuStreamSynchronize(streams[n]))
assert (view == 35).all(), view[:4]

# -- a legacy stream for each; who waits for one device does not wait for the other ------
let_go = threading.Event()


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def hold(data):
    let_go.wait(60)


def waits():
    use(0)
    check(driver.cuLaunchHostFunc(0, driver.CUhostFn(_ptr=ctypes.addressof(hold)), 0))
    launch(add[0], 0, (memory[0], 1), (PTR, UINT))
    use(1)
    before = values(memory[1])  # in the legacy stream of device 1
    launch(add[1], 0, (memory[1], 1), (PTR, UINT))
    check(driver.cuStreamSynchronize(0))
    assert (values(memory[1]) == before + 1).all()
    spare = int(check(driver.cuMemAlloc(N * 4)))
    launch(add[1], streams[1], (spare, 1), (PTR, UINT))
    check(driver.cuMemFree(spare))  # waits for its own device
    check(driver.cuCtxSynchronize())
    use(0)
    assert int(driver.cuStreamQuery(0)[0]) == NOT_READY, "waiting for one device waited for the other"
    let_go.set()
    check(driver.cuCtxSynchronize())
    assert (values(memory[0]) == result[0] + 1).all()


if REMOTE:
    waits()
print("digest", hashlib.sha256(b"".join(one.tobytes() for one in result)).hexdigest())
