"""Graphs made by hand, executable graphs, and what of them reaches the journal."""

from __future__ import annotations

import struct

from rgpu.session.objects.graphs import EmptyNode, KernelNode, MemsetNode
from tests.support.shim.captures import program_of

#: Parameters of nodes as C structures.
PARAMS = """
class Kernel(c.Structure):
    _fields_ = [("func", P), ("grid", c.c_uint * 3), ("block", c.c_uint * 3), ("shared", c.c_uint), ("params", P),
                ("extra", P), ("kern", P), ("ctx", P)]
class Memset(c.Structure):
    _fields_ = [("dst", U64), ("pitch", SIZE), ("value", c.c_uint), ("element", c.c_uint), ("width", SIZE),
                ("height", SIZE)]
def kernel_params(f, pointer, value, grid=1):
    values = (c.c_uint64(pointer), c.c_int(value), c.c_float(0))
    array = (P * 3)(*(c.addressof(v) for v in values))
    p = Kernel(func=f, grid=(c.c_uint * 3)(grid, 1, 1), block=(c.c_uint * 3)(1, 1, 1), params=c.addressof(array))
    p.keep = values, array
    return p
def create():
    graph = P()
    ok(cu.cuGraphCreate(c.byref(graph), 0))
    return graph.value
def add(what, graph, dependencies, *arguments):
    node = P()
    code = getattr(cu, "cuGraphAdd" + what)(c.byref(node), P(graph), (P * len(dependencies))(*dependencies),
                                            SIZE(len(dependencies)), *arguments)
    ok(code)
    return node.value
"""


def test_the_same_nodes_by_hand(agent, program):
    told = program(agent, program_of(PARAMS) + """
context()
f, a, s = kernel(), alloc(4096), stream()
h2d(a, bytes(16), s)
g = create()
k = add("KernelNode_v2", g, [], c.byref(kernel_params(f, a, 3, grid=5)))
m = add("MemsetNode", g, [k], c.byref(Memset(a + 64, 0, 7, 1, 16, 1)), None)
e = add("EmptyNode", g, [k, m])
out = Kernel()
ok(cu.cuGraphKernelNodeGetParams_v2(P(k), c.byref(out)))
pointers = (P * 3).from_address(out.params)
tell([out.grid[0], c.c_uint64.from_address(pointers[0]).value == a, c.c_int.from_address(pointers[1]).value])
codes = [cu.cuGraphAddDependencies(P(g), (P * 1)(k), (P * 1)(m), SIZE(1)),   # is there
         cu.cuGraphRemoveDependencies(P(g), (P * 1)(e), (P * 1)(k), SIZE(1)),  # is not
         cu.cuGraphAddDependencies(P(g), (P * 1)(e), (P * 1)(e), SIZE(1)),
         cu.cuGraphAddKernelNode_v2(c.byref(P()), P(g), (P * 2)(k, k), SIZE(2), c.byref(kernel_params(f, a, 3))),
         cu.cuGraphAddKernelNode_v2(c.byref(P()), P(g), None, SIZE(0), c.byref(kernel_params(f, a, 3, grid=0)))]
clone, found = P(), P()
ok(cu.cuGraphClone(c.byref(clone), P(g)))
ok(cu.cuGraphNodeFindInClone(c.byref(found), P(m), clone))
tell([codes, kind(found.value), found.value != m, len(nodes(clone.value)),
      cu.cuGraphNodeFindInClone(c.byref(found), P(m), P(g))])
x = instantiate(g)
ok(cu.cuGraphAddDependencies(P(g), (P * 1)(e), (P * 1)(k), SIZE(1)))
tell([cu.cuGraphInstantiateWithFlags(c.byref(P()), P(g), c.c_uint64(0)), cu.cuGraphDestroyNode(P(e)), len(nodes(g))])
ok(start(x, s)); ok(start(x, s)); ok(cu.cuStreamSynchronize(P(s)))
tell([list(d2h(a, 16)), list(d2h(a + 64, 16))])
""").end()
    assert told == [[5, True, 3], [[1, 1, 1, 1, 1], 2, True, 3, 1], [1, 0, 2], [[6] * 16, [7] * 16]]
    (args,) = agent.args("graph_instantiate")
    nodes = agent.graph_nodes(args.exec)
    assert [type(node) for node in nodes] == [KernelNode, MemsetNode, EmptyNode]
    assert nodes[0].grid == (5, 1, 1) and struct.unpack_from("<Qi", nodes[0].parameters)[1] == 3


def test_updates_travel_with_the_next_launch(agent, program):
    told = program(agent, program_of(PARAMS) + """
context()
f, a, s = kernel(), alloc(4096), stream()
g = create()
k = add("KernelNode_v2", g, [], c.byref(kernel_params(f, a, 1)))
m = add("MemsetNode", g, [], c.byref(Memset(a + 64, 0, 7, 1, 16, 1)), None)
x = instantiate(g)
for value in (2, 3, 4):
    ok(cu.cuGraphExecKernelNodeSetParams_v2(P(x), P(k), c.byref(kernel_params(f, a, value))))
ok(cu.cuGraphNodeSetEnabled(P(x), P(m), 0))
enabled = c.c_uint(9); ok(cu.cuGraphNodeGetEnabled(P(x), P(m), c.byref(enabled)))
ok(start(x, s)); ok(start(x, s))
ok(cu.cuGraphExecKernelNodeSetParams_v2(P(x), P(k), c.byref(kernel_params(f, a, 4))))  # as it is
ok(start(x, s))
tell([enabled.value, list(d2h(a, 16)), list(d2h(a + 64, 16))])
other = create()
k2 = add("KernelNode_v2", other, [], c.byref(kernel_params(f, a, 10)))
m2 = add("MemsetNode", other, [], c.byref(Memset(a + 64, 0, 8, 1, 16, 1)), None)
class Info(c.Structure): _fields_ = [("result", c.c_int), ("node", P), ("source", P)]
info = Info()
tell([cu.cuGraphExecUpdate_v2(P(x), P(other), c.byref(info)), info.result])
ok(cu.cuGraphNodeSetEnabled(P(x), P(m), 1)); ok(start(x, s))
tell([list(d2h(a, 16)), list(d2h(a + 64, 16))])
ok(cu.cuGraphAddDependencies(P(other), (P * 1)(k2), (P * 1)(m2), SIZE(1)))
first = [cu.cuGraphExecUpdate_v2(P(x), P(other), c.byref(info)), info.result, info.node == m2]
third = create(); add("MemsetNode", third, [], c.byref(Memset(a, 0, 8, 1, 16, 1)), None); add("EmptyNode", third, [])
second = [cu.cuGraphExecUpdate_v2(P(x), P(third), c.byref(info)), info.result]
tell([first, second])
""").end()
    assert told == [[0, [12] * 16, [0] * 16], [0, 0], [[22] * 16, [8] * 16], [[910, 2, True], [910, 3]]]
    assert agent.names().count("graph_exec_update") == 2  # none for what did not change


def test_host_memory_is_read_and_written_at_every_launch(agent, program):
    """Copies from and to the host and host functions are calls of their own, in order, between parts of the graph."""
    told = program(agent, program_of(PARAMS) + """
context()
f, a, s = kernel(), alloc(4096), stream()
source, target = P(), P()
ok(cu.cuMemHostAlloc(c.byref(source), SIZE(64), 0)); ok(cu.cuMemHostAlloc(c.byref(target), SIZE(64), 0))
calls = []
@c.CFUNCTYPE(None, P)
def host(user): calls.append(c.string_at(target.value, 1)[0])
ok(begin(s))
ok(cu.cuMemcpyHtoDAsync_v2(U64(a), source, SIZE(16), P(s)))
ok(launch(f, a, 1, s))
ok(cu.cuMemcpyDtoHAsync_v2(target, U64(a), SIZE(16), P(s)))
ok(cu.cuLaunchHostFunc(P(s), host, None))
ok(launch(f, a, 1, s))
code, g = end(s)
x = instantiate(g)
results = []
import time                                    # the fake agent answers the wait before the function has run
for value in (10, 20, 30):
    c.memset(source, value, 16)
    ok(start(x, s)); ok(cu.cuStreamSynchronize(P(s)))
    results.append(c.string_at(target, 16)[3])
    deadline = time.monotonic() + 20
    while len(calls) < len(results) and time.monotonic() < deadline: time.sleep(0.001)
tell([code, [kind(n) for n in nodes(g)], results, calls, list(d2h(a, 2))])
""").end()
    assert told == [[0, [1, 0, 1, 3, 0], [11, 21, 31], [11, 21, 31], [32, 32]]]
    names = [n for n in agent.names() if n in ("memcpy_h2d", "graph_launch", "memcpy_d2h", "host_function")]
    assert names[:5] == ["memcpy_h2d", "graph_launch", "memcpy_d2h", "host_function", "graph_launch"]
    assert agent.names().count("graph_instantiate") == 2


def test_events_and_children(agent, program):
    told = program(agent, program_of(PARAMS) + """
context()
f, a, s, e = kernel(), alloc(4096), stream(), event()
child = create()
c1 = add("MemsetNode", child, [], c.byref(Memset(a, 0, 1, 1, 16, 1)), None)
c2 = add("KernelNode_v2", child, [c1], c.byref(kernel_params(f, a, 1)))
g = create()
inner = add("ChildGraphNode", g, [], P(child))
again = add("ChildGraphNode", g, [inner], P(child))
empty = add("ChildGraphNode", g, [again], P(create()))
last = add("KernelNode_v2", g, [empty], c.byref(kernel_params(f, a, 1)))
add("EventRecordNode", g, [last], P(e))
embedded = P(); ok(cu.cuGraphChildGraphNodeGetGraph(P(inner), c.byref(embedded)))
x = instantiate(g)
tell([cu.cuGraphDestroy(embedded), embedded.value != child, len(nodes(embedded.value))])
ok(start(x, s)); ok(cu.cuEventSynchronize(P(e)))
tell(list(d2h(a, 2)))
ok(cu.cuGraphExecKernelNodeSetParams_v2(P(x), P(nodes(embedded.value)[1]), c.byref(kernel_params(f, a + 64, 1))))
ok(start(x, s)); tell([list(d2h(a, 2)), list(d2h(a + 64, 2))])
ok(begin(s)); ok(start(x, s)); code, outer = end(s)
tell([code, [kind(n) for n in nodes(outer)]])
""").end()
    assert told == [[1, True, 2], [3, 3], [[3, 3], [1, 1]], [0, [4]]]
    assert [type(n).__name__ for n in agent.graph_nodes(agent.args("graph_instantiate")[0].exec)] == [
        "MemsetNode", "KernelNode", "MemsetNode", "KernelNode", "KernelNode"]
    assert [n.dependencies for n in agent.graph_nodes(agent.args("graph_instantiate")[0].exec)] == [
        (), (0,), (1,), (2,), (3,)]


def test_memory_nodes(agent, program):
    told = program(agent, program_of(PARAMS) + """
context()
f, s = kernel(), stream()
def allocate(): 
    out = U64(); ok(cu.cuMemAllocAsync(c.byref(out), SIZE(4096), P(s))); return out.value
used = lambda: [v.value for v in (U64(), U64()) if not cu.cuDeviceGetGraphMemAttribute(0, 0, c.byref(v))][0]
ok(begin(s)); a = allocate(); ok(launch(f, a, 1, s)); ok(cu.cuMemFreeAsync(U64(a), P(s))); code, g = end(s)
kinds = [kind(n) for n in nodes(g)]
x = instantiate(g); ok(start(x, s)); ok(start(x, s))
tell([code, kinds, used(), cu.cuGraphClone(c.byref(P()), P(g))])
ok(begin(s)); b = allocate(); ok(launch(f, b, 1, s)); g2 = end(s)[1]
y = instantiate(g2); auto = instantiate(g2, 1)
tell([b != a, start(y, s), used(), start(y, s), cu.cuMemFreeAsync(U64(b), P(s)), used(), start(y, s), start(auto, s),
      cu.cuMemFree_v2(U64(b)), used()])
before = info()[0]
for executable in (x, y, auto): ok(cu.cuGraphExecDestroy(P(executable)))
for graph in (g, g2): ok(cu.cuGraphDestroy(P(graph)))
import time
pool = P(); ok(cu.cuDeviceGetDefaultMemPool(c.byref(pool), 0))
for _ in range(500):  # until the watermark says that the last launch is complete
    ok(cu.cuMemPoolTrimTo(pool, SIZE(0)))
    if info()[0] > before: break
    time.sleep(0.01)
tell(info()[0] > before)
""").end()
    assert told == [[0, [10, 0, 11], 0, 801], [True, 0, 4096, 1, 0, 0, 0, 0, 0, 0], True]
    assert len(agent.args("memory_free")) == 2


def test_a_module_stays_while_a_graph_needs_it(agent, program):
    program(agent, program_of("""
        context()
        module, f = P(), P()
        ok(cu.cuModuleLoadData(c.byref(module), b".version 7.5\\n.target sm_75\\n.address_size 64\\n\\0"))
        ok(cu.cuModuleGetFunction(c.byref(f), module, b"kernel"))
        a, s = alloc(64), stream()
        ok(begin(s)); ok(launch(f, a, 1, s)); g = end(s)[1]
        x = instantiate(g)
        ok(cu.cuModuleUnload(module)); ok(cu.cuGraphDestroy(P(g))); ok(start(x, s)); ok(cu.cuGraphExecDestroy(P(x)))
        """)).end()
    names = agent.names()
    assert names.index("graph_launch") < names.index("graph_exec_destroy") and names.count("module_unload") == 1
    assert names.index("graph_launch") < names.index("module_unload")


def test_user_objects(agent, program):
    told = program(agent, program_of(PARAMS) + """
context()
gone = []
@c.CFUNCTYPE(None, P)
def destroy(user): gone.append(user)
def make(n=1):
    out = P(); ok(cu.cuUserObjectCreate(c.byref(out), P(77), destroy, n, 1)); return out
first = make()
g = create()
ok(cu.cuGraphRetainUserObject(P(g), first, 1, 1))  # the program's reference goes to the graph
clone = P(); ok(cu.cuGraphClone(c.byref(clone), P(g)))
x = instantiate(g)
steps = []
ok(cu.cuGraphDestroy(P(g))); steps.append(len(gone)); ok(cu.cuGraphDestroy(clone)); steps.append(len(gone))
ok(cu.cuGraphExecDestroy(P(x))); steps.append(len(gone))
second = make(2); ok(cu.cuUserObjectRelease(second, 1)); steps.append(len(gone)); ok(cu.cuUserObjectRelease(second, 1))
tell([steps, len(gone), gone[0], cu.cuUserObjectRelease(second, 1),
      cu.cuUserObjectCreate(c.byref(P()), None, destroy, 1, 0)])
""").end()
    assert told == [[[0, 0, 1, 1], 2, 77, 1, 1]]


def test_what_is_refused(agent, program):
    told = program(agent, program_of(PARAMS) + """
context()
s, g = stream(), create()
raw = (c.c_ubyte * 256)(); raw[0] = 8  # a semaphore node
made = lambda flags: cu.cuGraphInstantiateWithFlags(c.byref(P()), P(g), c.c_uint64(flags))
tell([cu.cuGraphAddNode(c.byref(P()), P(g), None, SIZE(0), raw), made(4), made(64), cu.cuGraphLaunch(P(g), P(s)),
      cu.cuGraphDestroy(P(s)), cu.cuGraphInstantiate(c.byref(P()), P(g), None, None, SIZE(0))])
address, result = P(), c.c_int()
versions = []
for name, version in ((b"cuGraphInstantiate", 10000), (b"cuGraphInstantiate", 12000),
                      (b"cuStreamGetCaptureInfo", 11030), (b"cuGraphAddKernelNode", 11000),
                      (b"cuGraphAddKernelNode", 12000), (b"cuGraphExecUpdate", 11000)):
    ok(cu.cuGetProcAddress_v2(name, c.byref(address), version, c.c_uint64(0), c.byref(result)))
    versions.append(address.value)
tell([len(set(versions)), versions[1] == c.cast(cu.cuGraphInstantiate_v2, P).value])
""").end()
    assert told == [[801, 801, 1, 1, 1, 0], [6, True]]
