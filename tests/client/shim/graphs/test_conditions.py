"""Conditional nodes, batches of memory operations, and pointers that are looked up at a launch only."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from rgpu.session.objects.graphs import SWITCH, WHILE, ConditionalNode, KernelNode, MemsetNode
from tests.support.shim.captures import program_of
from tests.support.shim.fake_agent import FakeAgent

WORDS = """
class Conditional(c.Structure):
    _fields_ = [("type", c.c_int), ("reserved", c.c_int * 3), ("handle", U64), ("kind", c.c_int), ("size", c.c_uint),
                ("bodies", c.POINTER(P)), ("ctx", P), ("rest", U64 * 26)]
class Operation(c.Structure):
    _fields_ = [("type", c.c_int), ("address", U64), ("value", U64), ("flags", c.c_uint), ("alias", U64), ("pad", U64)]
class Batch(c.Structure):
    _fields_ = [("ctx", P), ("count", c.c_uint), ("array", c.POINTER(Operation)), ("flags", c.c_uint)]
def create():
    graph = P()
    ok(cu.cuGraphCreate(c.byref(graph), 0))
    return graph.value
def current():
    found = P()
    ok(cu.cuCtxGetCurrent(c.byref(found)))
    return found
def condition(graph, value=0, flags=0):
    made = U64()
    ok(cu.cuGraphConditionalHandleCreate(c.byref(made), P(graph), current(), value, flags))
    return made.value
def try_conditional(graph, handle, kind, size, before=(), context=True):
    given, node = Conditional(type=13, handle=handle, kind=kind, size=size, ctx=current() if context else None), P()
    code = cu.cuGraphAddNode_v2(c.byref(node), P(graph), (P * max(1, len(before)))(*before), None, SIZE(len(before)),
                                c.byref(given))
    return code, node.value, [given.bodies[i] for i in range(size)] if not code else None
def conditional(*arguments):
    code, node, bodies = try_conditional(*arguments)
    ok(code)
    return node, bodies
def into(graph, s, *calls):
    ok(cu.cuStreamBeginCaptureToGraph(P(s), P(graph), None, None, SIZE(0), RELAXED))
    for call in calls: ok(call())
    return end(s)
def made(graph): return cu.cuGraphInstantiateWithFlags(c.byref(P()), P(graph), c.c_uint64(0))
"""


def test_a_conditional_node_and_its_bodies(agent, program):
    told = program(agent, program_of(WORDS) + """
context()
f, a, s = kernel(), alloc(4096), stream()
g = create()
loop = condition(g, 3, 1)
node, (body,) = conditional(g, loop, 1, 1)
which = condition(g)                                   # of the graph that the body is in
chosen, cases = conditional(body, which, 2, 3)
ended = into(cases[1], s, lambda: fill(a, s, 7), lambda: launch(f, loop, 1, s))
child = create(); into(child, s, lambda: fill(a + 64, s, 8), lambda: fill(a + 80, s, 9))
inner = P(); ok(cu.cuGraphAddChildGraphNode(c.byref(inner), P(body), (P * 1)(chosen), SIZE(1), P(child)))
tell([kind(node), ended[0], ended[1] == cases[1], [kind(n) for n in nodes(body)], [len(nodes(b)) for b in cases],
      which - loop, cu.cuGraphDestroy(P(body)), cu.cuGraphClone(c.byref(P()), P(g))])
x = instantiate(g)
ok(start(x, s)); ok(cu.cuStreamSynchronize(P(s)))
memset = nodes(cases[1])[0]
class Memset(c.Structure):
    _fields_ = [("dst", U64), ("pitch", SIZE), ("value", c.c_uint), ("element", c.c_uint), ("width", SIZE),
                ("height", SIZE)]
ok(cu.cuGraphExecMemsetNodeSetParams(P(x), P(memset), c.byref(Memset(a + 32, 0, 5, 1, 16, 1)), None))
ok(start(x, s)); ok(start(x, s))
again = create()                                       # the same calls again: an update
other = condition(again, 4, 0)
n2, (b2,) = conditional(again, other, 1, 1)
c2, cases2 = conditional(b2, condition(again), 2, 3)
into(cases2[1], s, lambda: fill(a, s, 7), lambda: launch(f, other, 1, s))
ok(cu.cuGraphAddChildGraphNode(c.byref(P()), P(b2), (P * 1)(c2), SIZE(1), P(child)))
class Info(c.Structure): _fields_ = [("result", c.c_int), ("node", P), ("source", P)]
info = Info()
tell([cu.cuGraphExecUpdate_v2(P(x), P(again), c.byref(info)), info.result, start(x, s)])
other_kind = create(); conditional(other_kind, condition(other_kind), 0, 1)
tell([cu.cuGraphExecUpdate_v2(P(x), P(other_kind), c.byref(info)), info.result, start(x, s)])
ok(begin(s)); tell([start(x, s)]); end(s)
tell([loop, which, other])
""").end()
    assert told[:4] == [[13, 0, True, [13, 4], [0, 2, 0], 1, 1, 801], [0, 0, 0], [910, 5, 0], [801]]
    loop, which, other = told[4]
    first, changed, updated = (agent.graph_nodes(args.exec) for args in agent.args("graph_instantiate"))
    for nodes, handle, value, assigned in ((first, loop, 3, True), (changed, loop, 3, True),
                                           (updated, other, 4, False)):
        (top,) = nodes
        assert isinstance(top, ConditionalNode)
        assert (top.handle, top.value, top.assigned, top.kind) == (handle, value, assigned, WHILE)
        switch, one, two = top.bodies[0]  # the embedded graph is unfolded in the body
        assert isinstance(switch, ConditionalNode) and (switch.kind, switch.dependencies) == (SWITCH, ())
        assert (one.dependencies, two.dependencies) == ((0,), (1,))
        memset, kernel = switch.bodies[1]
        assert isinstance(memset, MemsetNode) and isinstance(kernel, KernelNode) and kernel.dependencies == (0,)
        assert struct.unpack_from("<Q", kernel.parameters) == (handle,)
    assert agent.names().count("graph_exec_update") == 0 and first[0].bodies[0][0].bodies[1][0].value == 7
    assert changed[0].bodies[0][0].bodies[1][0].value == 5


def test_conditional_nodes_that_are_refused(agent, program):
    told = program(agent, program_of(WORDS) + """
context()
f, a, s, e = kernel(), alloc(4096), stream(), event()
g, h = create(), create()
handle = condition(g)
tell([cu.cuGraphConditionalHandleCreate(c.byref(U64()), P(g), current(), 0, 2),
      cu.cuGraphConditionalHandleCreate(c.byref(U64()), P(5), current(), 0, 0),
      cu.cuGraphConditionalHandleCreate(None, P(g), current(), 0, 0),
      cu.cuGraphConditionalHandleCreate(c.byref(U64()), P(g), P(7), 0, 0),
      cu.cuGraphConditionalHandleCreate(c.byref(U64()), P(g), None, 0, 0)])
tell([try_conditional(g, handle, *form)[0] for form in ((0, 0), (0, 3), (1, 2), (2, 0), (3, 1), (2, 1025))]
     + [try_conditional(g, handle, 0, 1, context=False)[0]])
tell([try_conditional(h, handle, 0, 1)[0], try_conditional(g, handle + 50, 0, 1)[0], made(g)])   # of g; unknown; unused
node, (body,) = conditional(g, handle, 0, 1)
child = cu.cuGraphAddChildGraphNode(c.byref(P()), P(h), None, SIZE(0), P(g))
tell([try_conditional(g, handle, 0, 1)[0], made(g), child])
ok(cu.cuGraphAddEventRecordNode(c.byref(P()), P(body), None, SIZE(0), P(e)))
tell([made(g)])
for n in nodes(body): ok(cu.cuGraphDestroyNode(P(n)))
pageable = (c.c_ubyte * 16)()
into(body, s, lambda: cu.cuMemcpyHtoDAsync_v2(U64(a), pageable, SIZE(16), P(s)))
tell([made(g)])
for n in nodes(body): ok(cu.cuGraphDestroyNode(P(n)))
pinned = P(); ok(cu.cuMemHostAlloc(c.byref(pinned), SIZE(64), 0))
into(body, s, lambda: cu.cuMemcpyHtoDAsync_v2(U64(a), pinned, SIZE(16), P(s)))
tell([made(g)])
# a kernel sets it, then the host does something, then it is asked
k = create(); late = condition(k)
into(k, s, lambda: launch(f, late, 1, s), lambda: cu.cuMemcpyDtoHAsync_v2(pageable, U64(a), SIZE(16), P(s)))
conditional(k, late, 0, 1, nodes(k)[1:])
tell([made(k)])
""").end()
    assert told == [[1, 1, 1, 201, 201], [1, 1, 1, 1, 1, 801, 201], [1, 1, 1], [1, 0, 801], [801], [801], [0], [801]]


@pytest.fixture
def able(tmp_path: Path) -> Iterator[FakeAgent]:
    """Its device has CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS."""
    with FakeAgent(tmp_path, attributes={122: 1}) as running:
        yield running


def test_batches_of_memory_operations(able, program):
    told = program(able, program_of(WORDS) + """
context()
a, s = alloc(4096), stream()
def batch(*operations): return (Operation * len(operations))(*(Operation(*o) for o in operations))
WAIT, WRITE, FLUSH, WAIT8, WRITE8, BARRIER = 1, 2, 3, 4, 5, 6
def give(count, array, flags=0): return cu.cuStreamBatchMemOp_v2(P(s), count, array, flags)
both = batch((WRITE8, a, 1 << 40, 0), (BARRIER, 0, 0, 0), (WAIT, a + 8, (1 << 40) + 1, 0))
c.c_uint.from_buffer(both, 48 + 4).value = 1            # the barrier's flags: of the GPU alone
tell([give(3, both), give(0, both), give(1, None), give(1, both, 1), give(1, batch((9, a, 0, 0))),
      give(1, batch((WRITE, a + 2, 0, 0))), give(1, batch((WRITE, 64, 0, 0))), give(257, (Operation * 257)())])
ok(begin(s)); ok(give(3, both)); ok(cu.cuStreamWriteValue32_v2(P(s), U64(1 << 20), 5, 0)); code, g = end(s)
taken = [kind(n) for n in nodes(g)]
x = instantiate(g)
params = Batch()
ok(cu.cuGraphBatchMemOpNodeGetParams(P(nodes(g)[0]), c.byref(params)))
shown = [params.count, params.array[0].value, params.array[2].type]
refused = start(x, s)                                   # the second node's word is nowhere
good = Batch(None, 1, batch((WRITE, a + 16, 6, 0)), 0)
ok(cu.cuGraphExecBatchMemOpNodeSetParams(P(x), P(nodes(g)[1]), c.byref(good)))
tell([code, taken, shown, refused, start(x, s)])
h = create(); n = P()
ok(cu.cuGraphAddBatchMemOpNode(c.byref(n), P(h), None, SIZE(0), c.byref(good)))
ok(cu.cuGraphBatchMemOpNodeSetParams(n, c.byref(Batch(None, 1, batch((WRITE, a + 24, 7, 0)), 0))))
bad = Batch(None, 1, batch((WRITE, a + 1, 7, 0)), 0)
tell([cu.cuGraphBatchMemOpNodeSetParams(n, c.byref(bad)), start(instantiate(h), s)])
""").end()
    assert told == [[0, 1, 1, 1, 1, 1, 1, 1], [0, [12, 12], [3, 1 << 40, 1], 1, 0], [1, 0]]
    given = [(args.kind, args.value) for args in able.args("stream_memory_operation")]
    both = [(1, 1 << 40), (2, 1)]
    assert given == [*both, *both, (0, 6), (0, 7)]


def test_pointers_are_looked_up_at_a_launch(agent, program):
    """As cuDNN captures its engines: with pointers to nothing, only to read the nodes."""
    told = program(agent, program_of(WORDS) + """
context()
f, a, s = kernel(), alloc(4096), stream()
nowhere = a + (1 << 36)
ok(begin(s))
tell([fill(nowhere, s), fill(0x1000, s), cu.cuMemcpyDtoDAsync_v2(U64(nowhere), U64(0x2000), SIZE(64), P(s)),
      launch(f, nowhere, 1, s), status(s)])
code, g = end(s)
x = instantiate(g)
outside = [fill(nowhere, s), cu.cuMemcpyDtoDAsync_v2(U64(nowhere), U64(a), SIZE(64), P(s))]
tell([code, [kind(n) for n in nodes(g)], start(x, s), start(x, s), cu.cuStreamSynchronize(P(s)), outside])
class Memset(c.Structure):
    _fields_ = [("dst", U64), ("pitch", SIZE), ("value", c.c_uint), ("element", c.c_uint), ("width", SIZE),
                ("height", SIZE)]
h, n = create(), P()
into_b = Memset(nowhere, 0, 7, 1, 16, 1)
ok(cu.cuGraphAddMemsetNode(c.byref(n), P(h), None, SIZE(0), c.byref(into_b), None))
y = instantiate(h)
refused = start(y, s)
ok(cu.cuGraphExecMemsetNodeSetParams(P(y), n, c.byref(Memset(a, 0, 7, 1, 16, 1)), None))
there = start(y, s)
ok(cu.cuGraphExecMemsetNodeSetParams(P(y), n, c.byref(into_b), None))
gone = start(y, s)
ok(cu.cuGraphNodeSetEnabled(P(y), n, 0))
off = start(y, s)
ok(cu.cuGraphNodeSetEnabled(P(y), n, 1))
tell([refused, there, gone, off, start(y, s), list(d2h(a, 2))])
""").end()
    assert told == [[0, 0, 0, 0, 1], [0, [2, 2, 1, 0], 1, 1, 0, [1, 1]], [1, 0, 1, 0, 1, [7, 7]]]
    assert agent.names().count("graph_instantiate") == 1  # of the second graph, when its pointer was one
