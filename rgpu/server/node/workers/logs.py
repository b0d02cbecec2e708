"""The logs of a node's workers, which outlive them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rgpu.server.node.workers.handles import worker_folder
from rgpu.session.errors import NotFound

LOG_LIMIT = 4 << 20  #: bytes of a worker's log; beyond that its newest end is moved to the older half
LOOK_SECONDS = 2.0  #: between two looks while a log grows
QUIET_SECONDS = 10.0  #: and while none does


@dataclass(frozen=True)
class WorkerLogs:
    """``directory``: the node's own."""

    host: str
    directory: Path

    async def newest(self, *, session: str, lines: int = 100, **_: Any) -> dict[str, Any]:
        """The newest lines of the log of the session's worker on this host. Raises :class:`NotFound`."""
        path = worker_folder(self.directory, session) / "worker.log"
        wanted = min(1000 * max(1, lines), LOG_LIMIT)
        try:
            text = _tail(path, wanted)
        except OSError as error:
            raise NotFound(f"no log of {session} is on {self.host}", session=session) from error
        if len(text) < wanted:  # the log may just have been rotated
            with contextlib.suppress(OSError):
                text = _tail(path.with_suffix(".log.1"), wanted - len(text)) + text
        return {"host": self.host, "lines": text.splitlines()[-lines:]}

    async def run(self) -> None:
        """Keep every worker's log within its bounds, until cancelled."""
        sizes: dict[Path, int] = {}
        while True:
            before, sizes = sizes, await asyncio.to_thread(self.rotate)
            await asyncio.sleep(QUIET_SECONDS if sizes == before else LOOK_SECONDS)

    def rotate(self) -> dict[Path, int]:
        """Move the newest end of each log above :data:`LOG_LIMIT` to ``worker.log.1``, and empty the log.

        Returns the logs' sizes in bytes. A worker has the file open for appending, so its next line is written at the
        new beginning; a line written in between can be lost.
        """
        sizes = {}
        for path in (self.directory / "workers").glob("*/worker.log"):
            with contextlib.suppress(OSError):
                size = sizes[path] = path.stat().st_size
                if size <= LOG_LIMIT:
                    continue
                older = path.with_suffix(".log.1")
                with open(path, "rb") as source, open(older, "wb") as target:
                    os.chmod(older, 0o600)
                    source.seek(size - LOG_LIMIT)
                    shutil.copyfileobj(source, target, 1 << 20)
                os.truncate(path, 0)
        return sizes


def _tail(path: Path, size: int) -> str:
    """The last ``size`` bytes of a file. Raises OSError."""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read(size).decode(errors="replace")
