"""Whose agent may attach to a session: the table of :mod:`rgpu.server.node.sessions.agents`."""

from __future__ import annotations

import pytest

from rgpu.link.data.tickets import Ticket
from rgpu.migrate.records.schema import SessionRecord
from rgpu.server.node.sessions.agents import judge
from rgpu.session.errors import AuthenticationFailed, PoolUnavailable


def record(agent: str = "ada", epoch: int = 3, proves: bool = True) -> SessionRecord:
    return SessionRecord(name="s", state="running", owner="a", incarnation=1, epoch=epoch, quota=1, agent=agent,
                         device="cpu:0", proves_key=proves)


@pytest.mark.parametrize(("held", "agent", "proven", "let_in", "expected"), [
    (record(), "ada", True, True, None),
    (record(), "ada", True, False, "key"),  # revoked
    (record(), "bob", True, True, "agent"),
    (record(), "ada", False, True, "not proven"),
    (record(), "bob", False, True, "agent"),
    (record(proves=False), "ada", False, True, None),  # an agent of the previous version
    (record(proves=False), "ada", True, True, None),
    (record(proves=False), "bob", False, True, "agent"),
    (record(proves=False), "ada", False, False, "key"),
    (record(epoch=2), "ada", True, True, "record"),  # an earlier session of that name, perhaps
    (record("bob", epoch=2), "ada", True, True, "record"),
    (None, "ada", True, True, "record"),
])
def test_the_table(held: SessionRecord | None, agent: str, proven: bool, let_in: bool, expected: str | None) -> None:
    found = judge(Ticket("s", agent, "calls", 0.0, "id", proven=proven), 3, held, let_in)
    assert (found.detail["reason"] if found else None) == expected
    if expected:
        assert isinstance(found, PoolUnavailable if expected == "record" else AuthenticationFailed)
