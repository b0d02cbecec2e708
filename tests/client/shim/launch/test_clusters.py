"""Clusters: what the worker is asked, and what a launch refuses at the call."""

from __future__ import annotations

CLUSTERS = """
class Attribute(c.Structure):
    _fields_ = [("id", c.c_int), ("pad", c.c_int), ("dim", c.c_uint * 3), ("rest", c.c_ubyte * 52)]

class Config(c.Structure):
    _fields_ = [("grid", c.c_uint * 3), ("block", c.c_uint * 3), ("shared", c.c_uint), ("stream", P),
                ("attributes", c.POINTER(Attribute)), ("count", c.c_uint)]

def config(*cluster, grid=64):
    attribute = Attribute(4, 0, (c.c_uint * 3)(*cluster))
    return Config((c.c_uint * 3)(grid, 1, 1), (c.c_uint * 3)(32, 1, 1), 0, None, c.pointer(attribute), 1)
"""


def test_the_worker_is_asked_once_for_each_question(agent, program):
    told = program(agent, CLUSTERS + """
context()
f = kernel()
def ask(name, *cluster):
    value = c.c_int(-1)
    return [getattr(cu, name)(c.byref(value), f, c.byref(config(*cluster))), value.value]
active, potential = "cuOccupancyMaxActiveClusters", "cuOccupancyMaxPotentialClusterSize"
tell([ask(active, 2, 1, 1), ask(active, 2, 1, 1), ask(active, 4, 1, 1), ask(potential, 2, 1, 1)])
ok(cu.cuFuncSetAttribute(f, 14, 1))   # NON_PORTABLE_CLUSTER_SIZE_ALLOWED: another question
tell(ask(active, 2, 1, 1))
""").end()
    assert told == [[[0, 120], [0, 120], [0, 140], [0, 121]], [0, 120]]
    asked = agent.args("cluster_occupancy")
    assert [(a.form, a.cluster_x, a.grid_x, a.block_x) for a in asked] == [
        (0, 2, 64, 32), (0, 4, 64, 32), (1, 2, 64, 32), (0, 2, 64, 32)]


def test_a_cluster_that_is_too_large_is_refused_at_the_call(agent, program):
    told = program(agent, CLUSTERS + """
context()
f, at = kernel(), alloc(64)
values = (c.c_uint64(at), c.c_int(1), c.c_float(0))
params = (P * 3)(*(c.addressof(v) for v in values))
def go(*cluster):
    return cu.cuLaunchKernelEx(c.byref(config(*cluster)), f, params, None)
tell([go(8, 1, 1), go(16, 1, 1), go(64, 1, 1), go(3, 1, 1), go(0, 1, 1)])
ok(cu.cuFuncSetAttribute(f, 14, 1))
tell([go(16, 1, 1), go(32, 1, 1), cu.cuCtxSynchronize()])
""").end()
    assert told == [[0, 912, 912, 912, 912], [0, 912, 0]]
    assert agent.names().count("launch") == 2
