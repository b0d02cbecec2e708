"""Kernel nodes of graphs, against what a driver refuses of a captured launch."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest

from rgpu.session.errors import DeviceError
from rgpu.session.objects.graphs import IF, SWITCH, WHILE, ConditionalNode, KernelNode
from tests.support.fake_driver.support import BASE, SIZE, Journal

MODULE, STREAM, GRAPH = 17, 18, 40
WORDS = 4000  #: of 4 bytes, in the parameters of one kernel: four times what fitted before CUDA 12.1


@pytest.fixture
def ready(device: Any) -> Any:
    device.map(BASE, SIZE)
    device.allocate(BASE, SIZE)
    device.load(MODULE, b"sum %d\nadd_one 12\n" % (8 + 4 * WORDS), b"", False)
    device.create_stream(STREAM, 16, 1, 0)
    return device


def total(values: list[int], to: int = BASE, **changes: Any) -> KernelNode:
    parameters = struct.pack(f"<Q{WORDS}I", to, *values, *[0] * (WORDS - len(values)))
    return KernelNode(MODULE, 0, (1, 1, 1), (1, 1, 1), **{
        "shared": 0, "cooperative": False, "parameters": parameters, "attributes": b"", **changes})


def word(device: Any, seq: int, at: int = BASE) -> int:
    device.launch_graph(seq, GRAPH, STREAM)
    assert device.drain(10) and not device.error
    return int(struct.unpack("<I", device.read(at, 4))[0])


def test_more_parameters_than_four_kilobytes(ready: Any) -> None:
    values = list(range(WORDS))
    ready.instantiate_graph(GRAPH, 16, 0, [total(values)])
    assert word(ready, 1) == sum(values)
    ready.update_graph(GRAPH, {0: total([5] * WORDS, BASE + 64)})
    assert word(ready, 2, BASE + 64) == 5 * WORDS


def test_what_the_function_was_allowed_when_it_was_captured(ready: Any) -> None:
    """Since then the program asked for less; both nodes are made, and the function keeps its last attribute."""
    ready.set_function_attribute(MODULE, 0, 8, 1000)
    ready.instantiate_graph(GRAPH, 16, 0, [total([1, 2], shared=100_000), total([3], shared=900)])
    assert word(ready, 1) == 3
    assert ready.function_attributes(MODULE, 0)[8] == 1000
    ready.update_graph(GRAPH, {1: replace(total([4, 4]), shared=120_000)})
    assert word(ready, 2) == 8 and ready.function_attributes(MODULE, 0)[8] == 1000


def test_a_refused_launch_says_what_it_was(ready: Any) -> None:
    odd = struct.pack("<ii", 5, 0) + bytes(64)  # an attribute that this driver does not know
    with pytest.raises(DeviceError) as error:
        ready.instantiate_graph(GRAPH, 16, 0, [total([1], attributes=odd, shared=77)])
    for part in ("cuLaunchKernelEx", "sum", "grid (1, 1, 1)", "77 bytes", "attributes 5=", "1 parameters", "8: 49152"):
        assert part in error.value.message, error.value.message
    with pytest.raises(DeviceError, match="too few"):
        ready.instantiate_graph(GRAPH, 16, 0, [replace(total([1]), parameters=b"1234")])
    ready.instantiate_graph(GRAPH, 16, 0, [total([1])])  # the stream of captures is still good
    assert word(ready, 1) == 1


def test_launches_in_the_record_stream(ready: Any, journal: Journal) -> None:
    """The engine gives them itself; of a graph whose kernels may print they count as printing."""
    ready.load(MODULE + 1, b"vprintf 12\n", b"", False)
    ready.instantiate_graph(GRAPH, 16, 0, [total([3])])
    printing = replace(total([1]), module=MODULE + 1, parameters=struct.pack("<QI", 1, 1))
    ready.instantiate_graph(GRAPH + 1, 16, 0, [printing])
    before = ready.engine.printing_launches()

    def fed(*graphs: int) -> Any:
        return ready.engine.feed(b"".join(journal("graph_launch", exec=graph, stream=STREAM) for graph in graphs))

    found = fed(GRAPH, GRAPH)
    assert found.record is None and found.bugs == 0 and ready.engine.applied == 2 and ready.drain(10)
    assert struct.unpack("<I", ready.read(BASE, 4)) == (3,) and ready.engine.printing_launches() == before
    fed(GRAPH + 1)
    assert ready.engine.printing_launches() == before + 2
    ready.update_graph(GRAPH, {0: total([4], BASE + 64)})
    ready.destroy_graph(GRAPH + 1)
    found = fed(GRAPH, GRAPH + 1)
    assert ready.drain(10) and struct.unpack("<I", ready.read(BASE + 64, 4)) == (4,)
    assert (found.bugs, found.bug[2]) == (1, 400), "what is gone is nobody's"


def test_conditional_nodes_and_the_handles_in_parameters(ready: Any) -> None:
    """Kernels in the graph and in bodies are given the driver's handles, wherever the parameters name the session's."""
    loop, inner = 0x9E37_79B9_0000_0001, 0x9E37_79B9_0000_0002

    def handles(*named: int, to: int = BASE) -> KernelNode:
        return total([word for handle in named for word in (handle & 0xFFFFFFFF, handle >> 32)], to)

    cases = ((handles(7, to=BASE + 128),), (handles(inner, loop, to=BASE + 64),))
    chosen = ConditionalNode(inner, 1, True, SWITCH, cases)
    ready.instantiate_graph(GRAPH, 16, 0, [
        handles(1, loop), ConditionalNode(loop, 3, True, WHILE, ((handles(inner, to=BASE + 32), chosen),), (0,))])
    driver = [word(ready, 1) - 1, word(ready, 2, BASE + 32)]
    assert driver[0] != driver[1] and all(1000 <= handle < 2000 for handle in driver)
    assert word(ready, 3, BASE + 64) == sum(driver) and word(ready, 4, BASE + 128) == 0
    ready.update_graph(GRAPH, {0: handles(5, inner, loop)})
    assert word(ready, 5) == 5 + sum(driver)
    other = ConditionalNode(inner, 0, True, IF, ((handles(9, to=BASE + 64),), (handles(inner, to=BASE + 64),)))
    ready.instantiate_graph(GRAPH + 1, 16, 0, [other])
    ready.launch_graph(6, GRAPH + 1, STREAM)
    assert ready.drain(10) and not ready.error
    (found,) = struct.unpack("<I", ready.read(BASE + 64, 4))
    assert found not in driver and 1000 <= found < 2000  # a handle of the graph's own
