"""The bytes of graph nodes: they come back as they went, and nothing else is read."""

from __future__ import annotations

import dataclasses
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rgpu.session.errors import Corrupt
from rgpu.session.objects.graphs import (
    IF,
    MAX_BODIES,
    MAX_DEPTH,
    SWITCH,
    WHILE,
    ConditionalNode,
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
    every,
)

u32, u64 = st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1)
three = st.tuples(u32, u32, u32)
plain = st.one_of(
    st.builds(KernelNode, u64, u32, three, three, u32, st.booleans(), st.binary(max_size=40),
              st.integers(0, 3).map(lambda n: bytes(72 * n)), disabled=st.booleans()),
    st.builds(CopyNode, *[u64] * 9, disabled=st.booleans()),
    st.builds(MemsetNode, u64, u64, u64, u64, u32, st.sampled_from([1, 2, 4]), disabled=st.booleans()),
    st.builds(EmptyNode),
)


def conditional(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    body = st.lists(inner, max_size=3).map(tuple)
    return st.one_of(*(st.builds(ConditionalNode, u64, u32, st.booleans(), st.just(kind),
                                 st.lists(body, min_size=1, max_size=most).map(tuple))
                       for kind, most in ((IF, 2), (WHILE, 1), (SWITCH, 4))))


bodies = st.recursive(plain, conditional, max_leaves=6)


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


def nested(depth: int) -> ConditionalNode:
    inner: tuple[Node, ...] = (nested(depth - 1),) if depth else (EmptyNode(),)
    return ConditionalNode(9, 1, True, WHILE, (inner,))


def test_conditional_nodes() -> None:
    node = ConditionalNode(1 << 63, 2, True, SWITCH, ((EmptyNode(), EmptyNode((0,))), (), (nested(2),)))
    assert decode(encode([node])) == [node]
    assert [type(found) for found in every([node])].count(EmptyNode) == 3
    assert [node.chosen(value) for value in (0, 2, 3, 1 << 31)] == [0, 2, None, None]
    either, once = dataclasses.replace(node, kind=IF, bodies=((), ())), dataclasses.replace(node, kind=IF, bodies=((),))
    assert [either.chosen(0), either.chosen(7), once.chosen(0), once.chosen(7)] == [1, 0, None, 0]
    assert [nested(0).chosen(0), nested(0).chosen(5)] == [None, 0]


@pytest.mark.parametrize("bad", [
    ConditionalNode(1, 0, False, IF, ((), (), ())), ConditionalNode(1, 0, False, IF, ()),
    ConditionalNode(1, 0, False, WHILE, ((), ())), ConditionalNode(1, 0, False, 3, ((),)),
    ConditionalNode(1, 0, False, SWITCH, ((),) * (MAX_BODIES + 1)), nested(MAX_DEPTH),
    ConditionalNode(1, 0, False, IF, ((EmptyNode((0,)),),)),
], ids=["three bodies of if", "none", "two of while", "kind", "bodies", "depth", "edge in a body"])
def test_conditional_nodes_that_are_refused(bad: ConditionalNode) -> None:
    with pytest.raises(Corrupt):
        decode(encode([bad]))


def test_a_body_that_claims_more_nodes_than_there_are_bytes() -> None:
    whole = bytearray(encode([ConditionalNode(1, 0, False, WHILE, ((),))]))
    struct.pack_into("<I", whole, len(whole) - 4, 1 << 31)
    with pytest.raises(Corrupt, match="nodes of a body"):
        decode(whole)
