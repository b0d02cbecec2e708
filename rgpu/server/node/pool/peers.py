"""Connections of a daemon to other nodes' control ports."""

from __future__ import annotations

from rgpu.link.control import AsyncControlClient
from rgpu.link.keys import Endpoint, KeyPair


class Peers:
    """Keeps one client for each endpoint."""

    def __init__(self, keys: KeyPair) -> None:
        self._keys = keys
        self._clients: dict[Endpoint, AsyncControlClient] = {}

    def at(self, endpoint: Endpoint) -> AsyncControlClient:
        """A client of the node at this endpoint."""
        found = self._clients.get(endpoint)
        if found is None:
            found = self._clients[endpoint] = AsyncControlClient(self._keys, endpoint)
        return found

    async def close(self) -> None:
        """Close all clients."""
        for client in self._clients.values():
            await client.close()
