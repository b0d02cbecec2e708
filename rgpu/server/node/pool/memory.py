"""A node's copy of registry records, for the repair of a registry restored to an older state (`rgpu pool adopt`).

For each session held here the record as last read, in memory and in a file beside the worker; for each agent the
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

SEEN_LIMIT = 4096  #: agents whose epochs are kept


class RecordMemory:
    """Keeps the copies. ``directory``: the node's own. ``here``: whether a worker of a session is here."""

    def __init__(self, host: str, directory: Path, here: Callable[[str], bool]) -> None:
        self._host, self._directory, self._here = host, directory, here
        self._records: dict[str, SessionRecord] = {}
        self._seen: OrderedDict[tuple[str, str], int] = OrderedDict()

    def remember(self, record: SessionRecord) -> None:
        """Keep a record that was read from a trusted registry, while the session is here, over restarts."""
        if not self._here(record.name) and record.owner != self._host:
            self._records.pop(record.name, None)
            return
        known = self._records.get(record.name)
        if known is None or (known.epoch <= record.epoch and known != record):
            self._records[record.name] = record
            path = self._path(record.name)
            if path.parent.is_dir():  # else there is no worker yet; the record is read again when there is one
                try:
                    fresh = path.with_suffix(".new")
                    fresh.write_bytes(encode(record))
                    os.replace(fresh, path)
                except OSError as error:  # a full disk must not stop the session
                    log.warning("cannot remember a record", session=record.name, reason=str(error))

    def _path(self, session: str) -> Path:
        return worker_folder(self._directory, session) / "record"

    def recall(self, session: str) -> SessionRecord | None:
        """The copy of a session's record, by this daemon or an earlier one; None where there is none."""
        if session not in self._records:
            try:
                data = self._path(session).read_bytes()
                self._records[session] = decode(data, SessionRecord, session_key(session))
            except (OSError, RgpuError) as error:
                log.info("nothing is remembered of a session", session=session, reason=str(error))
        return self._records.get(session)

    def clear(self) -> None:
        """Forget the records in memory, because the registry's were replaced."""
        self._records.clear()

    def saw(self, session: str, agent: str, epoch: Any) -> None:
        """Keep the highest epoch that an agent has named; a value that is no epoch is ignored."""
        if isinstance(epoch, int) and 0 < epoch <= MOST_EPOCH:
            key = session, agent
            self._seen[key] = max(epoch, self._seen.pop(key, 0))
            while len(self._seen) > SEEN_LIMIT:
                self._seen.popitem(last=False)

    def seen(self) -> list[tuple[str, str, int]]:
        """(session, agent, epoch) of every agent that named one."""
        return [(session, agent, epoch) for (session, agent), epoch in self._seen.items()]
