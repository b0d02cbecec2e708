"""Messages are judged before they are built, and requests before they are begun: as tables."""

from __future__ import annotations

import msgspec
import pytest

from rgpu.link.control import intake, limits
from rgpu.session.errors import Corrupt, LimitReached
from tests.support.attacks.flooding import lists, request

NOW = 1000.0


def test_what_clients_write_is_read() -> None:
    found = intake.read(request(7, "pool.ping", {"a": [1, {"b": b"c"}]}), "user")
    assert (found.id, found.verb, found.args, found.command) == ("7", "pool.ping", {"a": [1, {"b": b"c"}]}, "7")
    piece = intake.read(request(8, "image.import", {"id": "x", "offset": 5, "data": bytes(4 << 20)}), "user")
    assert piece.args["offset"] == 5 and len(piece.args["data"]) == 4 << 20 and piece.args["end"] is False
    long = {"own": {f"s{n}": n for n in range(20000)}}
    assert intake.read(request(9, "node.command", long), "node").args == long


@pytest.mark.parametrize(("body", "role", "error", "number"), [
    (request(1, "session.list", {"x": "y" * 70000}), "user", LimitReached, "1"),
    (request(1, "session.list", {"x": "y" * 70000}), "operator", LimitReached, "1"),
    (lists(2, 100000), "user", LimitReached, "2"),
    (lists(3, 4 << 20, "image.import"), "user", Corrupt, "3"),
    (request(4, "image.import", {"data": bytes(5 << 20)}), "user", LimitReached, "4"),
    (request(5, "node.command", {"data": bytes(5 << 20)}), "node", LimitReached, "5"),
    (b"\x81\xa2id", "user", Corrupt, ""), (b"", "user", Corrupt, ""), (b"\xc1" * 100, "node", Corrupt, ""),
    (b"\x91" * 5000, "user", Corrupt, ""),
    (msgspec.msgpack.encode({"id": 5, "verb": "pool.ping"}), "user", Corrupt, "")])
def test_what_is_not_taken_is_refused_with_its_number(body: bytes, role: str, error: type, number: str) -> None:
    with pytest.raises(intake.Unreadable) as caught:
        intake.read(body, role)
    assert isinstance(caught.value.error, error) and caught.value.id == number


def test_a_long_message_cannot_call_itself_an_import_and_be_another() -> None:
    args = msgspec.msgpack.encode({"data": bytes(70000)})
    body = b"\x84\xa4verb\xacimage.import\xa2id\xa11\xa4args" + args + b"\xa4verb\xa9pool.ping"
    with pytest.raises(intake.Unreadable, match="names its verb at its beginning"):
        intake.read(body, "user")


def test_a_key_waits_a_little_and_is_refused_then() -> None:
    ledger, allowed = limits.Ledger(), limits.ROLES["user"]
    verdicts = []
    for _ in range(1000):
        usage, verdict = ledger.begin("A", "user", limits.Asked(), NOW)
        verdicts.append(verdict)
        if usage is not None:
            ledger.end(usage, limits.Asked(), False)
    taken = [verdict for verdict in verdicts if verdict.allowed]
    assert len(taken) == allowed.burst + allowed.rate * allowed.patience
    assert [verdict.wait for verdict in taken] == sorted(verdict.wait for verdict in taken)
    assert "100 requests a second" in verdicts[-1].reason
    assert ledger.begin("B", "user", limits.Asked(), NOW)[1].wait == 0  # another key is not touched
    assert ledger.begin("A", "user", limits.Asked(), NOW + 10)[1].wait == 0  # and this one again later


def test_what_is_under_way_is_bounded_and_comes_back() -> None:
    ledger, allowed = limits.Ledger(), limits.ROLES["user"]
    begun = [ledger.begin("A", "user", limits.Asked(polls=True), NOW) for _ in range(allowed.running + 5)]
    assert [verdict.poll for _, verdict in begun[:allowed.polls + 1]] == [True] * allowed.polls + [False]
    assert [verdict.allowed for _, verdict in begun].count(True) == allowed.running
    for usage, verdict in begun:
        if usage is not None:
            ledger.end(usage, limits.Asked(polls=True), verdict.poll)
    assert ledger.people == 0 and ledger.known["A"].polls == 0 and ledger.known["A"].running == 0


def test_long_messages_in_hand_are_bounded() -> None:
    ledger, asked = limits.Ledger(), limits.Asked(long=4 << 20)
    allowed = [ledger.begin("A", "user", asked, NOW)[1].allowed for _ in range(6)]
    assert allowed == [True] * 4 + [False] * 2


def test_many_keys_share_what_is_for_people_and_nodes_are_not_counted() -> None:
    ledger = limits.Ledger()
    for key in range(20):
        for _ in range(128):
            ledger.begin(f"K{key}", "user", limits.Asked(), NOW)
    assert limits.OF_PEOPLE <= ledger.people < limits.ALL
    assert ledger.begin("fresh", "user", limits.Asked(), NOW)[1].allowed
    assert ledger.begin("N", "node", limits.Asked(), NOW) == (None, limits.Verdict(True, "nodes are not counted"))
