"""Executable graphs on the ``cpu`` device: nodes one after the other, in an order that their edges allow.

A launch is one piece of ordered work. It takes the nodes as they are when it
is given to its stream, so that an update meanwhile concerns later launches,
and comes behind the graph's own launch before it, whatever streams they are in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rgpu.checkpoint.device import Launch
from rgpu.server.device.cpu.schedule import INVALID_HANDLE, Op
from rgpu.session.errors import DeviceError
from rgpu.session.objects.graphs import CopyNode, EmptyNode, KernelNode, MemsetNode, Node, apply_changes

INVALID_VALUE = 1
Run = Callable[[], None]


class Work(Protocol):
    """What the device makes of a node: checks it now, returns what executes it."""

    def launch_work(self, launch: Launch) -> Run:
        """Return what runs a kernel launch."""

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


class Graphs:
    """The executable graphs of a device. Used by the applying thread only."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._execs: dict[int, _Exec] = {}

    def instantiate(self, number: int, context: int, nodes: list[Node]) -> None:
        """Raises :class:`DeviceError` (400) for a number in use."""
        if number in self._execs:
            raise DeviceError(f"graph {number} exists", INVALID_HANDLE)
        self._execs[number] = _Exec(context, nodes, [None] * len(nodes))

    def update(self, number: int, changes: dict[int, Node]) -> None:
        """Replace nodes of an executable graph by index. Raises :class:`DeviceError`, :class:`Corrupt`."""
        found = self._find(number)
        found.nodes = apply_changes(found.nodes, changes)
        found.runs = [None if index in changes else run for index, run in enumerate(found.runs)]

    def destroy(self, number: int) -> None:
        """Destroy an executable graph. Raises :class:`DeviceError`."""
        self._find(number)
        del self._execs[number]

    def destroy_context(self, context: int) -> None:
        """Forget the executable graphs of a context."""
        self._execs = {number: found for number, found in self._execs.items() if found.context != context}

    def launch(self, seq: int, number: int) -> tuple[Op, Op | None]:
        """(the work, the launch that it comes behind). Raises :class:`DeviceError` as the node's own call would."""
        found = self._find(number)
        for index, node in enumerate(found.nodes):
            if found.runs[index] is None:
                found.runs[index] = self._prepare(node)
        runs = [run for run in found.runs if run is not None]

        def execute() -> Any:
            for run in runs:
                run()

        before, found.last = found.last, Op(seq, execute, what="a graph")
        return found.last, before if before is not None and not before.complete else None

    def _find(self, number: int) -> _Exec:
        found = self._execs.get(number)
        if found is None:
            raise DeviceError(f"no graph {number}", INVALID_HANDLE)
        return found

    def _prepare(self, node: Node) -> Run:
        if node.disabled or isinstance(node, EmptyNode):
            return _nothing
        if isinstance(node, KernelNode):
            return self._work.launch_work(Launch(node.module, node.function, node.grid, node.block, node.shared, 0,
                                                 node.parameters, node.cooperative, node.attributes))
        if isinstance(node, MemsetNode):
            return self._work.fill_work(node.destination, node.pitch, node.width, node.height, node.element, node.value)
        return self._copy(node)

    def _copy(self, node: CopyNode) -> Run:
        layers = [self._work.copy_work(destination, node.destination_pitch, source, node.source_pitch, node.width,
                                       node.height) for destination, source in node.layers()]

        def execute() -> None:
            for run in layers:
                run()

        return execute


def _nothing() -> None:
    """A disabled or empty node."""
