"""The coordinator, while this node leads."""

from __future__ import annotations

from rgpu.migrate.leader.coordinator import Coordinator
from rgpu.session.errors import Fenced


class LocalLeader:
    """``coordinator`` is set while this node leads, and None otherwise."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.coordinator: Coordinator | None = None

    def leading(self) -> Coordinator:
        """The coordinator. Raises :class:`Fenced` while another node leads."""
        if self.coordinator is None:
            raise Fenced(f"{self.host} does not lead", reason="not leading")
        return self.coordinator
