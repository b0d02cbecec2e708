"""What a node remembers of the registry, for one that went back (`rgpu pool adopt`).

For each session that it holds the record as it read it last, in memory and beside the worker; for each agent the
highest epoch that it named.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from rgpu.migrate.records.keys import session_key
from rgpu.migrate.records.repair import MOST_EPOCH
from rgpu.migrate.records.schema import SessionRecord, decode, encode
from rgpu.server.node.workers.handles import worker_folder
from rgpu.session.errors import RgpuError

log = structlog.get_logger(__name__)

SEEN_LIMIT = 4096  #: agents whose epochs a node remembers


class RecordMemory:
    """``directory``: the node's own. ``here``: whether a worker of a session is here."""

    def __init__(self, host: str, directory: Path, here: Callable[[str], bool]) -> None:
        self._host, self._directory, self._here = host, directory, here
        self._records: dict[str, SessionRecord] = {}
        self._seen: OrderedDict[tuple[str, str], int] = OrderedDict()

    def remember(self, record: SessionRecord) -> None:
        """A record that was read from a registry that is believed; kept while the session is here, over restarts."""
        if not self._here(record.name) and record.owner != self._host:
            self._records.pop(record.name, None)
            return
        known = self._records.get(record.name)
        if known is None or (known.epoch <= record.epoch and known != record):
            self._records[record.name] = record
            path = self._path(record.name)
            if path.parent.is_dir():  # else there is no worker yet; it is looked at again when there is
                try:
                    fresh = path.with_suffix(".new")
                    fresh.write_bytes(encode(record))
                    os.replace(fresh, path)
                except OSError as error:  # a full disk must not stop what runs
                    log.warning("cannot remember a record", session=record.name, reason=str(error))

    def _path(self, session: str) -> Path:
        return worker_folder(self._directory, session) / "record"

    def recall(self, session: str) -> SessionRecord | None:
        """What is remembered of a session, by this daemon or the one before it."""
        if session not in self._records:
            try:
                data = self._path(session).read_bytes()
                self._records[session] = decode(data, SessionRecord, session_key(session))
            except (OSError, RgpuError) as error:
                log.info("nothing is remembered of a session", session=session, reason=str(error))
        return self._records.get(session)

    def clear(self) -> None:
        """Forget the records in memory: the registry's are others from here on."""
        self._records.clear()

    def saw(self, session: str, agent: str, epoch: Any) -> None:
        """An agent named the highest epoch that it has seen; what is none is left out."""
        if isinstance(epoch, int) and 0 < epoch <= MOST_EPOCH:
            key = session, agent
            self._seen[key] = max(epoch, self._seen.pop(key, 0))
            while len(self._seen) > SEEN_LIMIT:
                self._seen.popitem(last=False)

    def seen(self) -> list[tuple[str, str, int]]:
        """(session, agent, epoch) of every agent that named one."""
        return [(session, agent, epoch) for (session, agent), epoch in self._seen.items()]
