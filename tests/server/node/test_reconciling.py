"""What a node does when it is asked to look at the record of a session that it holds nothing of."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from rgpu.migrate.records.schema import SessionRecord, encode
from rgpu.server.node.pool.reconciler import Reconciler
from rgpu.server.node.pool.records import PoolRecords
from rgpu.server.node.pool.trust import RegistryTrust

OWNED = SessionRecord(name="s", state="running", owner="node-a", incarnation=5, epoch=3, quota=1, agent="",
                      device="cpu:0")


class Registry:
    """Holds one record; ``meanwhile`` is called while it is read."""

    def __init__(self, record: SessionRecord, meanwhile: Any) -> None:
        self.record, self.meanwhile = record, meanwhile

    async def get(self, key: str) -> Any:
        self.meanwhile()
        return SimpleNamespace(key=key, value=encode(self.record), mod_revision=1)


def reconciled(record: SessionRecord, running: dict[str, Any], meanwhile: Any = lambda: None) -> tuple[str, list[Any]]:
    """(what was done, deaths that were reported) at a node whose workers are ``running``, none of them holding it."""
    deaths: list[Any] = []
    records = PoolRecords(lambda record: None)
    records.registry = Registry(record, meanwhile)  # type: ignore[assignment]
    identity: Any = SimpleNamespace(host="node-a", incarnation=5)
    held: Any = SimpleNamespace(running=running, holds=lambda session, move: None)
    reports: Any = SimpleNamespace(worker_died=lambda *death: death)
    node = Reconciler(identity, records, held, RegistryTrust(records), reports, deaths.append)
    return asyncio.run(node.reconcile(session="s", move=""))["done"], deaths


def test_a_session_of_ours_without_a_worker_is_lost() -> None:
    """Its worker died after it was verified, before it was activated: nobody else knows."""
    done, deaths = reconciled(OWNED, {})
    assert done == "nothing is held here"
    assert deaths == [("s", 3, "its worker on node-a died in a move")]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_worker_that_has_just_ended_is_told_of_by_its_own_end(when: str) -> None:
    """With its reason and position, and after its device was examined; one that has just started has not ended."""
    running: dict[str, Any] = {"s": object()} if when == "before" else {}
    done, deaths = reconciled(OWNED, running, lambda: running.update(s=object()))
    assert (done, deaths) == ("its worker is here, or has just ended", [])


@pytest.mark.parametrize("other", [{"owner": "node-b"}, {"incarnation": 4}, {"state": "recovering"}])
def test_what_is_not_ours_is_not_told_of(other: dict[str, Any]) -> None:
    assert reconciled(msgspec.structs.replace(OWNED, **other), {}) == ("nothing is held here", [])
