"""Rows of `rgpu ps`: what an agent says is not believed."""

from __future__ import annotations

from typing import Any

import pytest

from rgpu.migrate.records.schema import SessionRecord
from rgpu.server.node.verbs.rows import row


def test_a_replay_shows_how_far_it_is() -> None:
    """By what its worker has applied: the program's own count stands still meanwhile."""
    record = SessionRecord(name="s", state="running", owner="node-a", incarnation=5, epoch=3, quota=1, agent="",
                           device="cpu:0")
    shown = row(record, {"stats": {"calls": 43407}, "position": 12345,
                         "catch_up": {"state": "ordered", "reason": "calls 1 to 43407 were issued before"}})
    assert (shown["calls"], shown["applied"]) == (43407, 12345)
    assert shown["note"] == "catching up (ordered, 12,345 of 43,407 calls): calls 1 to 43407 were issued before"


@pytest.mark.parametrize(("said", "shown"), [
    ({"memcpy_d2h": [3, 0.5], "launch": [1, 2]},
     {"memcpy_d2h": {"count": 3, "seconds": 0.5}, "launch": {"count": 1, "seconds": 2.0}}),
    ({"rm -rf": [3, 0.5], "launch": [1], "memcpy_d2h": ["3", 0.5], "memset": {"count": 1}}, {}),
    (None, {}), ("text", {}), ([1, 2], {}),
])
def test_waits(said: Any, shown: dict[str, Any]) -> None:
    record = SessionRecord(name="s", state="running", owner="node-a", incarnation=5, epoch=3, quota=1, agent="",
                           device="cpu:0")
    assert row(record, {"stats": {"waits": said}})["waits"] == shown
