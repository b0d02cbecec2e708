"""Users' quotas at the leader: set by operators, and checked before a session is made or a request waits.

The limits are records in the registry (``quotas/USER``), so the next leader applies the same ones; use is counted from
the records of sessions and requests and is not stored. The rules of counting and refusing:
:mod:`rgpu.migrate.records.quota_decision`.
"""

from __future__ import annotations

import structlog

from rgpu.migrate.leader.term.decisions import Term
from rgpu.migrate.records.decoded import Decoded
from rgpu.migrate.records.keys import KEYS, QUEUE
from rgpu.migrate.records.quota_decision import LIMITS, Quotas, limits_of
from rgpu.migrate.records.quotas import EVERYBODY, QUOTAS, QuotaRecord, quota_key, read_quota
from rgpu.migrate.records.schema import (
    MAX_TEXT,
    OF_POOL,
    HistoryRecord,
    KeyRecord,
    QueueRecord,
    SessionRecord,
    decode,
    encode,
)
from rgpu.migrate.registry.base import Delete, Entry, Put, Registry, unchanged
from rgpu.session.errors import Conflict, Corrupt, NotFound, RgpuError

log = structlog.get_logger(__name__)

TRIES = 10


class QuotaReader:
    """Reader of limits in the registry; each record is decoded once for each change of it."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._quotas: Decoded[QuotaRecord] = Decoded("a quota's", lambda entry: read_quota(entry.value, entry.key))

    async def now(self, sessions: tuple[SessionRecord, ...], line: bool = False) -> Quotas:
        """Return limits and use. ``line``: with the waiting requests. Raises :class:`PoolUnavailable`.

        A damaged record is logged and left out: the limits of all users apply to its user until it is set again.
        """
        records = {record.user: record for record in self._quotas.read((await self._registry.list(QUOTAS)).entries)}
        if not records and not line:
            return Quotas()
        requests = await self._requests() if line else ()
        nameless = not all(one.user for one in sessions) or not all(one.user for one in requests)
        return Quotas(records, sessions, requests, await self.owners() if nameless else {})

    async def owners(self) -> dict[str, str]:
        """Return the user of each public key on record: records of the previous version name the key only."""
        found = {}
        for entry in (await self._registry.list(KEYS)).entries:
            try:
                key = decode(entry.value, KeyRecord, entry.key)
            except RgpuError:  # the keyring logs it
                continue
            if key.role != "node":
                found[key.public] = key.user or key.name
        return found

    async def _requests(self) -> tuple[QueueRecord, ...]:
        found = []
        for entry in (await self._registry.list(QUEUE)).entries:
            try:
                found.append(decode(entry.value, QueueRecord, entry.key))
            except RgpuError:  # the queue logs it
                continue
        return tuple(found)


class UserQuotas:
    """The leader's writes of limits; each is one transaction, fenced by its election."""

    def __init__(self, registry: Registry, term: Term) -> None:
        self._registry, self.term = registry, term
        self.reader = QuotaReader(registry)

    async def set(self, user: str, limits: dict[str, int | None], inherit: frozenset[str] = frozenset()) -> QuotaRecord:
        """Set limits of ``user``, or of all users; None: no limit; limits in ``inherit``: as for all users again.

        Limits that are not named stay. Raises :class:`Corrupt`, :class:`VersionMismatch` for a record that cannot be
        read, :class:`Fenced`, :class:`Conflict`.
        """
        key, now = quota_key(user), self.term.clock.wall()
        for _ in range(TRIES):
            entry = await self._registry.get(key)
            old = _read(entry, user) if entry is not None else QuotaRecord(user=user)
            new = old.changed_by(limits, inherit, now)
            if await self._write(entry, new, f"{_named(user)}: {describe(new)}; before: {describe(old)}", "quota_set"):
                return new
        raise Conflict(f"the quota of {user} changes too fast")

    async def unset(self, user: str) -> None:
        """Remove the limits of ``user`` (or those of all users). Raises :class:`NotFound`."""
        key = quota_key(user)
        for _ in range(TRIES):
            entry = await self._registry.get(key)
            if entry is None:
                raise NotFound(f"{_named(user)}: no quota is set", user=user)
            try:
                before = describe(read_quota(entry.value, entry.key))
            except RgpuError as error:  # a damaged record is removed in this way, too
                before = error.message
            if await self._write(entry, None, f"{_named(user)}: none; before: {before}", "quota_unset", user):
                return
        raise Conflict(f"the quota of {user} changes too fast")

    async def _write(self, entry: Entry | None, new: QuotaRecord | None, reason: str, decision: str,
                     user: str = "") -> bool:
        user = new.user if new is not None else user
        key = quota_key(user)
        story = HistoryRecord(when=self.term.clock.wall(), decision=decision, reason=reason[:MAX_TEXT],
                              user="" if user == EVERYBODY else user, **self.term.signature())
        log.info("decided", decision=decision, user=user, reason=reason)
        return await self.term.write(OF_POOL, story, [unchanged(key, entry.mod_revision if entry else 0)],
                                     [Delete(key) if new is None else Put(key, encode(new))])


def describe(record: QuotaRecord) -> str:
    """Return the limits of a record in words, for a sentence."""
    said = [limit.text(most) if (most := record.limits[limit.name]) is not None else f"{limit.name} without limit"
            for limit in LIMITS if limit.name in record.limits]
    return ", ".join(said) or "none of its own"


def advice(quotas: Quotas, user: str) -> list[str]:
    """Return sentences for an operator about the present limits and use."""
    limits = limits_of(user, quotas.records)
    said = quotas.over(user) if user != EVERYBODY else \
        [line for one in sorted(quotas.users()) for line in quotas.over(one)]
    if "gpus" in limits and "memory" not in limits:
        said.append("a session that asks for --memory alone counts no share of a GPU: limit memory as well")
    return said


def _named(user: str) -> str:
    return "everybody" if user == EVERYBODY else user


def _read(entry: Entry, user: str) -> QuotaRecord:
    try:
        return read_quota(entry.value, entry.key)
    except Corrupt as error:
        raise Corrupt(f"{error.message}; `rgpu quota unset {'--default' if user == EVERYBODY else user}` removes it",
                      **error.detail) from error
