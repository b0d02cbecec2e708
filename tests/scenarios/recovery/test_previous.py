"""A session that an earlier version of the package left behind is recovered, served and moved by this one's daemons."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from rgpu.link.control.control_client import ControlClient
from rgpu.link.keys import KeyPair, PoolFiles
from rgpu.migrate.records.keys import session_key
from rgpu.migrate.registry.base import absent
from rgpu.migrate.registry.embedded import EmbeddedRegistry
from tests.support.pools.pool import LocalPool
from tests.support.previous import SESSION, VERSIONS, Previous, Replayer


class LegacyPool(LocalPool):
    """Its registry, its checkpoints, its secret and its user are of the earlier version; the old owner is gone."""

    def __init__(self, folder: Path, previous: Previous) -> None:
        super().__init__(folder, nodes=2, registry="embedded")
        self.previous = previous
        self.files = PoolFiles(folder / "pool")

    def start_daemon(self, host: str) -> None:
        if not self.servers:
            self._inherit()
        super().start_daemon(host)

    def _inherit(self) -> None:
        """Between `rgpu keys init` and the first daemon."""
        (self.files.root / "secret").write_bytes(self.previous.secret)
        self.files.authorized.remove("user")
        self.files.authorized.add(self.previous.key(self.files.key_path("user")).public_key())
        shutil.copytree(self.previous.folder / "images", self.files.root / "images", dirs_exist_ok=True)

        async def put() -> None:
            registry = await EmbeddedRegistry.open(self.files.root / "registry.db")
            try:
                await registry.put_if(absent(session_key(SESSION)), (self.previous.folder / "record").read_bytes())
            finally:
                await registry.close()

        asyncio.run(put())

    def owner(self) -> dict[str, Any]:
        """What an agent asks for, with a ticket."""
        key, known = KeyPair.load(self.files.key_path("user")), self.files.read_description().endpoints
        with ControlClient(key, known) as client:
            found = dict(client.call("session.renew_ticket", {"session": SESSION}))
        assert "address" in found, found
        return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", VERSIONS)
def test_an_old_session_lives_on(version: str, tmp_path: Path) -> None:
    previous = Previous.load(version)
    last = len(previous.calls)
    with LegacyPool(tmp_path, previous) as pool:
        row = pool.wait_state(SESSION, "running", seconds=60)  # with a worker: it was recovered from the checkpoint
        assert row["epoch"] > previous.record.epoch
        agent = Replayer(previous)
        assert agent.attach(pool.owner()) == previous.position + 1
        middle = (previous.position + last) // 2
        agent.ship(middle)
        other = "node-b" if row["host"] == "node-a" else "node-a"
        result = pool.rgpu("migrate", SESSION, other)
        assert result["outcome"] == "committed" and result["verified"] is True
        assert agent.attach(pool.owner()) == middle + 1
        agent.ship(last)
        agent.close()
        served = {seq: digest for seq, digest in previous.answers.items() if seq > previous.position}
        assert {seq: agent.given[seq] for seq in served} == served and len(served) > 5
        pool.rgpu("kill", SESSION)
