"""A graph that decides for itself: a while with an if/else and a switch in its body, against a model on the host.

It counts down from what the program copies in before each launch; it is instantiated again now and then.

usage: conditions.py STEPS SECONDS
"""

import ctypes

import numpy as np
from common import Steps, last_of_burst
from driver_common import check, driver, kernels, start

PTR, UINT, U64, SIZE = ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint64, ctypes.c_size_t
IF, WHILE, SWITCH, CONDITIONAL = 0, 1, 2, 13
RELAXED = 2
cu = ctypes.CDLL("libcuda.so.1")
start()
again, parity, third, step = kernels(b"""
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


class Conditional(ctypes.Structure):
    """CUgraphNodeParams of a conditional node."""

    _fields_ = [("type", ctypes.c_int), ("reserved", ctypes.c_int * 3), ("handle", U64), ("kind", ctypes.c_int),
                ("size", UINT), ("bodies", ctypes.POINTER(PTR)), ("context", PTR), ("rest", U64 * 26)]


def ok(result: int) -> None:
    check((driver.CUresult(result),))


def condition(graph) -> int:  # noqa: ANN001
    made = U64()
    ok(cu.cuGraphConditionalHandleCreate(ctypes.byref(made), PTR(int(graph)), context, 0, 0))
    return made.value


def conditional(graph, handle, kind, size, before=()):  # noqa: ANN001, ANN201
    """The node, and the graphs of its bodies."""
    parameters = Conditional(type=CONDITIONAL, handle=handle, kind=kind, size=size, context=context)
    node, nodes = PTR(), (PTR * max(1, len(before)))(*(int(other) for other in before))
    ok(cu.cuGraphAddNode_v2(ctypes.byref(node), PTR(int(graph)), nodes, None, SIZE(len(before)),
                            ctypes.byref(parameters)))
    return driver.CUgraphNode(node.value), [driver.CUgraph(parameters.bodies[i]) for i in range(size)]


def into(body, before, *launches):  # noqa: ANN001, ANN201
    """Capture launches into a graph behind the nodes of ``before``; returns the last ones."""
    given = (PTR * max(1, len(before)))(*(int(node) for node in before))
    ok(cu.cuStreamBeginCaptureToGraph(PTR(int(side)), PTR(int(body)), given, None, SIZE(len(before)), RELAXED))
    for function, values, types in launches:
        check(driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, side, (values, types), 0))
    status, nodes, n = ctypes.c_int(), ctypes.POINTER(PTR)(), SIZE()
    ok(cu.cuStreamGetCaptureInfo_v2(PTR(int(side)), ctypes.byref(status), None, None, ctypes.byref(nodes),
                                    ctypes.byref(n)))
    found = [driver.CUgraphNode(nodes[i]) for i in range(n.value)]
    check(driver.cuStreamEndCapture(side))
    return found


def made():  # noqa: ANN201
    """``while (left) { sum = left odd ? 3 sum + 1 : 5 sum + 2; switch (left-- % 4) { 7 s + k } }``."""
    graph = check(driver.cuGraphCreate(0))
    loop = condition(graph)
    first = into(graph, (), (again, (loop, left), (U64, PTR)))
    _, (body,) = conditional(graph, loop, WHILE, 1, first)
    odd, which = condition(graph), condition(graph)
    seen = into(body, (), (parity, (odd, left), (U64, PTR)))
    node, (then, other) = conditional(body, odd, IF, 2, seen)
    into(then, (), (step, (total, 3, 1), (PTR, UINT, UINT)))
    into(other, (), (step, (total, 5, 2), (PTR, UINT, UINT)))
    chosen = into(body, (node,), (third, (which, left), (U64, PTR)))
    node, cases = conditional(body, which, SWITCH, 3, chosen)
    for number, case in enumerate(cases):
        into(case, (), (step, (total, 7, number), (PTR, UINT, UINT)))
    into(body, (node,), (again, (loop, left), (U64, PTR)))
    return graph, check(driver.cuGraphInstantiate(graph, 0))


def expected(total: int, left: int) -> int:
    while left:
        total = (total * 3 + 1 if left & 1 else total * 5 + 2) & 0xFFFFFFFF
        if left % 4 < 3:
            total = (total * 7 + left % 4) & 0xFFFFFFFF
        left -= 1
    return total


context = PTR(int(check(driver.cuCtxGetCurrent())))
left, total = (int(check(driver.cuMemAlloc(4))) for _ in range(2))
check(driver.cuMemsetD32(total, 1, 1))
check(driver.cuCtxSynchronize())  # the streams below do not wait for the memset
stream, side = (check(driver.cuStreamCreate(1)) for _ in range(2))
graph, runnable = made()
model, found = 1, np.zeros(1, np.uint32)
steps = Steps()
for number in steps:
    turns = number * 7 % 12
    check(driver.cuMemsetD32Async(left, turns, 1, stream))
    check(driver.cuGraphLaunch(runnable, stream))
    model = expected(model, turns)
    if last_of_burst(number):
        check(driver.cuMemcpyDtoHAsync(found.ctypes.data, total, 4, stream))
        check(driver.cuStreamSynchronize(stream))
        assert int(found[0]) == model, (number, int(found[0]), model)
        steps.saw(found)
        if number % 150 == 99:
            check(driver.cuGraphExecDestroy(runnable))
            check(driver.cuGraphDestroy(graph))
            graph, runnable = made()
check(driver.cuStreamSynchronize(stream))
steps.end(np.array([model], np.uint32))
