"""Kernel nodes of a graph, made by captured launches.

Not by ``cuGraphAddKernelNode``: that checks the shape of a launch before it
has received the cluster dimensions. A captured launch has two needs that a
plain one does not have:

* Parameters are given one by one, as the CUDA runtime gives them: a packed
  buffer (CU_LAUNCH_PARAM_BUFFER_POINTER) has to fit the 4 KiB that kernel
  parameters had before CUDA 12.1, and PyTorch's optimizers use more.
* The function's attributes may have changed since the program captured the
  launch (a library sets the shared memory it needs before each launch, and a
  rebuilt session has the last value only). The values that the node needs are
  set for the time of the launch, then restored.

Sources: CUDA Driver API 13.0, "Execution Control" (CUlaunchConfig,
CUfunction_attribute), "Graph Management" (CUDA_KERNEL_NODE_PARAMS_v2,
cuStreamBeginCaptureToGraph); CUDA C++ Programming Guide, "Function Parameters".
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import struct
from collections.abc import Iterator
from typing import Any

from cuda.bindings import driver

from rgpu.server.device.cuda.errors import check
from rgpu.session.errors import DeviceError
from rgpu.session.objects.graphs import ATTRIBUTE_SIZE, KernelNode

Layout = tuple[tuple[int, int], ...]  #: (offset, size) in bytes of each parameter

CUDA_ERROR_INVALID_VALUE = 1
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_COOPERATIVE, _CLUSTER = 2, 4  # CUlaunchAttributeID
#: CUlaunchAttributeIDs that apply to a kernel node; others concern streams, or weaken edges.
_OF_NODES = frozenset({1, _COOPERATIVE, _CLUSTER, 5, 8, 9, 10, 11, 14})
_MAX_DYNAMIC_SHARED, _NON_PORTABLE_CLUSTER = 8, 14  # CUfunction_attribute
_PORTABLE = 8  #: blocks of a cluster that need no attribute


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig: grid, block and dynamic shared memory, stream, attributes."""

    _fields_ = [("shape", ctypes.c_uint * 7), ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p),
                ("count", ctypes.c_uint)]


class _NodeParameters(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [("function", ctypes.c_void_p), ("shape", ctypes.c_uint * 7), ("parameters", ctypes.c_void_p),
                ("extra", ctypes.c_void_p), ("kernel", ctypes.c_void_p), ("context", ctypes.c_void_p)]


class _Parameters:
    """A node's parameters, as an array of pointers; the driver copies what they point to at the call."""

    def __init__(self, node: KernelNode, layout: Layout) -> None:
        if max((offset + size for offset, size in layout), default=0) > len(node.parameters):
            raise DeviceError(f"{len(node.parameters)} bytes of parameters, too few for {layout}",
                              CUDA_ERROR_INVALID_VALUE)
        self._data = ctypes.create_string_buffer(node.parameters, max(1, len(node.parameters)))
        start = ctypes.addressof(self._data)
        self.pointers = (ctypes.c_void_p * max(1, len(layout)))(*(start + offset for offset, _ in layout))


def capture(graph: Any, stream: Any, before: list[Any], function: Any, layout: Layout, node: KernelNode) -> Any:
    """Add the node behind ``before``, through a stream that has no other use; returns the CUgraphNode.

    Raises :class:`DeviceError`, with all parameters of a launch that the driver refuses.
    """
    handle = ctypes.c_void_p(int(stream))
    nodes = (ctypes.c_void_p * max(1, len(before)))(*map(int, before))
    call("cuStreamBeginCaptureToGraph", handle, ctypes.c_void_p(int(graph)), nodes, None,
          ctypes.c_size_t(len(before)), _RELAXED)
    try:
        with _permitted(function, node):
            _launch(handle, function, layout, node)
        made = _last_node(handle)
    finally:
        result = _library().cuStreamEndCapture(handle, ctypes.byref(ctypes.c_void_p()))
    check((driver.CUresult(result),), "cuStreamEndCapture")
    return made


def set_parameters(executable: Any, handle: Any, function: Any, layout: Layout, node: KernelNode) -> None:
    """Give a kernel node of an executable graph the shape and the parameters of ``node``. Raises DeviceError."""
    parameters = _Parameters(node, layout)
    values = _NodeParameters(int(function), _shape(node), ctypes.addressof(parameters.pointers), None, None, None)
    with _permitted(function, node):
        call("cuGraphExecKernelNodeSetParams_v2", ctypes.c_void_p(int(executable)), ctypes.c_void_p(int(handle)),
              ctypes.byref(values))


def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver by its symbol. Raises :class:`DeviceError` with its name and code."""
    check((driver.CUresult(getattr(_library(), name)(*arguments)),), name)


def _shape(node: KernelNode) -> Any:
    return (ctypes.c_uint * 7)(*node.grid, *node.block, node.shared)


def _launch(stream: ctypes.c_void_p, function: Any, layout: Layout, node: KernelNode) -> None:
    parameters = _Parameters(node, layout)
    attributes = _attributes(node)
    packed = b"".join(struct.pack("<ii", identity, 0) + value for identity, value in attributes)
    data = ctypes.create_string_buffer(packed, max(1, len(packed)))
    config = _LaunchConfig(_shape(node), stream, ctypes.addressof(data), len(attributes))
    try:
        call("cuLaunchKernelEx", ctypes.byref(config), ctypes.c_void_p(int(function)), parameters.pointers, None)
    except DeviceError as error:
        raise DeviceError(f"{error.message} for a captured launch of {_describe(function, layout, node)}",
                          error.result) from error


def _last_node(stream: ctypes.c_void_p) -> Any:
    last, count, status = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_size_t(), ctypes.c_int()
    call("cuStreamGetCaptureInfo_v2", stream, ctypes.byref(status), None, None, ctypes.byref(last),
          ctypes.byref(count))
    if count.value != 1:
        raise DeviceError(f"a captured launch made {count.value} nodes", CUDA_ERROR_INVALID_VALUE)
    return driver.CUgraphNode(last[0])


@contextlib.contextmanager
def _permitted(function: Any, node: KernelNode) -> Iterator[None]:
    """Let the function's attributes allow the node's launch; restored at the end."""
    wanted = {_MAX_DYNAMIC_SHARED: node.shared, _NON_PORTABLE_CLUSTER: int(_cluster_blocks(node) > _PORTABLE)}
    changed = {}
    for attribute, least in wanted.items():
        value = _attribute(function, attribute)
        if value is not None and value < least:
            _set(function, attribute, least)
            changed[attribute] = value
    try:
        yield
    finally:
        for attribute, value in changed.items():
            _set(function, attribute, value)


def _attribute(function: Any, number: int) -> int | None:
    error, value = driver.cuFuncGetAttribute(driver.CUfunction_attribute(number), function)
    return None if int(error) else int(value)


def _set(function: Any, number: int, value: int) -> None:
    """Set an attribute; a refusal shows at the launch."""
    driver.cuFuncSetAttribute(function, driver.CUfunction_attribute(number), value)


def _attributes(node: KernelNode) -> list[tuple[int, bytes]]:
    """Return (CUlaunchAttributeID, 64 bytes of value) of the attributes that a node takes."""
    found = [(identity, value) for identity, value in _given(node) if identity in _OF_NODES]
    if node.cooperative:
        found.append((_COOPERATIVE, struct.pack("<i60x", 1)))
    return found


def _given(node: KernelNode) -> list[tuple[int, bytes]]:
    """Return all attributes that the program gave."""
    return [(struct.unpack_from("<i", node.attributes, at)[0], node.attributes[at + 8:at + ATTRIBUTE_SIZE])
            for at in range(0, len(node.attributes), ATTRIBUTE_SIZE)]


def _cluster_blocks(node: KernelNode) -> int:
    return next((math.prod(struct.unpack_from("<3I", value)) for identity, value in _attributes(node)
                 if identity == _CLUSTER), 1)


def _describe(function: Any, layout: Layout, node: KernelNode) -> str:
    """Return all parameters of a launch that a driver may refuse."""
    error, name = driver.cuFuncGetName(function)
    attributes = ", ".join(f"{identity}={value[:16].hex()}" for identity, value in _given(node)) or "none"
    known = {each: _attribute(function, each) for each in range(16)}
    return (f"{name.decode() if not int(error) and isinstance(name, bytes) else '?'}: grid {node.grid}, block "
            f"{node.block}, {node.shared} bytes shared, cooperative {node.cooperative}, launch attributes "
            f"{attributes}, {len(layout)} parameters in {len(node.parameters)} bytes, function attributes {known}")
