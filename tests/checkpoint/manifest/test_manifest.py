"""A manifest in pieces: the same bytes as in one go, and large contents of modules are not copied."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from rgpu.checkpoint.device import PAGE
from rgpu.checkpoint.manifest import manifest
from rgpu.checkpoint.manifest.state import RegionState, SessionState
from rgpu.checkpoint.pages import pagehash
from rgpu.checkpoint.store.checkpoint_store import DirectoryStore
from rgpu.session.errors import Corrupt
from tests.support.checkpoint.store_helpers import checkpoint_of, many_pages

KEY = bytes(range(32))


def body_with(live: Any) -> manifest.Body:
    region = RegionState(0x2000_0000_0000, 3 * PAGE, "mapped", hashes=os.urandom(16 * 3))
    state = SessionState(session="s", epoch=1, position=5, hash_key=bytes(pagehash.KEY_BYTES), regions=[region],
                         live=live, events={7: None}, clock=3, answers=[[1, 0, b"", b"x"]])
    column = manifest.ZERO_PAGE.to_bytes(4, "little") * 3
    return manifest.Body(image="i", created=1.0, state=state, pages=[column], packs=[], statistics={"stored_bytes": 0},
                      chunks=manifest.Chunks(names=b"", packs=b"", offsets=b"", lengths=b""), facts={"a": 1})


def live_with(*sizes: int) -> dict[str, Any]:
    return {"version": 1, "position": 5, "payloads": [os.urandom(size) for size in sizes],
            "calls": [[1, 2, 3, 0, b"args", -1]], "answers": []}


@given(some.lists(some.sampled_from([0, 1, 300, manifest.APART - 1, manifest.APART, manifest.APART + 1,
                                     3 * manifest.APART]),
                  max_size=4))
def test_pieces_are_the_encoding(sizes: list[int]) -> None:
    body = body_with(live_with(*sizes))
    pieces = manifest.encode_pieces(body, KEY)
    for content in body.state.live["payloads"]:
        assert len(content) < manifest.APART or any(piece is content for piece in pieces), "copied"
    whole = b"".join(pieces)
    plain = msgspec.msgpack.encode(manifest._Pages(state=body.state, pages=body.pages, chunks=body.chunks,
                                                statistics=body.statistics))
    assert whole.endswith(plain) and whole == manifest.encode(body, KEY)
    assert manifest.decode(whole, KEY, "i").body == body


@pytest.mark.parametrize("live", [None, {}, {"payloads": None}, [1], {"payloads": ["text", 7]}])
def test_live_objects_of_another_form(live: Any) -> None:
    body = body_with(live)
    assert manifest.decode(b"".join(manifest.encode_pieces(body, KEY)), KEY, "i").body == body


def test_the_pages_alone() -> None:
    body = body_with(live_with(manifest.APART))
    data = manifest.encode(body, KEY)
    whole, alone = manifest.decode(data, KEY, "i").body, manifest.decode(data, KEY, "i", pages_alone=True).body
    assert alone.state.live is None and alone.state.answers is None
    assert (alone.state.regions, alone.state.hash_key, alone.state.position) == (
        whole.state.regions, whole.state.hash_key, whole.state.position)
    assert (alone.pages, alone.chunks, alone.packs, alone.image) == (whole.pages, whole.chunks, whole.packs, "i")
    for at in (40, manifest.SUMMARY_AT + 3, len(data) - 1):
        bad = bytearray(data)
        bad[at] ^= 1
        with pytest.raises(Corrupt):
            manifest.decode(bytes(bad), KEY, "i", pages_alone=True)


def test_the_next_checkpoint_does_not_unpack_modules(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store, device = DirectoryStore(tmp_path), many_pages(3)
    checkpoint_of(store, "first", device)
    asked, real = [], manifest.decode

    def decode(*given: Any) -> manifest.Table:
        asked.append(given[3:])
        return real(*given)

    monkeypatch.setattr(manifest, "decode", decode)
    checkpoint_of(store, "second", device, base="first")
    assert asked == [(True,)]
