"""Graphs that decide for themselves, against a model on the host. usage: conditions.py FOLDER

A loop counts down from what the program copied in, with an if/else and a switch in its body; the graph is made partly
by hand, partly by captures of a stream into the bodies. Another one is captured with pointers to nothing, read, and
thrown away, as cuDNN does to learn a launch's shape.
"""

import ctypes
import hashlib

import numpy as np
from common import check, kernels, start
from cuda.bindings import driver
from gates import gate

ROUNDS = 12
PTR, UINT, U64, SIZE = ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint64, ctypes.c_size_t
IF, WHILE, SWITCH = 0, 1, 2
GLOBAL = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
cu = ctypes.CDLL("libcuda.so.1")
start()
module, again, parity, third, step = kernels(b"""
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned value);
extern "C" __global__ void again(unsigned long long loop, unsigned* left) {
    cudaGraphSetConditional(loop, *left != 0);
}
extern "C" __global__ void parity(unsigned long long odd, unsigned* left) {
    cudaGraphSetConditional(odd, *left & 1);
}
extern "C" __global__ void third(unsigned long long which, unsigned* left) {
    cudaGraphSetConditional(which, *left % 4);  // 3: no body of that number
    *left -= 1;
}
extern "C" __global__ void step(unsigned* sum, unsigned times, unsigned more) { *sum = *sum * times + more; }
""", "again", "parity", "third", "step")
context = PTR(int(check(driver.cuCtxGetCurrent())))
left, total = (int(check(driver.cuMemAlloc(4))) for _ in range(2))
check(driver.cuMemsetD32(total, 0, 1))
check(driver.cuCtxSynchronize())  # the streams below do not wait for the memset
stream, side = (check(driver.cuStreamCreate(1)) for _ in range(2))


class Conditional(ctypes.Structure):
    """CUgraphNodeParams of a conditional node."""

    _fields_ = [("type", ctypes.c_int), ("reserved", ctypes.c_int * 3), ("handle", U64), ("kind", ctypes.c_int),
                ("size", UINT), ("bodies", ctypes.POINTER(PTR)), ("context", PTR), ("rest", U64 * 26)]


def ok(result: int) -> None:
    check((driver.CUresult(result),))


def condition(graph, value=0, flags=0) -> int:
    made = U64()
    ok(cu.cuGraphConditionalHandleCreate(ctypes.byref(made), PTR(int(graph)), context, value, flags))
    return made.value


def conditional(graph, handle, kind, size, before=()):
    """The node, and the graphs of its bodies."""
    parameters = Conditional(type=13, handle=handle, kind=kind, size=size, context=context)
    node, nodes = PTR(), (PTR * max(1, len(before)))(*(int(other) for other in before))
    ok(cu.cuGraphAddNode_v2(ctypes.byref(node), PTR(int(graph)), nodes, None, SIZE(len(before)),
                            ctypes.byref(parameters)))
    return driver.CUgraphNode(node.value), [driver.CUgraph(parameters.bodies[i]) for i in range(size)]


def launch(function, stream, values, types) -> None:
    check(driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, (values, types), 0))


def begin_in(stream, graph) -> None:
    ok(cu.cuStreamBeginCaptureToGraph(PTR(int(stream)), PTR(int(graph)), None, None, SIZE(0), 2))


def last(stream):
    """The nodes that the stream's next one depends on, and its graph."""
    status, graph, nodes, n = ctypes.c_int(), PTR(), ctypes.POINTER(PTR)(), SIZE()
    ok(cu.cuStreamGetCaptureInfo_v2(PTR(int(stream)), ctypes.byref(status), None, ctypes.byref(graph),
                                    ctypes.byref(nodes), ctypes.byref(n)))
    return [driver.CUgraphNode(nodes[i]) for i in range(n.value)], driver.CUgraph(graph.value)


def follow(stream, node) -> None:
    """The stream's next node depends on this one: as frameworks put a conditional node into a capture."""
    ok(cu.cuStreamUpdateCaptureDependencies(PTR(int(stream)), (PTR * 1)(int(node)), SIZE(1), 1))


def add(stream, times: int, more: int) -> None:
    launch(step, stream, (total, times, more), (PTR, UINT, UINT))


def captured():
    check(driver.cuStreamBeginCapture(stream, GLOBAL))
    before, graph = last(stream)
    loop = condition(graph)
    launch(again, stream, (loop, left), (U64, PTR))
    before, graph = last(stream)
    node, (body,) = conditional(graph, loop, WHILE, 1, before)
    follow(stream, node)
    odd, which = condition(body), condition(body, 0, 1)
    begin_in(side, body)
    launch(parity, side, (odd, left), (U64, PTR))
    inner, (then, other) = conditional(body, odd, IF, 2, last(side)[0])
    follow(side, inner)
    launch(third, side, (which, left), (U64, PTR))
    chosen, cases = conditional(body, which, SWITCH, 3, last(side)[0])
    follow(side, chosen)
    launch(again, side, (loop, left), (U64, PTR))
    check(driver.cuStreamEndCapture(side))
    for graph_of, times, more in ((then, 3, 1), (other, 5, 2), *((case, 7, 10 + i) for i, case in enumerate(cases))):
        begin_in(side, graph_of)
        add(side, times, more)
        check(driver.cuStreamEndCapture(side))
    add(stream, 1, 100)
    return check(driver.cuStreamEndCapture(stream))


def model(value: int, count: int) -> int:
    while count:
        value = value * 3 + 1 if count & 1 else value * 5 + 2
        if count % 4 < 3:
            value = value * 7 + 10 + count % 4
        count -= 1
    return (value + 100) % (1 << 32)


def only_captured() -> None:
    """Nodes with pointers to nothing are made, and can be read; a launch of them is refused, and nothing sticks."""
    nowhere = left + (1 << 36)
    check(driver.cuStreamBeginCapture(stream, GLOBAL))
    check(driver.cuMemsetD8Async(nowhere, 1, 64, stream))
    check(driver.cuMemcpyDtoDAsync(nowhere + 64, nowhere, 64, stream))
    launch(step, stream, (nowhere, 1, 1), (PTR, UINT, UINT))
    graph = check(driver.cuStreamEndCapture(stream))
    nodes, count = check(driver.cuGraphGetNodes(graph, 3))
    assert count == 3
    assert int(check(driver.cuGraphMemsetNodeGetParams(nodes[0])).dst) == nowhere
    executable = check(driver.cuGraphInstantiate(graph, 0))
    (refused,) = driver.cuGraphLaunch(executable, stream)
    assert int(refused) == 1, refused
    check(driver.cuStreamSynchronize(stream))
    strays.append(executable)
    check(driver.cuGraphDestroy(graph))


class Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams of a word."""

    _fields_ = [("type", ctypes.c_int), ("address", U64), ("value", U64), ("flags", UINT), ("alias", U64), ("pad", U64)]


def flags_of_streams():
    """A graph of one batch: the other stream's word is awaited, then this one's is set."""
    operations = (Operation * 2)(Operation(4, words, 1, 1), Operation(5, words + 8, 1, 0))
    check(driver.cuStreamBeginCapture(stream, GLOBAL))
    ok(cu.cuStreamBatchMemOp_v2(PTR(int(stream)), 2, operations, 0))
    graph = check(driver.cuStreamEndCapture(stream))
    assert [int(check(driver.cuGraphNodeGetType(node))) for node in check(driver.cuGraphGetNodes(graph, 1))[0]] == [12]
    return check(driver.cuGraphInstantiate(graph, 0))


words = int(check(driver.cuMemAlloc(16)))
waiting = flags_of_streams()
strays: list[driver.CUgraphExec] = []
executable = check(driver.cuGraphInstantiate(captured(), 0))
expected, digest = 0, hashlib.sha256()
for number in range(1, ROUNDS + 1):
    only_captured()
    count = np.full(1, number, np.uint32)
    check(driver.cuMemcpyHtoDAsync(left, count.ctypes.data, 4, stream))
    check(driver.cuGraphLaunch(executable, stream))
    if number in (3, 5, 7, 9):
        gate(str(number))
    check(driver.cuMemsetD32(words, 0, 4))
    check(driver.cuCtxSynchronize())
    check(driver.cuGraphLaunch(waiting, stream))  # until the side stream has set the word
    check(driver.cuStreamWriteValue64(side, words, 1, 0))
    pair = np.zeros(2, np.uint64)
    check(driver.cuStreamSynchronize(stream))
    check(driver.cuMemcpyDtoH(pair.ctypes.data, words, 16))
    assert pair.tolist() == [1, 1], (number, pair)
    expected = model(expected, number)
    found = np.zeros(1, np.uint32)
    check(driver.cuMemcpyDtoHAsync(found.ctypes.data, total, 4, stream))
    check(driver.cuStreamSynchronize(stream))
    assert found[0] == expected, (number, found[0], expected)
    digest.update(found.tobytes())
for stray in strays:
    check(driver.cuGraphExecDestroy(stray))
check(driver.cuGraphExecDestroy(executable))
print("digest", digest.hexdigest())
