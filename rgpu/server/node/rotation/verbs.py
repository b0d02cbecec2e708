"""Verbs about the pool's secret that any node answers: the state of its rotation, and, to nodes, the secret."""

from __future__ import annotations

from typing import Any

from rgpu.link.control import ControlServer, Request
from rgpu.link.secrets import PoolSecrets
from rgpu.migrate.membership import rotation
from rgpu.server.node.pool.records import PoolRecords
from rgpu.server.node.rotation.following import rotation_record


class SecretVerbs:
    """Answers the verbs. ``secrets``: those of this node."""

    def __init__(self, secrets: PoolSecrets, records: PoolRecords) -> None:
        self._secrets, self._records = secrets, records

    def register(self, control: ControlServer) -> None:
        """Enter the verbs at the control server."""
        control.register("pool.secret", self._give)
        control.register("keys.rotation", self._status)

    async def _give(self, request: Request) -> Any:
        """Return a secret. The table of verbs admits only nodes; a revoked key is not admitted at all."""
        return {"secret": self._secrets.secret(int(request.args["number"]), str(request.args["mark"]))}

    async def _status(self, request: Request) -> Any:
        nodes = await self._records.nodes()
        return rotation.status(await rotation_record(self._records), {n.host: n.secret for n in nodes.values()})
