"""The checkpoints of a node: its store, access to users' parts of it, and retention.

Only this process holds the store's credentials and the users' keys; a worker is
granted one user's part for one task (:mod:`rgpu.checkpoint.store.grants`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import structlog

from rgpu.checkpoint.blobs.base import Blobs
from rgpu.checkpoint.store import collect, retention
from rgpu.checkpoint.store.checkpoint_store import user_key, user_tag
from rgpu.checkpoint.store.grants import Grant, UserCheckpoints
from rgpu.migrate.records.schema import SessionRecord
from rgpu.session.errors import NotFound, RgpuError

log = structlog.get_logger(__name__)

SHARED_BASES = 2  #: newest checkpoints of a user's other sessions whose chunks a new checkpoint may refer to
COLLECT_SECONDS = 120.0  #: between two collections of one user's garbage by this node
#: s that unneeded packs stay in a full store: the time left to a reader of a removed checkpoint
FULL_GRACE = 60.0


class NodeCheckpoints:
    """``records``: reads all sessions' records. ``named`` checkpoints are those that a record names, or has named."""

    def __init__(self, blobs: Blobs, pool_secret: bytes, record: Callable[[str], Awaitable[SessionRecord]],
                 records: Callable[[], Awaitable[list[SessionRecord]]], keep: retention.Policy, *,
                 direct: bool = True) -> None:
        """``direct``: workers read and write a folder of checkpoints themselves."""
        self.blobs = blobs
        self._secret, self._direct = pool_secret, direct
        self._record, self._records = record, records
        self.keep = keep
        self._collected: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # -- users -------------------------------------------------------------------
    def of_tag(self, tag: str) -> UserCheckpoints:
        """Return the checkpoints of the user with this tag."""
        return UserCheckpoints(self.blobs, tag, user_key(self._secret, tag))

    def tag(self, public: str) -> str:
        """The tag of the user with that key in the store."""
        return user_tag(public)

    async def tag_of(self, session: str) -> str:
        """The tag of the session's user. Raises :class:`RgpuError` where that is not known."""
        return user_tag((await self._record(session)).agent)

    async def tags(self) -> list[str]:
        """Tags of all users that have a part of this store."""
        found = await asyncio.to_thread(self.blobs.ls, "users/")
        return sorted({blob.name.split("/")[1] for blob in found})

    async def find(self, name: str) -> UserCheckpoints:
        """The part of the store that holds the checkpoint, of any user. Raises :class:`NotFound`."""
        for tag in await self.tags() or [user_tag("")]:  # without any: checkpoints of the version before users
            checkpoints = self.of_tag(tag)
            with contextlib.suppress(NotFound):
                await asyncio.to_thread(checkpoints.holding, name)
                return checkpoints
        raise NotFound(f"no checkpoint {name}; `rgpu image ls` lists them", image=name)

    async def grant(self, session: str, most: int | None = None) -> Grant:
        """Access to the store for one task of the session's worker; close it after. ``most``: see :meth:`grant_of`."""
        return self.grant_of((await self._record(session)).agent, most)

    def grant_of(self, public: str, most: int | None = None) -> Grant:
        """Access to the store for one task with the checkpoints of that key; close it after.

        ``most``: bytes that a checkpoint may add to the store; None: no limit.
        """
        tag = user_tag(public)
        return Grant(self.blobs, tag, user_key(self._secret, tag), direct=self._direct, most=most)

    # -- which --------------------------------------------------------------------
    async def candidates(self, session: str, checkpoint: str) -> list[str]:
        """Checkpoints to restore from: ``checkpoint``, then older ones to which the session's journal reaches back."""
        record = await self._record(session)
        usable = [found.name for found in record.usable_checkpoints if found.name != checkpoint]
        if record.checkpoint is None or checkpoint != record.checkpoint.name:
            return [checkpoint]  # it was requested by name
        return [checkpoint, *usable]

    async def bases(self, session: str, known: str | None) -> tuple[str, list[str], dict[str, Any]]:
        """(checkpoint to build on, checkpoints to share chunks with, facts of the session for the manifest)."""
        record = await self._record(session)
        base = known or (record.checkpoint.name if record.checkpoint is not None else "")
        mine = [other for other in await self._records()
                if other.agent == record.agent and other.name != session and other.checkpoint is not None]
        mine.sort(key=lambda other: other.checkpoint.created if other.checkpoint else 0.0, reverse=True)
        others = [other.checkpoint.name for other in mine[:SHARED_BASES] if other.checkpoint is not None]
        facts = {"quota": record.quota, "device": record.device, "host": record.owner,
                 "needs": {"kind": record.needs.kind, "compute_capability": list(record.needs.compute_capability),
                           "driver_version": record.needs.driver_version},
                 "program": {"command": record.program.command, "host": record.program.host}}
        return base, others, facts

    async def named(self) -> set[str]:
        """Checkpoints that a session which has not ended could be recovered from. Raises :class:`RgpuError`."""
        found: set[str] = set()
        for record in await self._records():
            if record.state != "ended":
                found.update(checkpoint.name for checkpoint in [record.checkpoint,
                                                                *record.usable_checkpoints] if checkpoint is not None)
        return found

    async def of_ended(self, tag: str, seconds: float) -> list[str]:
        """A user's checkpoints of sessions that ended at least ``seconds`` ago, or that are not on record."""
        records = {record.name: record for record in await self._records()}
        now, found = time.time(), []
        for info in await asyncio.to_thread(self.of_tag(tag).own.ls):
            record = records.get(info.session)
            if info.error or (record is not None and record.state != "ended"):
                continue
            if now - max(info.created, record.changed if record is not None else 0.0) >= seconds:
                found.append(info.name)
        return found

    # -- retention ---------------------------------------------------------------------
    def written(self, session: str, checkpoint: str) -> None:
        """Note that a checkpoint was written: in the background, older ones are removed by the policy."""
        task = asyncio.ensure_future(self._keep_order(session, checkpoint))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep_order(self, session: str, checkpoint: str) -> None:
        try:
            tag = user_tag((await self._record(session)).agent)
            await self.retain(tag, self.keep, keep=[checkpoint], session=session)
            if time.monotonic() - self._collected.get(tag, -COLLECT_SECONDS) >= COLLECT_SECONDS:
                self._collected[tag] = time.monotonic()
                await asyncio.to_thread(collect.collect, self.of_tag(tag).own)
        except RgpuError as error:  # the next checkpoint tries again
            log.warning("old checkpoints stay", session=session, reason=error.message)
        except Exception:  # noqa: BLE001 - never the checkpoint's failure
            log.exception("old checkpoints stay", session=session)

    async def make_room(self, session: str) -> int:
        """Remove packs that no checkpoint needs from a full store, the session's user's first; return the bytes freed.

        Raises :class:`StoreError`.
        """
        freed = 0
        for tag in dict.fromkeys([user_tag((await self._record(session)).agent), *await self.tags()]):
            freed += (await asyncio.to_thread(collect.collect, self.of_tag(tag).own, grace=FULL_GRACE)).freed
        return freed

    async def retain(self, tag: str, policy: retention.Policy, *, keep: Iterable[str] = (), session: str = "",
                     dry_run: bool = False) -> list[str]:
        """Remove a user's checkpoints that the policy does not keep; return their names. Raises :class:`StoreError`.

        The registry is read first: without it nothing is removed.
        """
        named = await self.named() | set(keep)
        store = self.of_tag(tag).own
        infos = await asyncio.to_thread(store.ls)
        gone = retention.superfluous([info for info in infos if not session or info.session == session], policy,
                                     named, time.time())
        if not dry_run:
            await self.forget(tag, gone)
        return gone

    async def forget(self, tag: str, names: Iterable[str]) -> None:
        """Remove these checkpoints of a user. One that does not exist is no error."""
        store = self.of_tag(tag).own
        for name in names:
            log.info("a checkpoint goes", image=name, user=tag)
            with contextlib.suppress(NotFound):
                await asyncio.to_thread(store.forget, name)
