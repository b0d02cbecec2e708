"""Conditional nodes of a CUgraph, and the handles of their conditions.

The program's handle of a condition is the session's own number, the same on every server; the driver's is another one
in each graph that is built. Kernels get a handle as a parameter, so the driver's replaces it in the parameters of the
graph's kernel nodes, wherever eight bytes of them are the session's number: that number is above every address and
every index, so no other value equals it. Memory that a kernel reads is not searched: a handle that a program keeps
there, instead of passing it, is unknown to the driver, which answers with an illegal address.

Sources: CUDA Driver API 13.0, "Graph Management" (cuGraphConditionalHandleCreate, cuGraphAddNode,
CUDA_CONDITIONAL_NODE_PARAMS).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cuda.bindings import driver

from rgpu.server.device.cuda.work.nodes import call
from rgpu.session.objects.graphs import CONDITIONAL, ConditionalNode, KernelNode

_ASSIGN_DEFAULT = 1  # CU_GRAPH_COND_ASSIGN_DEFAULT


class _Parameters(ctypes.Structure):
    """CUgraphNodeParams of a conditional node: its type, and CUDA_CONDITIONAL_NODE_PARAMS in the union behind it."""

    _fields_ = [("type", ctypes.c_int), ("reserved", ctypes.c_int * 3), ("handle", ctypes.c_uint64),
                ("kind", ctypes.c_int), ("size", ctypes.c_uint), ("bodies", ctypes.POINTER(ctypes.c_void_p)),
                ("context", ctypes.c_void_p), ("rest", ctypes.c_uint64 * 26)]


def create(graph: Any, context: Any, node: ConditionalNode) -> int:
    """Return the driver's handle for the node's condition, in this graph. Raises :class:`DeviceError`."""
    made = ctypes.c_uint64()
    call("cuGraphConditionalHandleCreate", ctypes.byref(made), ctypes.c_void_p(int(graph)),
         ctypes.c_void_p(int(context)), ctypes.c_uint(node.value),
         ctypes.c_uint(_ASSIGN_DEFAULT if node.assigned else 0))
    return made.value


def add(graph: Any, before: list[Any], context: Any, node: ConditionalNode, handle: int) -> tuple[Any, list[Any]]:
    """Add the node behind ``before``; returns (CUgraphNode, CUgraph of each body, empty). Raises DeviceError."""
    parameters = _Parameters(type=CONDITIONAL, handle=handle, kind=node.kind, size=len(node.bodies),
                             context=int(context))
    nodes = (ctypes.c_void_p * max(1, len(before)))(*map(int, before))
    made = ctypes.c_void_p()
    call("cuGraphAddNode_v2", ctypes.byref(made), ctypes.c_void_p(int(graph)), nodes, None,
         ctypes.c_size_t(len(before)), ctypes.byref(parameters))
    return driver.CUgraphNode(made.value), [driver.CUgraph(parameters.bodies[i]) for i in range(len(node.bodies))]


def translated(node: KernelNode, handles: Mapping[int, int]) -> KernelNode:
    """Return the node with the driver's handles in place of the session's (``handles``: session's → driver's)."""
    data = bytearray(node.parameters)
    for at in range(0, len(data) - 7 if handles else 0, 4):  # packed structures may align to 4
        (word,) = struct.unpack_from("<Q", data, at)
        if word in handles:
            struct.pack_into("<Q", data, at, handles[word])
    return replace(node, parameters=bytes(data)) if data != node.parameters else node
