"""Executable graphs on the GPU: a CUgraph of explicit nodes, instantiated, kept beside its nodes.

The nodes are those of :mod:`rgpu.session.objects.graphs`. Every edge is a full dependency,
so attributes that only weaken one (programmatic serialization) are left out. A
kernel node is a captured launch (:mod:`.nodes`).
An update uses ``cuGraphExec…SetParams`` where the driver allows it; one
that changes a kernel's function or attributes makes the graph anew, which
does not affect earlier launches.

Sources: CUDA Driver API 13.0, "Graph Management" (an executable graph that is
in flight when it is destroyed is freed at its completion; updates concern
later launches only).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cuda.bindings import driver

from rgpu.server.device.cuda.errors import check
from rgpu.server.device.cuda.work import conditions
from rgpu.server.device.cuda.work.nodes import Layout, capture, set_parameters
from rgpu.session.errors import DeviceError
from rgpu.session.objects.graphs import ConditionalNode, CopyNode, KernelNode, MemsetNode, Node, apply_changes, every

CUDA_ERROR_INVALID_HANDLE = 400
_NON_BLOCKING = 1


@dataclass
class _Exec:
    context: int
    flags: int
    nodes: list[Node]
    graph: Any = None
    handles: list[Any] = field(default_factory=list)  #: CUgraphNode of each node
    executable: Any = None
    conditions: dict[int, int] = field(default_factory=dict)  #: the session's handle → the driver's, in this graph


class Graphs:
    """The executable graphs of a device.

    ``use(context)``: makes the driver's context for the program's one current, and returns it.
    ``kernel(module, index)``: a function's handle and the (offset, size) of each of its parameters.
    ``made(number, executable, nodes)``: called when a graph can be launched; ``gone(number)``: when it no longer can.
    """

    def __init__(self, use: Callable[[int], Any], kernel: Callable[[int, int], tuple[Any, Layout]],
                 made: Callable[[int, Any, list[Node]], None], gone: Callable[[int], None]) -> None:
        self._use = use
        self._kernel = kernel
        self._made, self._gone = made, gone
        self._execs: dict[int, _Exec] = {}
        self._streams: dict[int, Any] = {}  #: by the driver's context: streams in which launches are captured

    def instantiate(self, number: int, context: int, flags: int, nodes: list[Node]) -> None:
        """Make an executable graph. Raises :class:`DeviceError` with the driver's code; then nothing is left of it."""
        if number in self._execs:
            raise DeviceError(f"graph {number} exists", CUDA_ERROR_INVALID_HANDLE)
        made = _Exec(context, flags, nodes)
        self._build(made)
        self._execs[number] = made
        self._made(number, made.executable, nodes)

    def update(self, number: int, changes: dict[int, Node]) -> None:
        """Replace nodes by index. Raises :class:`DeviceError`, or Corrupt for changes that do not fit the nodes."""
        found = self._find(number)
        before, found.nodes = found.nodes, apply_changes(found.nodes, changes)
        try:
            fits = all(self._set(found, index, before[index]) for index in changes)
        except DeviceError:
            fits = False  # the driver restricts changes; a new graph is not restricted
        if not fits:
            self._gone(number)
            self._dispose(found)
            self._build(found)
        self._made(number, found.executable, found.nodes)

    def destroy(self, number: int) -> None:
        """Destroy an executable graph. Raises :class:`DeviceError`."""
        found = self._find(number)
        self._gone(number)
        self._dispose(found)
        del self._execs[number]

    def destroy_context(self, context: int) -> None:
        """Destroy the executable graphs of a context."""
        for number in [number for number, found in self._execs.items() if found.context == context]:
            self.destroy(number)

    def _find(self, number: int) -> _Exec:
        found = self._execs.get(number)
        if found is None:
            raise DeviceError(f"graph {number} does not exist", CUDA_ERROR_INVALID_HANDLE)
        return found

    # -- building ---------------------------------------------------------------
    def _build(self, made: _Exec) -> None:
        self._use(made.context)
        made.graph = check(driver.cuGraphCreate(0), "cuGraphCreate")
        made.handles = []
        try:
            made.conditions = {
                node.handle: conditions.create(made.graph, self._use(made.context), node)
                for node in every(made.nodes) if isinstance(node, ConditionalNode)}
            self._fill(made, made.graph, made.nodes, made.handles)
            made.executable = check(driver.cuGraphInstantiate(made.graph, made.flags), "cuGraphInstantiate")
        except DeviceError:
            driver.cuGraphDestroy(made.graph)
            raise
        for index, node in enumerate(made.nodes):
            if node.disabled:
                check(driver.cuGraphNodeSetEnabled(made.executable, made.handles[index], 0), "cuGraphNodeSetEnabled")

    def _dispose(self, made: _Exec) -> None:
        self._use(made.context)
        check(driver.cuGraphExecDestroy(made.executable), "cuGraphExecDestroy")
        check(driver.cuGraphDestroy(made.graph), "cuGraphDestroy")

    def _fill(self, made: _Exec, graph: Any, nodes: Sequence[Node], handles: list[Any]) -> None:
        """Add the nodes to a graph: the one made, or a body of a conditional node in it."""
        for node in nodes:
            handles.append(self._add(made, graph, node, [handles[index] for index in node.dependencies]))

    def _add(self, made: _Exec, graph: Any, node: Node, before: list[Any]) -> Any:
        context = self._use(made.context)
        if isinstance(node, ConditionalNode):
            handle, bodies = conditions.add(graph, before, context, node, made.conditions[node.handle])
            for body, inner in zip(bodies, node.bodies, strict=True):
                self._fill(made, body, inner, [])
            return handle
        if isinstance(node, KernelNode):
            return self._add_kernel(made, graph, node, before, context)
        if isinstance(node, CopyNode):
            return check(driver.cuGraphAddMemcpyNode(graph, before, len(before), _copy(node), context),
                         "cuGraphAddMemcpyNode")
        if isinstance(node, MemsetNode):
            return check(driver.cuGraphAddMemsetNode(graph, before, len(before), _memset(node), context),
                         "cuGraphAddMemsetNode")
        return check(driver.cuGraphAddEmptyNode(graph, before, len(before)), "cuGraphAddEmptyNode")

    def _add_kernel(self, made: _Exec, graph: Any, node: KernelNode, before: list[Any], context: Any) -> Any:
        stream = self._streams.get(int(context))
        if stream is None:
            stream = self._streams[int(context)] = check(driver.cuStreamCreate(_NON_BLOCKING), "cuStreamCreate")
        function, layout = self._kernel(node.module, node.function)
        return capture(graph, stream, before, function, layout, conditions.translated(node, made.conditions))

    # -- updates ------------------------------------------------------------------
    def _set(self, found: _Exec, index: int, before: Node) -> bool:
        """Give one node its new parameters; False: that needs a new graph."""
        node, handle, context = found.nodes[index], found.handles[index], self._use(found.context)
        if isinstance(node, ConditionalNode):
            return node == before  # a driver cannot change the parameters of these
        if isinstance(node, KernelNode) and isinstance(before, KernelNode):
            if (node.module, node.function, node.cooperative, node.attributes) != (
                    before.module, before.function, before.cooperative, before.attributes):
                return False
            function, layout = self._kernel(node.module, node.function)
            set_parameters(found.executable, handle, function, layout,
                           conditions.translated(node, found.conditions))
        elif isinstance(node, CopyNode):
            check(driver.cuGraphExecMemcpyNodeSetParams(found.executable, handle, _copy(node), context),
                  "cuGraphExecMemcpyNodeSetParams")
        elif isinstance(node, MemsetNode):
            check(driver.cuGraphExecMemsetNodeSetParams(found.executable, handle, _memset(node), context),
                  "cuGraphExecMemsetNodeSetParams")
        if node.disabled != before.disabled:
            check(driver.cuGraphNodeSetEnabled(found.executable, handle, int(not node.disabled)),
                  "cuGraphNodeSetEnabled")
        return True


def _copy(node: CopyNode) -> Any:
    copy = driver.CUDA_MEMCPY3D()
    device = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcMemoryType = copy.dstMemoryType = device
    copy.srcDevice, copy.srcPitch, copy.srcHeight = node.source, node.source_pitch, _height(node, node.source_plane,
                                                                                           node.source_pitch)
    copy.dstDevice, copy.dstPitch = node.destination, node.destination_pitch
    copy.dstHeight = _height(node, node.destination_plane, node.destination_pitch)
    copy.WidthInBytes, copy.Height, copy.Depth = node.width, node.height, node.depth
    return copy


def _height(node: CopyNode, plane: int, pitch: int) -> int:
    return plane // pitch if node.depth > 1 and pitch else node.height


def _memset(node: MemsetNode) -> Any:
    memset = driver.CUDA_MEMSET_NODE_PARAMS()
    memset.dst, memset.pitch, memset.width, memset.height = node.destination, node.pitch, node.width, node.height
    memset.value, memset.elementSize = node.value, node.element
    return memset
