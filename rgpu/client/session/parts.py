"""Interface of the session's loop to its parts :class:`Incoming` and :class:`Upkeep`."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rgpu.client.data_link.bulk import SameHost
    from rgpu.client.data_link.connection import DataLink
    from rgpu.client.data_link.module_ship import ModuleShip
    from rgpu.client.journal.cursor import Cursor
    from rgpu.client.journal.kept import Journal
    from rgpu.client.run.pool_requests import PoolRequests
    from rgpu.client.session.delivery import Deliveries
    from rgpu.client.session.identity import Identity
    from rgpu.client.session.shipping import Shipping
    from rgpu.client.shim_link.returns import Returns
    from rgpu.session.errors import RgpuError


class Parts(Protocol):
    """Attributes of :class:`rgpu.client.session.shipper.Shipper`. ``link``, ``cursor``: None while there is no link."""

    identity: Identity
    link: DataLink | None
    cursor: Cursor | None
    journal: Journal
    deliveries: Deliveries
    returns: Returns
    bulk: SameHost
    modules: ModuleShip
    shipping: Shipping
    requests: PoolRequests

    def down(self, link: DataLink, error: RgpuError | struct.error) -> None:
        """Note that a link broke with ``error``."""

    def release(self) -> None:
        """Give the shim back the segments that no part needs any more."""
