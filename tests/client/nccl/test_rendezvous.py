"""Ranks of a communicator find each other: the library asks the agent, and the leader writes down who came."""

from __future__ import annotations

import socket
import struct

import pytest

from rgpu.client.shim_link.local import Gather, LocalPeer
from rgpu.migrate.records.rendezvous import RendezvousRecord, come, communicator_key, read_rendezvous
from rgpu.migrate.records.schema import encode
from rgpu.session.errors import Corrupt, NotPermitted, Refused

NAME = "0f" * 16


def arrive(record: RendezvousRecord | None, rank: int, session: str = "", **other: object) -> RendezvousRecord:
    values = {"name": NAME, "user": "ann", "ranks": 3, "payload": 7, "now": 1.0, **other}
    return come(record, rank=rank, session=session or f"train/{rank}", **values)  # type: ignore[arg-type]


def test_ranks_come_in_any_order_and_again() -> None:
    record = arrive(arrive(None, 2), 0)
    assert [(rank, session) for rank, session, _ in record.came] == [(0, "train/0"), (2, "train/2")]
    assert arrive(record, 2) is record, "who asks again changes nothing"
    assert read_rendezvous(encode(record), communicator_key(NAME)) == record
    with pytest.raises(Corrupt):
        read_rendezvous(encode(record), communicator_key("00" * 16))


def test_what_contradicts_the_others_is_refused_by_name() -> None:
    record = arrive(None, 0)
    with pytest.raises(Refused, match="rank 0 has come already, from session train/0"):
        arrive(record, 0, "other")
    with pytest.raises(Refused, match="asks for a communicator of 4 ranks, others gave 3"):
        arrive(record, 1, ranks=4)
    with pytest.raises(NotPermitted, match="another user's"):
        arrive(record, 1, user="bob")
    for rank, ranks in ((3, 3), (-1, 3), (0, 0), (0, 4096)):
        with pytest.raises(Refused):
            arrive(None, rank, ranks=ranks)


def test_the_agents_side_of_the_question() -> None:
    near, far = socket.socketpair()
    with near:
        near.sendall(struct.pack("<IIIIIQ", 20 + 4, 8, 1, 4, 3, 1 << 40) + b"name")
        peer = LocalPeer(far)
        assert peer.receive() == [Gather(4, 3, 1 << 40, b"name")]
        peer.gathered([(5, "train"), (0, "")])
        assert near.recv(100) == struct.pack("<IIQH", 25, 42, 5, 5) + b"train" + struct.pack("<QH", 0, 0)
        near.sendall(struct.pack("<IIIII", 12, 8, 1, 4, 3))
        with pytest.raises(Corrupt):
            peer.receive()
        peer.close()
