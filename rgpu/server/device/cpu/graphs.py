"""Executable graphs on the ``cpu`` device: nodes one after the other, in an order that their edges allow.

A launch is one op. It takes the nodes as they are when it is submitted to its stream, so that a later update affects
later launches only, and follows the graph's previous launch, whatever streams they are in.

A conditional node reads its condition when it is reached; kernels of the launch set conditions by their handles. A
condition without a value at the beginning of a launch is 0 until a kernel sets it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from rgpu.checkpoint.device import Launch
from rgpu.server.device.cpu.schedule import INVALID_HANDLE, Op
from rgpu.server.device.cpu.streams import Fault
from rgpu.session.errors import DeviceError
from rgpu.session.objects.graphs import (
    WHILE,
    ConditionalNode,
    CopyNode,
    EmptyNode,
    KernelNode,
    MemsetNode,
    Node,
    apply_changes,
    every,
)
from rgpu.session.objects.spans import COPY, KERNEL, MEMSET, Span

INVALID_VALUE, LAUNCH_FAILED = 1, 719
Run = Callable[[], None]


class LaunchWork(Protocol):
    """The device's part for kernel nodes: checks a node now and returns what executes it."""

    def launch_work(self, launch: Launch, conditions: dict[int, int]) -> Run:
        """Return what runs a kernel launch; it may set ``conditions``, by handle."""


class CopyWork(Protocol):
    """The device's part for copies and memsets."""

    def copy_work(self, destination: int, destination_pitch: int, source: int, source_pitch: int, width: int,
                  height: int) -> Run:
        """Return what copies ``height`` rows of ``width`` bytes."""

    def fill_work(self, destination: int, pitch: int, width: int, height: int, element: int, value: int) -> Run:
        """Return what sets ``height`` rows of ``width`` elements to ``value``."""


@dataclass(slots=True)
class _Exec:
    context: int
    nodes: list[Node]
    runs: list[Run | None]  #: None: checked again at the next launch
    last: Op | None = None
    first: dict[int, int] = field(default_factory=dict)  #: conditions at the beginning of a launch, by handle
    conditions: dict[int, int] = field(default_factory=dict)  #: of the launch that runs
    spans: list[Span] | None = None  #: where that launch notes its nodes' times; None: times are not noted


class Graphs:
    """The executable graphs of a device. Used by the applying thread only."""

    def __init__(self, launches: LaunchWork, copies: CopyWork, cancelled: Callable[[], bool]) -> None:
        self._launches, self._copies = launches, copies
        self._cancelled = cancelled
        self._execs: dict[int, _Exec] = {}

    def instantiate(self, number: int, context: int, nodes: list[Node]) -> None:
        """Make an executable graph. Raises :class:`DeviceError` (400) for a number in use."""
        if number in self._execs:
            raise DeviceError(f"graph {number} exists", INVALID_HANDLE)
        self._execs[number] = _Exec(context, nodes, [None] * len(nodes), first=_first(nodes))

    def update(self, number: int, changes: dict[int, Node]) -> None:
        """Replace nodes of an executable graph by index. Raises :class:`DeviceError`, :class:`Corrupt`."""
        found = self._find(number)
        found.nodes = apply_changes(found.nodes, changes)
        found.first = _first(found.nodes)
        found.runs = [None if index in changes else run for index, run in enumerate(found.runs)]

    def destroy(self, number: int) -> None:
        """Destroy an executable graph. Raises :class:`DeviceError`."""
        self._find(number)
        del self._execs[number]

    def destroy_context(self, context: int) -> None:
        """Forget the executable graphs of a context."""
        self._execs = {number: found for number, found in self._execs.items() if found.context != context}

    def launch(self, seq: int, number: int, timed: bool = False) -> tuple[Op, Op | None]:
        """Return (the op, the earlier launch that it must follow); ``timed``: the op notes its nodes' times.

        Raises :class:`DeviceError` as the node's own call would.
        """
        found = self._find(number)
        for index, node in enumerate(found.nodes):
            if found.runs[index] is None:
                found.runs[index] = self._prepare(node, found)
        spans: list[Span] | None = [] if timed else None
        runs = [run for run in found.runs if run is not None]
        first = found.first

        def execute() -> Any:
            found.conditions.clear()
            found.conditions.update(first)
            found.spans = spans
            for run in runs:
                run()

        before, found.last = found.last, Op(seq, execute, what="a graph")
        found.last.spans = spans
        return found.last, before if before is not None and not before.complete else None

    def _find(self, number: int) -> _Exec:
        found = self._execs.get(number)
        if found is None:
            raise DeviceError(f"no graph {number}", INVALID_HANDLE)
        return found

    def _prepare(self, node: Node, graph: _Exec) -> Run:
        if node.disabled or isinstance(node, EmptyNode):
            return _nothing
        if isinstance(node, ConditionalNode):
            return self._conditional(node, graph)
        if isinstance(node, KernelNode):
            run = self._launches.launch_work(
                Launch(node.module, node.function, node.grid, node.block, node.shared, 0, node.parameters,
                       node.cooperative, node.attributes), graph.conditions)
        elif isinstance(node, MemsetNode):
            run = self._copies.fill_work(node.destination, node.pitch, node.width, node.height, node.element,
                                         node.value)
        else:
            run = self._copy(node)
        return _noting(node, run, graph)

    def _conditional(self, node: ConditionalNode, graph: _Exec) -> Run:
        bodies = [[self._prepare(inner, graph) for inner in body] for body in node.bodies]

        def execute() -> None:
            while (chosen := node.chosen(graph.conditions[node.handle])) is not None:
                if self._cancelled():
                    raise Fault(LAUNCH_FAILED, "a conditional node of a graph: cancelled")
                for run in bodies[chosen]:
                    run()
                if node.kind != WHILE:
                    break

        return execute

    def _copy(self, node: CopyNode) -> Run:
        layers = [self._copies.copy_work(destination, node.destination_pitch, source, node.source_pitch, node.width,
                                         node.height) for destination, source in node.layers()]

        def execute() -> None:
            for run in layers:
                run()

        return execute


def _first(nodes: list[Node]) -> dict[int, int]:
    return {node.handle: node.value if node.assigned else 0 for node in every(nodes)
            if isinstance(node, ConditionalNode)}


def _noting(node: KernelNode | MemsetNode | CopyNode, run: Run, graph: _Exec) -> Run:
    """Wrap ``run`` so that it also notes when it ran, in launches that a profiler observes."""
    def execute() -> None:
        if graph.spans is None:
            run()
            return
        start = time.monotonic_ns()
        run()
        graph.spans.append(_span(node, start, time.monotonic_ns()))

    return execute


def _span(node: KernelNode | MemsetNode | CopyNode, start: int, end: int) -> Span:
    if isinstance(node, KernelNode):
        return Span(KERNEL, start, end, node.module, node.function, node.grid, node.block, node.shared)
    if isinstance(node, MemsetNode):
        return Span(MEMSET, start, end, bytes=node.width * node.height * node.element, value=node.value)
    return Span(COPY, start, end, bytes=node.width * node.height * len(node.layers()))


def _nothing() -> None:
    """Execute a disabled or empty node."""
