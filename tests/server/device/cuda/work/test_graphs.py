"""Executable graphs on a real GPU. Run: pytest -m gpu tests/server/device/cuda/work/test_graphs.py"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rgpu.checkpoint.device import GRANULE
from rgpu.session.addresses import DEVICE_BASE
from rgpu.session.errors import DeviceError
from rgpu.session.objects.graphs import (
    IF,
    WHILE,
    ConditionalNode,
    CopyNode,
    EmptyNode,
    KernelNode,
    MemsetNode,
    Node,
)

pytestmark = pytest.mark.gpu

SOURCE = b"""
extern "C" __global__ void digit(unsigned* p, unsigned d) { *p = *p * 10u + d; }
extern "C" __global__ void ranks(unsigned* p, unsigned d) {
    unsigned size; asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
    p[blockIdx.x] = size + d;
}
struct Many { unsigned values[3000]; };
extern "C" __global__ void total(unsigned* p, const __grid_constant__ Many many) {
    unsigned sum = 0;
    for (unsigned value : many.values) sum += value;
    *p = sum;
}
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned value);
extern "C" __global__ void again(unsigned* left, unsigned long long loop) { cudaGraphSetConditional(loop, *left != 0); }
extern "C" __global__ void parity(unsigned* left, unsigned long long odd) { cudaGraphSetConditional(odd, *left & 1); }
extern "C" __global__ void less(unsigned* left, unsigned long long loop) {
    *left -= 1;
    cudaGraphSetConditional(loop, *left != 0);
}
extern "C" __global__ void wide(unsigned* p, unsigned d) {
    extern __shared__ unsigned words[];
    words[25000] = d;
    *p = words[25000];
}
"""
GRAPH, STREAM, OTHER, MODULE = 40, 30, 31, 17


class Session:
    def __init__(self, device: Any) -> None:
        from cuda.bindings import nvrtc

        _, program = nvrtc.nvrtcCreateProgram(SOURCE, b"t.cu", 0, [], [])
        (error,) = nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=compute_90"])
        assert int(error) == 0
        _, size = nvrtc.nvrtcGetPTXSize(program)
        text = b" " * size
        nvrtc.nvrtcGetPTX(program, text)
        self.device, self.base, self.seqs = device, DEVICE_BASE, itertools.count(1)
        device.map(self.base, GRANULE)
        device.allocate(self.base, 1 << 20)
        table, _ = device.load(MODULE, text, b"", False)
        self.index = {function.name: number for number, function in enumerate(table.functions)}
        for stream in (STREAM, OTHER):
            device.create_stream(stream, 16, 1, 0)

    def kernel(self, name: str, address: int, value: int, *before: int, grid: int = 1,
               attributes: bytes = b"") -> KernelNode:
        return KernelNode(MODULE, self.index[name], (grid, 1, 1), (1, 1, 1), 0, False,
                          struct.pack("<QI", address, value), attributes, dependencies=before)

    def launch(self, stream: int = STREAM) -> int:
        seq = next(self.seqs)
        self.device.launch_graph(seq, GRAPH, stream)
        return seq

    def words(self, address: int, number: int) -> tuple[int, ...]:
        assert self.device.drain(10), "work does not end"
        assert not self.device.error, self.device.error_detail()
        return struct.unpack(f"<{number}I", self.device.read(address, 4 * number))


@pytest.fixture
def session() -> Iterator[Session]:
    from rgpu.server.device.cuda.device import CudaDevice

    device = CudaDevice(0)
    yield Session(device)
    device.close()


def test_every_type_of_node(session: Session) -> None:
    base = session.base
    nodes: list[Node] = [
        MemsetNode(base, 0, 8, 1, 0x01020304, 4), EmptyNode((0,)),
        CopyNode(base + 64, 4, 8, base, 8, 16, 4, 2, 2, (1,)),  # two layers of two rows
        MemsetNode(base + 128, 8, 4, 2, 0xABAB, 2, (2,)), session.kernel("digit", base + 256, 7, 3)]
    session.device.instantiate_graph(GRAPH, 16, 0, nodes)
    for count in range(1, 4):
        seq = session.launch()
        assert session.device.wait_complete(seq, 10)
        assert session.words(base + 256, 1) == (int("7" * count),)
    assert session.words(base + 64, 4) == (0x01020304,) * 4
    assert session.words(base + 128, 4) == (0xABABABAB,) * 4


def test_edges_order(session: Session) -> None:
    at = session.base
    session.device.instantiate_graph(GRAPH, 16, 0, [session.kernel("digit", at, d, *([d - 1] if d else []))
                                                    for d in range(0, 8)])
    session.launch()
    session.launch(OTHER)  # behind the first: it is the same graph
    assert session.words(at, 1) == ((1234567 * 10**8 + 1234567) % (1 << 32),)


def test_updates(session: Session) -> None:
    """Parameters, a disabled node, and another function: that one needs a new graph."""
    at, device = session.base, session.device
    first, second = session.kernel("digit", at, 1), session.kernel("digit", at, 2, 0)
    device.instantiate_graph(GRAPH, 16, 0, [first, second])
    session.launch()
    device.update_graph(GRAPH, {1: replace(session.kernel("digit", at, 3))})
    session.launch()
    device.update_graph(GRAPH, {0: replace(first, disabled=True)})
    session.launch()
    assert session.words(at, 1) == (12133,)
    device.update_graph(GRAPH, {0: session.kernel("ranks", at + 4, 5)})
    session.launch()
    assert session.words(at, 2) == (121333, 6)
    device.destroy_graph(GRAPH)
    with pytest.raises(DeviceError):
        session.launch()


def test_cluster_dimensions_are_kept(session: Session) -> None:
    if session.device.facts.compute_capability < (9, 0):
        pytest.skip("clusters need compute capability 9")
    cluster = struct.pack("<i4xIII52x", 4, 2, 1, 1)
    serialization = struct.pack("<i4xi60x", 6, 1)  # no attribute of nodes: left out
    session.device.instantiate_graph(GRAPH, 16, 0, [session.kernel("ranks", session.base, 0, grid=4,
                                                                   attributes=cluster + serialization)])
    session.launch()
    assert session.words(session.base, 4) == (2, 2, 2, 2)


def test_a_graph_in_flight_outlives_its_end(session: Session) -> None:
    at = session.base
    session.device.instantiate_graph(GRAPH, 16, 0, [session.kernel("digit", at, 9)])
    session.launch()
    session.device.destroy_graph(GRAPH)
    assert session.words(at, 1) == (9,)


def test_a_graph_that_the_driver_refuses(session: Session) -> None:
    with pytest.raises(DeviceError) as caught:
        session.device.instantiate_graph(GRAPH, 16, 0, [KernelNode(99, 0, (1, 1, 1), (1, 1, 1), 0, False, b"", b"")])
    assert caught.value.result == 400
    session.device.instantiate_graph(GRAPH, 16, 0, [EmptyNode()])
    session.launch()
    assert session.device.drain(10)


def test_parameters_beyond_four_kilobytes(session: Session) -> None:
    """As PyTorch's optimizers have them: the node is made, launched, and changed in place."""
    for first in (1, 7):
        node = replace(session.kernel("total", 0, 0), parameters=struct.pack("<Q3000I", session.base, first,
                                                                             *range(2999)))
        if first == 1:
            session.device.instantiate_graph(GRAPH, 16, 0, [node])
        else:
            session.device.update_graph(GRAPH, {0: node})
        session.launch()
        assert session.words(session.base, 1) == (first + sum(range(2999)),)


def test_shared_memory_that_was_allowed_when_it_was_captured(session: Session) -> None:
    """The attribute is lower by now, and stays so."""
    function = session.index["wide"]
    session.device.set_function_attribute(MODULE, function, 8, 1024)
    node = replace(session.kernel("wide", session.base, 99), shared=110_000)
    session.device.instantiate_graph(GRAPH, 16, 0, [node])
    session.launch()
    assert session.words(session.base, 1) == (99,)
    assert session.device.function_attributes(MODULE, function)[8] == 1024


def test_conditional_nodes_whatever_the_drivers_handles(session: Session) -> None:
    """A loop with an if/else in its body, built three times, so with three handles of the driver for each."""
    loop, odd = 0x9E37_79B9_0000_0001, 0x9E37_79B9_0000_0002
    left, out = session.base, session.base + 256

    def sets(name: str, handle: int, *before: int) -> KernelNode:
        return replace(session.kernel(name, 0, 0, *before), parameters=struct.pack("<QQ", left, handle))

    cases = ((session.kernel("digit", out, 1),), (session.kernel("digit", out, 2),))
    chosen = ConditionalNode(odd, 0, False, IF, cases, (0,))
    nodes: list[Node] = [
        MemsetNode(left, 0, 1, 1, 4, 4), MemsetNode(out, 0, 1, 1, 0, 4), sets("again", loop, 0, 1),
        ConditionalNode(loop, 0, False, WHILE, ((sets("parity", odd), chosen, sets("less", loop, 1)),), (2,)),
        session.kernel("digit", out, 9, 3)]
    for number in range(3):
        session.device.instantiate_graph(GRAPH + number, 16, 0, nodes)
        for _ in range(2):
            session.device.launch_graph(next(session.seqs), GRAPH + number, STREAM)
            assert session.words(out, 1) == (21219,)
        if number == 1:
            session.device.destroy_graph(GRAPH)
    session.device.update_graph(GRAPH + 1, {0: MemsetNode(left, 0, 1, 1, 1, 4), 2: sets("again", loop)})
    session.device.launch_graph(next(session.seqs), GRAPH + 1, STREAM)
    assert session.words(out, 1) == (19,)
