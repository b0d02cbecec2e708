"""The logs of a node's workers, which outlive them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rgpu.server.node.workers.handles import worker_folder
from rgpu.session.errors import NotFound


@dataclass(frozen=True)
class WorkerLogs:
    """``directory``: the node's own."""

    host: str
    directory: Path

    async def newest(self, *, session: str, lines: int = 100, **_: Any) -> dict[str, Any]:
        """The newest lines of the log of the session's worker on this host. Raises :class:`NotFound`."""
        path = worker_folder(self.directory, session) / "worker.log"
        try:
            with open(path, "rb") as file:
                file.seek(max(0, path.stat().st_size - 1000 * lines))
                text = file.read().decode(errors="replace")
        except OSError as error:
            raise NotFound(f"no log of {session} is on {self.host}", session=session) from error
        return {"host": self.host, "lines": text.splitlines()[-lines:]}
