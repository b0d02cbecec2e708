"""A kernel that allocated from the driver's heap, which nobody can read, pins its session; a loaded one does not."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from rgpu.session.objects.graphs import KernelNode
from tests.support.fake_driver.support import BASE, SIZE, device

__all__ = ["device"]

MODULE, OTHER, STREAM, GRAPH = 17, 18, 19, 40
ALLOCATES = b".version 8.0\nadd_one 12\n.extern .func (.param .b64 r) malloc\n"
PARAMETERS = struct.pack("<QI", BASE, 4)


@pytest.fixture
def ready(device: Any) -> Any:
    device.map(BASE, SIZE)
    device.allocate(BASE, SIZE)
    device.load(MODULE, ALLOCATES, b"", False)
    device.load(OTHER, b"add_one 12\n", b"", False)
    device.create_stream(STREAM, 16, 1, 0)
    return device


def node(module: int) -> KernelNode:
    return KernelNode(module, 0, (1, 1, 1), (1, 1, 1), 0, False, PARAMETERS, b"")


def test_a_graphs_launch_pins_and_stays(ready: Any) -> None:
    ready.instantiate_graph(GRAPH, 16, 0, [node(OTHER)])
    ready.launch_graph(1, GRAPH, STREAM)
    assert ready.drain(10) and ready.pins() == [], "it is loaded, and nothing was allocated"
    ready.update_graph(GRAPH, {0: node(MODULE)})
    assert ready.pins() == []
    ready.launch_graph(2, GRAPH, STREAM)
    assert ready.drain(10) and any("malloc" in pin for pin in ready.pins())
    ready.destroy_graph(GRAPH)
    ready.unload(MODULE)
    assert any("malloc" in pin for pin in ready.pins()), "the heap outlives its modules"


def test_a_launch_pins(ready: Any) -> None:
    call = {"function": 0, "grid_x": 1, "grid_y": 1, "grid_z": 1, "block_x": 1, "block_y": 1, "block_z": 1,
            "shared": 0, "flags": 0, "stream": STREAM, "parameters": PARAMETERS, "attributes": b""}
    ready._work.call("launch", 1, module=OTHER, **call)
    assert ready.pins() == []
    ready._work.call("launch", 2, module=MODULE, **call)
    assert any("malloc" in pin for pin in ready.pins())
