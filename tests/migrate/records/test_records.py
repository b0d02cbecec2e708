"""Records read from the registry are hostile until they are checked."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from rgpu.migrate.leader.cuts.writing import checkpoint_name
from rgpu.migrate.records import schema as records
from rgpu.migrate.records.keys import history_key
from rgpu.migrate.records.schema import (
    CheckpointName,
    DeviceRecord,
    MoveRecord,
    NodeRecord,
    PoolRecord,
    QueueRecord,
    SessionRecord,
    check_host_name,
    check_session_name,
    decode,
    encode,
)
from rgpu.session.errors import Corrupt, RgpuError, UsageError, VersionMismatch

MOVE = MoveRecord(id="m", source="a", destination="b", destination_incarnation=2**64 - 1, device="cpu:0")
SESSION = SessionRecord(name="s/1", state="running", owner="a", incarnation=2**64 - 1, epoch=1, quota=1 << 40,
                        agent="key", device="cpu:0", checkpoint=CheckpointName(name="i", position=5, epoch=1))
NODE = NodeRecord(host="a", incarnation=1, control="tcp://a:1", data="a:2",
                  devices=[DeviceRecord(device="cpu:0", memory=1, uuid=bytes(16), facts={"name": "x"})])


def test_round_trip() -> None:
    assert decode(encode(SESSION), SessionRecord, "k") == SESSION
    assert decode(encode(NODE), NodeRecord, "k") == NODE
    moving = SESSION.replace(state="moving", move=MOVE)
    assert decode(encode(moving), SessionRecord, "k").open_move == MOVE


@pytest.mark.parametrize("changes", [
    {"name": "../x"}, {"name": "a b"}, {"state": "asleep"}, {"epoch": 0}, {"epoch": -1}, {"epoch": 2**63},
    {"incarnation": 2**64 + 0.5}, {"owner": None}, {"state": "moving"}, {"quota": -1}, {"reason": "x" * 5000},
    {"image": {"name": "i", "position": 1, "epoch": 2}}, {"epoch": "1"}, {"move": {"id": "m"}}, {"v": "1"},
])
def test_what_a_session_s_record_must_not_say(changes: dict[str, Any]) -> None:
    value = {**msgspec.to_builtins(SESSION), **changes}
    with pytest.raises(Corrupt):
        decode(msgspec.msgpack.encode(value), SessionRecord, "sessions/s")


def test_other_schemas_and_newer_fields() -> None:
    value = msgspec.to_builtins(SESSION)
    with pytest.raises(VersionMismatch, match="schema 2"):
        decode(msgspec.msgpack.encode({**value, "v": 2}), SessionRecord, "k")
    assert decode(msgspec.msgpack.encode({**value, "later": 1}), SessionRecord, "k") == SESSION


def test_a_device_stands_once() -> None:
    with pytest.raises(Corrupt, match="twice"):
        decode(msgspec.msgpack.encode(NODE.replace(devices=NODE.devices * 2)), NodeRecord, "k")
    with pytest.raises(Corrupt, match="size|bytes"):
        decode(bytes(records.MAX_RECORD + 1), NodeRecord, "k")
    with pytest.raises(ValueError):
        encode(NODE.replace(devices=[NODE.devices[0].replace(facts={"x": "y" * records.MAX_RECORD})]))


@given(st.binary(max_size=300))
def test_any_bytes_give_a_record_or_an_error_of_ours(data: bytes) -> None:
    for kind in (SessionRecord, NodeRecord, QueueRecord, PoolRecord):
        try:
            decode(data, kind, "k")
        except RgpuError:
            pass


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_record_is_refused_or_well_formed(at: int, value: int) -> None:
    data = bytearray(encode(SESSION))
    data[at % len(data)] = value
    try:
        decode(encode(decode(bytes(data), SessionRecord, "k")), SessionRecord, "k")
    except RgpuError:
        pass


def test_names() -> None:
    assert check_session_name("heat.1-a_B/12") and check_host_name("gpu-1.example.com")
    for name in ("", ".hidden", "a/b", "a/", "x" * 65, "a\n"):
        with pytest.raises(UsageError):
            check_session_name(name)
    with pytest.raises(UsageError):
        check_host_name("a/b")
    assert history_key("s", 9) < history_key("s", 10)
    assert checkpoint_name("s/1", 2, 30, 1.5) == "s@1-e2-p30-5dc"
