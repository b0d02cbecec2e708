"""What a node does when it is asked to look at the record of a session that it holds nothing of."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from rgpu.migrate.records.schema import SessionRecord, encode
from rgpu.server.node.leadership import Leadership

OWNED = SessionRecord(name="s", state="running", owner="node-a", incarnation=5, epoch=3, quota=1, agent="",
                      device="cpu:0")


class Registry:
    """Holds one record; ``meanwhile`` is called while it is read."""

    def __init__(self, record: SessionRecord, meanwhile: Any) -> None:
        self.record, self.meanwhile = record, meanwhile

    async def get(self, key: str) -> Any:
        self.meanwhile()
        return SimpleNamespace(key=key, value=encode(self.record))


def settle(record: SessionRecord, running: dict[str, Any], meanwhile: Any = lambda: None) -> tuple[str, list[Any]]:
    """(what was done, deaths that were reported) at a node whose workers are ``running``, none of them holding it."""
    deaths: list[Any] = []
    node = Leadership.__new__(Leadership)
    node.incarnation, node.registry = 5, Registry(record, meanwhile)  # type: ignore[assignment]
    node._settle_locks = defaultdict(asyncio.Lock)
    node.daemon = SimpleNamespace(  # type: ignore[assignment]
        host="node-a", adopting=SimpleNamespace(remember=lambda record: None),
        node=SimpleNamespace(running=running, holds=lambda session, move: None),
        report_death=lambda *death: deaths.append(death))
    return asyncio.run(node.settle("s", ""))["done"], deaths


def test_a_session_of_ours_without_a_worker_is_lost() -> None:
    """Its worker died after it was verified, before it was activated: nobody else knows."""
    done, deaths = settle(OWNED, {})
    assert done == "nothing is held here"
    assert deaths == [("s", 3, "its worker on node-a died in a move")]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_worker_that_has_just_ended_is_told_of_by_its_own_end(when: str) -> None:
    """With its reason and position, and after its device was examined; one that has just started has not ended."""
    running: dict[str, Any] = {"s": object()} if when == "before" else {}
    done, deaths = settle(OWNED, running, lambda: running.update(s=object()))
    assert (done, deaths) == ("its worker is here, or has just ended", [])


@pytest.mark.parametrize("other", [{"owner": "node-b"}, {"incarnation": 4}, {"state": "recovering"}])
def test_what_is_not_ours_is_not_told_of(other: dict[str, Any]) -> None:
    assert settle(msgspec.structs.replace(OWNED, **other), {}) == ("nothing is held here", [])
