"""Users' quotas of checkpoints, checked where checkpoints are written: before one begins, while it is written, and
before it counts.

The size of a checkpoint is known only when it is written: pages are compressed, and pages of older ones are not stored
again. So a checkpoint may begin where any bytes are left, its writer gives it up when it needs more than that, and it
is removed where others of the user used them up meanwhile. :mod:`rgpu.migrate.records.quota_decision` decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import structlog

from rgpu.checkpoint.store.store_use import StoreUse
from rgpu.link.keys import AuthorizedKeys
from rgpu.migrate.leader.quotas import QuotaReader
from rgpu.migrate.records.ownership import Held
from rgpu.migrate.records.quota_decision import decide_checkpoint
from rgpu.migrate.records.schema import SessionRecord
from rgpu.migrate.registry.base import Registry
from rgpu.server.node.store.node_checkpoints import NodeCheckpoints
from rgpu.session.errors import LimitReached

log = structlog.get_logger(__name__)

LIMIT = "checkpoints"


@dataclass(frozen=True, slots=True)
class Left:
    """The bytes that ``user`` may add to the ``used`` of at most ``most``."""

    user: str
    most: int
    used: int

    @property
    def bytes(self) -> int:
        return max(0, self.most - self.used)

    def instead_of(self, error: LimitReached) -> LimitReached:
        """Return the error for the user where a checkpoint's writer reached the limit; any other error unchanged."""
        if error.detail.get("limit") != LIMIT:
            return error
        return decide_checkpoint(self.user, self.most, self.used, self.bytes + 1).error(self.user)


class Records(Protocol):
    """The used part of the registry's records."""

    registry: Registry

    async def sessions(self) -> list[SessionRecord]:
        """Every session's record. Raises :class:`PoolUnavailable`."""

    async def session(self, name: str) -> Held:
        """One session's record. Raises :class:`NotFound`, :class:`PoolUnavailable`."""


class CheckpointQuota:
    """``authorized``: the keys of each user; ``user_of``: the user of a session, empty where unknown."""

    def __init__(self, checkpoints: NodeCheckpoints, records: Records, authorized: AuthorizedKeys,
                 user_of: Callable[[SessionRecord], str]) -> None:
        self._checkpoints, self._records, self._authorized, self._user_of = checkpoints, records, authorized, user_of
        self._use = StoreUse()

    async def used(self, users: Collection[str]) -> dict[str, int]:
        """Bytes of checkpoints of each of these users, by all their keys. Raises what registry and store raise.
        """
        keys: dict[str, set[str]] = {user: set() for user in users}
        for key in self._authorized.everybody():
            if key.holder in keys:
                keys[key.holder].add(key.public)
        for record in await self._records.sessions():  # also of sessions of revoked keys
            user = self._user_of(record)
            if user in keys:
                keys[user].add(record.agent)
        return {user: await asyncio.to_thread(self._count, publics) for user, publics in keys.items()}

    def _count(self, publics: set[str]) -> int:
        return self._use.count(self._checkpoints.of_tag(tag).own for tag in
                               {self._checkpoints.tag(public) for public in publics})

    async def left_to(self, session: str) -> Left | None:
        """:meth:`left` of the session's user."""
        return await self.left(self._user_of((await self._records.session(session)).record))

    async def left(self, user: str) -> Left | None:
        """The bytes that the user may add; None: no limit, or no user. Raises :class:`LimitReached`."""
        quotas = await QuotaReader(self._records.registry).now(())
        most = quotas.limits(user).get(LIMIT) if user else None
        if most is None:
            return None
        used = (await self.used([user]))[user]
        verdict = decide_checkpoint(user, most, used)
        if not verdict.allowed:
            raise verdict.error(user)
        return Left(user, most, used)

    async def confirm_of(self, left: Left, session: str, checkpoint: str) -> None:
        """:meth:`confirm` of a checkpoint that a session's worker wrote."""
        await self.confirm(left, (await self._records.session(session)).record.agent, checkpoint)

    async def confirm(self, left: Left, public: str, checkpoint: str) -> None:
        """Remove a written checkpoint if it exceeds the user's limit. Raises :class:`LimitReached` then."""
        used = (await self.used([left.user]))[left.user]
        if used <= left.most:
            return
        log.warning("a checkpoint goes again: its user has too much with it", image=checkpoint, user=left.user,
                    used=used, most=left.most)
        await self._checkpoints.forget(self._checkpoints.tag(public), [checkpoint])
        raise decide_checkpoint(left.user, left.most, left.used, max(used - left.used, left.bytes + 1)).error(left.user)
