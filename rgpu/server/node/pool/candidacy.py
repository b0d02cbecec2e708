"""The node's candidacy for leader; it runs the coordinator while it leads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rgpu.migrate.leader.coordinator import Coordinator
from rgpu.migrate.leader.nodes import NodeCommands
from rgpu.migrate.membership.election import Election
from rgpu.migrate.records.ownership import Leader
from rgpu.migrate.registry.base import Registry
from rgpu.server.node.identity import Identity
from rgpu.server.node.pool.local_leader import LocalLeader
from rgpu.server.node.pool.registration import Registration


class Candidacy:
    """``lease``: s. ``grace``: s that a client's host may be silent. ``observe``: receives the leader's decisions."""

    def __init__(self, local: LocalLeader, commands: NodeCommands, lease: float, grace: float,
                 observe: Callable[[str, dict[str, Any]], None]) -> None:
        self._local, self._commands, self._lease, self._grace, self._observe = local, commands, lease, grace, observe

    async def run(self, registry: Registry, identity: Identity, registration: Registration) -> None:
        """Campaign, lead, campaign again, until cancelled."""
        async def lead(leader: Leader) -> None:
            self._local.coordinator = Coordinator(
                registry, self._commands, leader, node_ttl=self._lease, agent_grace=self._grace,
                registered_for=registration.membership.registered_for, observe=self._observe)
            try:
                await self._local.coordinator.run()
            finally:
                self._local.coordinator = None

        await Election(registry, registration.keeper, identity.host, identity.incarnation, self._lease, lead).run()
