"""Programs that capture streams."""

from __future__ import annotations

import textwrap

#: Words of the programs below, behind the prelude.
WORDS = """
GLOBAL, LOCAL, RELAXED = 0, 1, 2
def begin(s, mode=GLOBAL): return cu.cuStreamBeginCapture_v2(P(s), mode)
def end(s):
    graph = P()
    return cu.cuStreamEndCapture(P(s), c.byref(graph)), graph.value
def status(s):
    value = c.c_int(7)
    ok(cu.cuStreamIsCapturing(P(s), c.byref(value)))
    return value.value
def wait(s, e, flags=0): return cu.cuStreamWaitEvent(P(s), P(e), flags)
def record(e, s, flags=0): return cu.cuEventRecordWithFlags(P(e), P(s), flags)
def fill(a, s, value=1): return cu.cuMemsetD8Async(U64(a), value, SIZE(16), P(s))
def nodes(graph):
    n = SIZE()
    ok(cu.cuGraphGetNodes(P(graph), None, c.byref(n)))
    found = (P * n.value)()
    ok(cu.cuGraphGetNodes(P(graph), found, c.byref(n)))
    return list(found)
def kind(node):
    value = c.c_int()
    ok(cu.cuGraphNodeGetType(P(node), c.byref(value)))
    return value.value
def before(node):
    n = SIZE()
    ok(cu.cuGraphNodeGetDependencies(P(node), None, c.byref(n)))
    found = (P * n.value)()
    ok(cu.cuGraphNodeGetDependencies(P(node), found, c.byref(n)))
    return list(found)
def instantiate(graph, flags=0):
    executable = P()
    ok(cu.cuGraphInstantiateWithFlags(c.byref(executable), P(graph), c.c_uint64(flags)))
    return executable.value
def start(executable, s): return cu.cuGraphLaunch(P(executable), P(s))
"""


def program_of(code: str) -> str:
    return WORDS + textwrap.dedent(code)
