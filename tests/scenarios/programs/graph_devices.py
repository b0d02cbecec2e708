"""Random graphs with nodes on two devices: what each node reads is what those before it wrote, in every launch.

usage: graph_devices.py FOLDER GRAPHS LAUNCHES [SEED]. Kernels, some of them slow, copies between devices and through
host memory, host functions, memsets; launched in streams of both devices in turn. Stands at the gates 1 and 2 amid
launches of its first two graphs. Checks itself; prints "ok" and the number of nodes.
"""

import ctypes
import random
import sys

import numpy as np
from common import check, ptx
from cuda.bindings import driver
from gates import gate

GRAPHS, LAUNCHES, SEED = (int(value) for value in [*sys.argv[2:], "0"][:3])
N, NODES = 256, 24
PTR, UINT = ctypes.c_void_p, ctypes.c_uint
FOLD, FIRST = 2654435761, 0
SOURCE = b"""
extern "C" __global__ void fold(unsigned* out, const unsigned* a, const unsigned* b, const unsigned* launch,
                                unsigned salt, unsigned turns) {
    unsigned i = threadIdx.x, nothing = 0;
    for (unsigned turn = 0; turn < turns; ++turn) nothing |= atomicAdd(&out[i], 0u) & 0u;  // some take their time
    salt += nothing;
    out[i] = out[i] * 31u + a[i] * 2654435761u + b[i] + launch[i] + salt;  // what went wrong once stays
}
extern "C" __global__ void next(unsigned* launch) { launch[threadIdx.x] += 1u; }
"""

check(driver.cuInit(0))
contexts = [check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(n)))) for n in range(2)]
fold, following, streams = [], [], []
for n in range(2):
    check(driver.cuCtxSetCurrent(contexts[n]))
    module = check(driver.cuModuleLoadData(ptx(SOURCE)))
    fold.append(check(driver.cuModuleGetFunction(module, b"fold")))
    following.append(check(driver.cuModuleGetFunction(module, b"next")))
    streams.append(check(driver.cuStreamCreate(1)))
    driver.cuCtxEnablePeerAccess(contexts[1 - n], 0)
seen: list[int] = []


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def note(data):
    seen.append(data or 0)


class Graph:
    """A graph and what it computes. Node 0 counts launches; every other one comes behind it, at least."""

    def __init__(self, chance: random.Random) -> None:
        self.graph = check(driver.cuGraphCreate(0))
        self.slots: list[int] = []  # what each node writes
        self.kept: list[object] = []
        self.values = [0] * NODES  # of the slots, as they are to be
        self.model: list[tuple[str, int, int, int]] = []  # of each node: how its value follows from those before it
        self.host = int(check(driver.cuMemHostAlloc(NODES * N * 4, 1)))
        self.staged = np.zeros((NODES, N), np.uint32)  # pageable
        kinds = chance.choice([("fold",), ("fold", "fold", "copy", "set", "host"),
                               ("fold", "pinned", "pageable", "host")])
        nodes: list[object] = []
        for index in range(NODES):
            device = chance.randrange(2)
            check(driver.cuCtxSetCurrent(contexts[device]))
            slot = int(check(driver.cuMemAlloc(N * 4)))
            check(driver.cuMemsetD32(slot, 0, N))
            check(driver.cuCtxSynchronize())
            self.slots.append(slot)
            if not index:
                nodes.append(self._kernel(following[device], device, [], (slot,), (PTR,)))
                self.model.append(("launch", 0, 0, 0))
                continue
            read = [chance.randrange(index) for _ in range(2)]
            before = [nodes[other] for other in sorted({FIRST, *read, *chance.sample(range(index), min(index, 2))})]
            kind = chance.choice(kinds)
            if kind == "fold":
                salt = chance.randrange(1 << 16)
                nodes.append(self._kernel(fold[device], device, before, (slot, self.slots[read[0]], self.slots[read[1]],
                                                                         self.slots[FIRST], salt,
                                                                         chance.choice([0, 0, 20000])),
                                          (PTR, PTR, PTR, PTR, UINT, UINT)))
                self.model.append(("fold", *read, salt))
            elif kind == "set":
                nodes.append(self._set(device, before, slot, index))
                self.model.append(("set", index, 0, 0))
            elif kind == "host":
                data = driver.CUDA_HOST_NODE_PARAMS()
                data.fn, data.userData = driver.CUhostFn(_ptr=ctypes.addressof(note)), index
                middle = check(driver.cuGraphAddHostNode(self.graph, before, len(before), data))
                nodes.append(self._copy(device, [middle], slot, self.slots[read[0]]))
                self.model.append(("copy", read[0], 0, 0))
            else:
                source, behind = self.slots[read[0]], before
                if kind != "copy":
                    middle = self.host + index * N * 4 if kind == "pinned" else self.staged[index].ctypes.data
                    behind, source = [self._copy(chance.randrange(2), before, middle, source, kind)], middle
                nodes.append(self._copy(device, behind, slot, source, kind))
                self.model.append(("copy", read[0], 0, 0))
            for _ in range(chance.randrange(2)):
                check(driver.cuGraphAddEmptyNode(self.graph, [nodes[-1]], 1))
        check(driver.cuCtxSetCurrent(contexts[chance.randrange(2)]))
        self.executable = check(driver.cuGraphInstantiate(self.graph, 0))

    def _kernel(self, function, device, before, arguments, types):
        parameters = driver.CUDA_KERNEL_NODE_PARAMS()
        parameters.func, parameters.ctx = function, contexts[device]
        parameters.gridDimX = parameters.gridDimY = parameters.gridDimZ = 1
        parameters.blockDimX, parameters.blockDimY, parameters.blockDimZ = N, 1, 1
        words = [kind(value) for kind, value in zip(types, arguments, strict=True)]
        pointers = (ctypes.c_void_p * len(words))(*(ctypes.addressof(word) for word in words))
        self.kept += [words, pointers]
        parameters.kernelParams = ctypes.addressof(pointers)
        return check(driver.cuGraphAddKernelNode(self.graph, before, len(before), parameters))

    def _set(self, device, before, slot, value):
        parameters = driver.CUDA_MEMSET_NODE_PARAMS()
        parameters.dst, parameters.value, parameters.elementSize = slot, value, 4
        parameters.width, parameters.height = N, 1
        return check(driver.cuGraphAddMemsetNode(self.graph, before, len(before), parameters, contexts[device]))

    def _copy(self, device, before, to, source, kind="copy"):
        copy = driver.CUDA_MEMCPY3D()
        unified = driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        copy.srcMemoryType = copy.dstMemoryType = unified
        copy.srcDevice, copy.dstDevice = source, to
        copy.WidthInBytes, copy.Height, copy.Depth = N * 4, 1, 1
        return check(driver.cuGraphAddMemcpyNode(self.graph, before, len(before), copy, contexts[device]))

    def launch(self, stream) -> None:
        check(driver.cuGraphLaunch(self.executable, stream))
        for index, (what, one, other, salt) in enumerate(self.model):
            now = self.values
            if what == "fold":
                now[index] = (now[index] * 31 + now[one] * FOLD + now[other] + now[FIRST] + salt) & 0xFFFFFFFF
            else:
                now[index] = {"launch": now[FIRST] + 1, "set": one, "copy": now[one]}[what]

    def verify(self, stream) -> None:
        check(driver.cuStreamSynchronize(stream))
        for index, (what, *_) in enumerate(self.model):
            found = np.zeros(N, np.uint32)
            check(driver.cuMemcpyDtoH(found.ctypes.data, self.slots[index], found.nbytes))
            wanted = self.values[index]
            assert (found == wanted).all(), f"node {index} ({what}) after {self.values[FIRST]}: {found[:2]}, {wanted}"


chance, count = random.Random(SEED), 0
for number in range(GRAPHS):
    graph, hosted = Graph(chance), len(seen)
    count += NODES
    for launch in range(LAUNCHES):
        turn = chance.randrange(2)
        check(driver.cuCtxSetCurrent(contexts[turn]))
        graph.launch(streams[turn])
        if launch == LAUNCHES // 2 and number < 2:
            gate(number + 1)
        if not chance.randrange(8):
            graph.verify(streams[turn])
    graph.verify(streams[turn])
    assert (len(seen) - hosted) % LAUNCHES == 0, "each host function once a launch"
    print(number, len(seen) - hosted, flush=True)
    check(driver.cuGraphExecDestroy(graph.executable))
print("ok", count)
