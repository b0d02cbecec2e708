"""Opening a registry by its address: ``embedded:PATH`` or ``etcd://HOST:PORT,…/PREFIX?…``."""

from __future__ import annotations

from pathlib import Path

from rgpu.migrate.registry.base import Registry
from rgpu.migrate.registry.embedded import EmbeddedRegistry
from rgpu.session.errors import UsageError


async def open_registry(address: str, seen: Path | None = None, *, doubtful: bool = False) -> Registry:
    """Open a registry. ``seen``: file in which this host records a registry of several hosts (:mod:`.guard`).
    ``doubtful``: one that went back is opened, too; its ``mistrust`` gives the reason, and requests to it fail.

    Raises :class:`UsageError` for an address of no known kind, and what the implementation raises.
    """
    kind, separator, place = address.partition(":")
    if kind == "embedded" and separator and place:
        return await EmbeddedRegistry.open(place)
    if kind == "etcd":
        from rgpu.migrate.registry.etcd.registry import EtcdRegistry  # imported only where used: gRPC is large

        return await EtcdRegistry.open(address, seen, doubtful=doubtful)
    raise UsageError(f"{address!r} is no registry: use embedded:PATH or etcd://HOST:PORT,HOST:PORT/PREFIX",
                     address=address)
