"""A registry by its address: ``embedded:PATH`` (others join here)."""

from __future__ import annotations

from rgpu.migrate.registry.base import Registry
from rgpu.migrate.registry.embedded import EmbeddedRegistry
from rgpu.session.errors import UsageError


async def open_registry(address: str) -> Registry:
    """Raises :class:`UsageError` for an address of no known kind, and what the implementation raises."""
    kind, separator, place = address.partition(":")
    if kind == "embedded" and separator and place:
        return await EmbeddedRegistry.open(place)
    raise UsageError(f"{address!r} is no registry: use embedded:PATH", address=address)
