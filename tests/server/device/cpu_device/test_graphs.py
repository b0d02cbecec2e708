"""Executable graphs of the cpu device."""

from __future__ import annotations

import dataclasses
import struct
import threading

import pytest

from rgpu.server.device.cpu import CpuDevice
from rgpu.session.errors import DeviceError
from rgpu.session.objects.graphs import (
    IF,
    SWITCH,
    WHILE,
    ConditionalNode,
    CopyNode,
    EmptyNode,
    KernelNode,
    MemsetNode,
    Node,
)
from tests.server.device.cpu_device.conftest import WAIT, Client
from tests.support.cpu import stub

STREAM, OTHER, GRAPH = 30, 31, 40


def kernel(name: str, first: int, second: int, *before: int) -> KernelNode:
    return KernelNode(17, stub.INDEX[name], (1, 1, 1), (1, 1, 1), 0, False, struct.pack("<QQ", first, second), b"",
                      dependencies=before)


def copy(to: int, source: int, *before: int) -> CopyNode:
    """Two layers of two rows of 4 bytes, out of rows of 8, into packed ones."""
    return CopyNode(to, 4, 8, source, 8, 16, 4, 2, 2, dependencies=before)


def launch(client: Client, stream: int = 0, graph: int = GRAPH) -> None:
    client.device.launch_graph(next(client.seqs), graph, stream)


def test_nodes_run_in_the_order_of_their_edges(client: Client) -> None:
    base = client.base
    nodes: list[Node] = [MemsetNode(base, 0, 8, 1, 0x01020304, 4), EmptyNode((0,)), copy(base + 64, base, 1),
                         MemsetNode(base + 128, 8, 2, 2, 0xAB, 1, (2,))]
    client.device.instantiate_graph(GRAPH, 16, 0, nodes)
    launch(client)
    assert client.read(base + 64, 16) == struct.pack("<I", 0x01020304) * 4
    assert client.read(base + 128, 16) == b"\xab\xab" + bytes(6) + b"\xab\xab" + bytes(6)


def test_kernels(client: Client) -> None:
    """Digits show the order; a disabled node is left out."""
    base = client.base
    nodes: list[Node] = [kernel("append", base, 1), kernel("append", base, 2, 0), kernel("append", base, 3, 1)]
    client.device.instantiate_graph(GRAPH, 16, 0, nodes)
    launch(client)
    assert client.word(base) == 123
    client.device.update_graph(GRAPH, {1: dataclasses.replace(nodes[1], dependencies=(), disabled=True)})
    launch(client)
    assert client.word(base) == 12313
    client.device.update_graph(GRAPH, {0: kernel("fault", base, 719)})
    launch(client)
    assert client.synchronize() == 719


def test_updates_concern_later_launches(client: Client, device: CpuDevice) -> None:
    base = client.base
    device.create_stream(STREAM, 16, 1, 0)
    device.instantiate_graph(GRAPH, 16, 0, [MemsetNode(base, 0, 1, 1, 1, 4), MemsetNode(base + 4, 0, 1, 1, 1, 4)])
    reached, go_on = threading.Event(), next(client.seqs)
    device.host_function(go_on, STREAM, lambda result, data: reached.set())
    launch(client, STREAM)  # waits behind the host function
    device.update_graph(GRAPH, {0: MemsetNode(base, 0, 1, 1, 2, 4),
                                1: MemsetNode(base + 4, 0, 1, 1, 2, 4, disabled=True)})
    assert reached.wait(WAIT)
    device.host_function_done(go_on)
    assert struct.unpack("<II", client.read(base, 8, STREAM)) == (1, 1)
    launch(client, STREAM)
    assert struct.unpack("<II", client.read(base, 8, STREAM)) == (2, 1)


def test_launches_of_one_graph_follow_each_other(client: Client, device: CpuDevice) -> None:
    """The second one, in another stream, waits for the first, which waits for a host function."""
    base = client.base
    for stream in (STREAM, OTHER):
        device.create_stream(stream, 16, 1, 0)
    device.instantiate_graph(GRAPH, 16, 0, [MemsetNode(base, 0, 1, 1, 9, 4)])
    hold = next(client.seqs)
    device.host_function(hold, STREAM, lambda result, data: None)
    launch(client, STREAM)
    second = next(client.seqs)
    device.launch_graph(second, GRAPH, OTHER)
    assert not device.wait_complete(second, 0.05)
    device.host_function_done(hold)
    assert device.wait_complete(second, WAIT)


def test_a_graph_goes_on_after_its_end(client: Client, device: CpuDevice) -> None:
    base = client.base
    device.create_stream(STREAM, 16, 1, 0)
    device.instantiate_graph(GRAPH, 16, 0, [MemsetNode(base, 0, 1, 1, 5, 4)])
    hold = next(client.seqs)
    device.host_function(hold, STREAM, lambda result, data: None)
    launch(client, STREAM)
    device.destroy_graph(GRAPH)
    device.host_function_done(hold)
    assert client.word(base, STREAM) == 5


def test_wrong_calls(client: Client, device: CpuDevice) -> None:
    device.instantiate_graph(GRAPH, 16, 0, [MemsetNode(client.base - 4096, 0, 1, 1, 0, 4)])
    for result, give in ((400, lambda: device.instantiate_graph(GRAPH, 16, 0, [])),
                         (400, lambda: launch(client, 0, 99)),
                         (400, lambda: device.destroy_graph(99)), (1, lambda: launch(client))):
        with pytest.raises(DeviceError) as caught:
            give()
        assert caught.value.result == result
    device.destroy_context(16)
    with pytest.raises(DeviceError):
        device.destroy_graph(GRAPH)


def test_conditional_nodes(client: Client) -> None:
    """A loop counts down from what is in memory; what comes behind it waits for it."""
    base = client.base
    nodes: list[Node] = [
        MemsetNode(base, 0, 1, 1, 3, 4),
        ConditionalNode(900, 1, True, WHILE, ((kernel("count", base, 900), kernel("append", base + 8, 7, 0)),), (0,)),
        kernel("append", base + 8, 1, 1)]
    client.device.instantiate_graph(GRAPH, 16, 0, nodes)
    for expected in (7771, 77717771):
        launch(client)
        assert client.word(base + 8) == expected


@pytest.mark.parametrize(("kind", "bodies", "value", "assigned", "expected"), [
    (IF, 1, 5, True, 1), (IF, 1, 0, True, 0), (IF, 2, 0, True, 2), (IF, 2, 9, False, 2), (SWITCH, 3, 2, True, 3),
    (SWITCH, 3, 3, True, 0), (WHILE, 1, 0, True, 0)])
def test_which_body_runs(client: Client, kind: int, bodies: int, value: int, assigned: bool, expected: int) -> None:
    chosen = ConditionalNode(900, value, assigned, kind, tuple((kernel("append", client.base, body + 1),)
                                                               for body in range(bodies)))
    client.device.instantiate_graph(GRAPH, 16, 0, [MemsetNode(client.base, 0, 1, 1, 0, 4),
                                                   dataclasses.replace(chosen, dependencies=(0,))])
    launch(client)
    assert client.word(client.base) == expected


def test_nested_conditions_and_one_of_no_graph(client: Client) -> None:
    base = client.base
    inner = ConditionalNode(901, 0, False, IF, ((kernel("append", base + 8, 5),),), (1,))
    loop = ConditionalNode(900, 1, True, WHILE, ((kernel("count", base, 900), kernel("count", base + 4, 901, 0),
                                                  inner),), (0,))
    client.device.instantiate_graph(GRAPH, 16, 0, [MemsetNode(base, 0, 2, 1, 2, 4), loop])
    launch(client)
    assert client.word(base + 8) == 5  # the second time the inner counter is at 0
    client.device.instantiate_graph(GRAPH + 1, 16, 0, [kernel("count", base, 900)])
    launch(client, 0, GRAPH + 1)
    assert client.synchronize() == 700


def test_a_loop_without_end_is_cancelled(client: Client, device: CpuDevice) -> None:
    endless = ConditionalNode(900, 1, True, WHILE, ((MemsetNode(client.base, 0, 1, 1, 1, 4),),))
    device.instantiate_graph(GRAPH, 16, 0, [endless])
    launch(client)
    device.create_stream(STREAM, 16, 1, 0)
    device.instantiate_graph(GRAPH + 1, 16, 0, [kernel("fault", client.base, 719)])
    launch(client, STREAM, GRAPH + 1)
    assert client.synchronize() == 719
