"""Gathering what the checker looks at: the files that processes wrote, and every change of the sessions' records."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from contextlib import aclosing
from pathlib import Path

from rgpu.migrate.records.keys import SESSIONS
from rgpu.migrate.records.schema import SessionRecord, decode
from rgpu.migrate.registry.base import Entry
from rgpu.migrate.registry.etcd.registry import EtcdRegistry
from rgpu.session.effects import History, unpack
from rgpu.session.errors import AuthenticationFailed, PoolUnavailable, UnknownOutcome
from tests.support.effects.check import Change, Violation, check


def histories(folder: Path) -> dict[str, list[History]]:
    """What every process wrote, by session."""
    found: dict[str, list[History]] = defaultdict(list)
    for path in sorted(folder.glob("*.effects")):
        history = unpack(path.read_bytes())
        if history is not None:
            found[history.header.session].append(history)
    return found


def change(record: SessionRecord, revision: int) -> Change:
    checkpoint = record.checkpoint
    return Change(revision, record.state, record.owner, record.epoch,
                  None if checkpoint is None else (checkpoint.name, checkpoint.position, checkpoint.epoch),
                  record.journal_from)


class RecordFollower:
    """Follows ``sessions/`` in a thread of its own, from before the first session on: no change is missed.

    An etcd that does not answer is asked again from the revision after the last one seen.
    """

    def __init__(self, address: str) -> None:
        self.changes: dict[str, list[Change]] = defaultdict(list)
        self.error: BaseException | None = None
        self._address = address
        self._revision = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="follow-records")
        self._thread.start()
        assert self._ready.wait(30), "the registry does not answer"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(self._follow())
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001 - the test asks for it
            self.error = error

    async def _follow(self) -> None:
        registry = await EtcdRegistry.open(self._address)
        try:
            listing = await registry.list(SESSIONS)
            self._revision = listing.revision
            for entry in listing.entries:
                self._take(entry.key, entry, entry.mod_revision)
            self._ready.set()
            while True:
                try:
                    async with aclosing(registry.watch(SESSIONS,
                                                       self._revision + 1)) as changes:  # type: ignore[type-var]
                        async for found in changes:
                            for event in found.events:
                                self._take(event.key, event.entry, found.revision)
                            self._revision = found.revision
                except (PoolUnavailable, UnknownOutcome, AuthenticationFailed):
                    await asyncio.sleep(0.1)
        finally:
            await registry.close()

    def _take(self, key: str, entry: Entry | None, revision: int) -> None:
        if entry is not None:
            self.changes[key[len(SESSIONS):]].append(change(decode(entry.value, SessionRecord, key), revision))

    def wait_ended(self, sessions: list[str], seconds: float = 60.0) -> None:
        """Until each session's record has ended, as far as this follower has seen."""
        until = time.monotonic() + seconds
        while any(not self.changes[name] or self.changes[name][-1].state != "ended" for name in sessions):
            assert self.error is None, self.error
            assert time.monotonic() < until, {name: self.changes[name][-1:] for name in sessions}
            time.sleep(0.1)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(10)


def judge(folder: Path, follower: RecordFollower, sessions: list[str]) -> list[tuple[str, Violation]]:
    """Every violation, with its session."""
    written = histories(folder)
    return [(name, violation) for name in sessions for violation in check(written[name], follower.changes[name])]
