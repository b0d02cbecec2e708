"""The bytes of graph nodes: they come back as they went, and nothing else is read."""

from __future__ import annotations

import dataclasses
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rgpu.session.errors import Corrupt
from rgpu.session.objects.graphs import (
    CopyNode,
    EmptyNode,
    KernelNode,
    MemsetNode,
    Node,
    apply_changes,
    decode,
    decode_changes,
    encode,
    encode_changes,
)

u32, u64 = st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1)
three = st.tuples(u32, u32, u32)
bodies = st.one_of(
    st.builds(KernelNode, u64, u32, three, three, u32, st.booleans(), st.binary(max_size=40),
              st.integers(0, 3).map(lambda n: bytes(72 * n)), disabled=st.booleans()),
    st.builds(CopyNode, *[u64] * 9, disabled=st.booleans()),
    st.builds(MemsetNode, u64, u64, u64, u64, u32, st.sampled_from([1, 2, 4]), disabled=st.booleans()),
    st.builds(EmptyNode),
)


@st.composite
def graphs(draw: st.DrawFn) -> list[Node]:
    nodes: list[Node] = []
    for index in range(draw(st.integers(0, 6))):
        before = draw(st.lists(st.integers(0, index - 1), unique=True)) if index else []
        nodes.append(dataclasses.replace(draw(bodies), dependencies=tuple(before)))
    return nodes


@settings(max_examples=60)
@given(nodes=graphs())
def test_nodes_come_back(nodes: list[Node]) -> None:
    assert decode(encode(nodes)) == nodes
    changes = dict(enumerate(nodes))
    assert apply_changes(nodes, decode_changes(encode_changes(changes))) == nodes


@settings(max_examples=60)
@given(nodes=graphs(), data=st.data())
def test_what_is_cut_or_longer_is_refused(nodes: list[Node], data: st.DataObject) -> None:
    whole = encode(nodes)
    with pytest.raises(Corrupt):
        decode(whole[:data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(Corrupt):
        decode(whole + b"\0")


@settings(max_examples=200)
@given(data=st.binary(max_size=120))
def test_noise_never_breaks_the_readers(data: bytes) -> None:
    for read in (decode, decode_changes):
        for payload in (data, struct.pack("<I", 1) + data):
            try:
                read(payload)
            except Corrupt as error:
                assert error.detail["reason"]


def test_what_is_refused() -> None:
    head = struct.pack("<II", 1, 1)
    for name, payload in {
        "version": struct.pack("<II", 2, 0),
        "a billion nodes": struct.pack("<II", 1, 1 << 30),
        "a type": head + struct.pack("<III", 4, 0, 0),
        "a flag": head + struct.pack("<III", 5, 2, 0),
        "itself": head + struct.pack("<IIII", 5, 0, 1, 0),
        "twice": struct.pack("<II", 1, 3) + struct.pack("<III", 5, 0, 0) * 2 + struct.pack("<IIIII", 5, 0, 2, 0, 0),
        "an element": encode([MemsetNode(1, 1, 1, 1, 0, 3)]),
        "parameters": encode([KernelNode(1, 0, (1, 1, 1), (1, 1, 1), 0, False, bytes(1 << 17), b"")]),
        "attributes": encode([KernelNode(1, 0, (1, 1, 1), (1, 1, 1), 0, False, b"", bytes(71))]),
    }.items():
        with pytest.raises(Corrupt):
            decode(payload)
            pytest.fail(name)
    with pytest.raises(Corrupt):
        decode_changes(struct.pack("<II", 1, 2) + struct.pack("<IIII", 0, 5, 0, 0) * 2)


def test_changes_keep_place_type_and_edges() -> None:
    nodes: list[Node] = [EmptyNode(), MemsetNode(1, 1, 1, 1, 7, 1, dependencies=(0,))]
    (_, changed) = apply_changes(nodes, {1: MemsetNode(2, 1, 1, 1, 8, 1)})
    assert changed == MemsetNode(2, 1, 1, 1, 8, 1, dependencies=(0,))
    for changes in ({2: EmptyNode()}, {1: EmptyNode()}):
        with pytest.raises(Corrupt):
            apply_changes(nodes, changes)
