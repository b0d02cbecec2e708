"""A listing is decoded anew only where it changed, and a damaged record stops no other."""

from __future__ import annotations

from dataclasses import replace

from rgpu.migrate.records.decoded import Decoded
from rgpu.migrate.records.schema import SessionRecord, decode, encode
from rgpu.migrate.registry.base import Entry
from tests.support.leader.records import session


def entry(name: str, revision: int, quota: int = 1) -> Entry:
    return Entry(f"sessions/{name}", encode(session(name, "a", quota)), 1, revision)


class Counting:
    """Decodes, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, one: Entry) -> SessionRecord:
        self.asked.append(one.key)
        return decode(one.value, SessionRecord, one.key)


def test_only_what_changed_is_decoded() -> None:
    decoder = Counting()
    decoded = Decoded("a session's", decoder)
    x, y = entry("x", 1), entry("y", 2)
    first = decoded.read([x, y])
    assert [record.name for record in first] == ["x", "y"] and decoded.read([x, y]) is first
    changed = decoded.read([x, entry("y", 3, 7), entry("z", 4)])
    assert changed[0] is first[0] and changed[1].quota == 7 and changed[2].name == "z"
    assert decoder.asked == ["sessions/x", "sessions/y", "sessions/y", "sessions/z"]
    assert decoded.read([entry("z", 4)]) == (changed[2],)
    assert decoded.read([]) == ()


def test_a_revision_that_was_given_out_twice_is_not_believed() -> None:
    decoded = Decoded("a session's", Counting())
    decoded.read([entry("x", 5, 1)])
    assert decoded.read([entry("x", 5, 2)])[0].quota == 2, "a registry restored from a backup"
    assert decoded.read([replace(entry("x", 5, 2), mod_revision=6)])[0].quota == 2


def test_a_damaged_record_is_left_out_until_it_changes() -> None:
    decoder = Counting()
    decoded = Decoded("a session's", decoder)
    broken = Entry("sessions/y", b"\xff", 1, 2)
    for _ in range(3):
        assert [record.name for record in decoded.read([entry("x", 1), broken])] == ["x"]
    assert decoder.asked == ["sessions/x", "sessions/y"], "and it is not tried, and logged, each second"
    assert len(decoded.read([entry("x", 1), entry("y", 3)])) == 2
