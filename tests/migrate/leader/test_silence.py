"""What follows a client host's silence (rgpu/migrate/leader/silence.py)."""

from __future__ import annotations

import pytest

from rgpu.migrate.leader.silence import FIRST_AGENT_SECONDS, Quiet, Verdict, decide
from rgpu.migrate.records.schema import SessionRecord, Wants

NOW = 10_000.0


def record(since: float = 0.0, grace: float = 0.0) -> SessionRecord:
    return SessionRecord(name="s", state="running", owner="a", incarnation=1, epoch=1, quota=1, agent="k",
                         device="cpu:0", silent_since=since, wants=Wants(client_grace=grace))


@pytest.mark.parametrize(("found", "quiet", "expected"), [
    (record(), Quiet(0, True), Verdict("none")),
    (record(), Quiet(4, True), Verdict("none")),  # it attaches anew
    (record(NOW - 50), Quiet(0, True), Verdict("note")),  # heard again
    (record(NOW - 50), Quiet(0, False), Verdict("none")),  # a new worker: that nobody came yet says nothing
    (record(), Quiet(30, True), Verdict("note", NOW - 30, 60.0)),
    (record(NOW - 31), Quiet(30, True), Verdict("none", NOW - 30, 60.0)),
    (record(), Quiet(598, True), Verdict("note", NOW - 598, 2.0)),
    (record(), Quiet(600, True), Verdict("end", NOW - 600)),
    (record(grace=3600), Quiet(600, True), Verdict("note", NOW - 600, 60.0)),
    (record(grace=20), Quiet(20, True), Verdict("end", NOW - 20)),
    # The record's word counts where the worker never had an agent, and only there.
    (record(NOW - 700), Quiet(100, True), Verdict("note", NOW - 100, 60.0)),
    (record(NOW - 700), Quiet(100, False), Verdict("end", NOW - 700)),
    (record(NOW - 700), Quiet(FIRST_AGENT_SECONDS - 6, False), Verdict("none", NOW - 700, 6.0)),
    (record(NOW - 590), Quiet(100, False), Verdict("none", NOW - 590, 10.0)),
    (record(), Quiet(600, False), Verdict("end", NOW - 600)),
])
def test_the_table(found: SessionRecord, quiet: Quiet, expected: Verdict) -> None:
    assert decide(found, quiet, NOW, 600.0) == expected


