"""Verbs about users' quotas: operators set them where this node leads; any node shows them, with their use.

A user sees only its own quota, an operator those of all users.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import structlog

from rgpu.link.control import ControlServer, Request
from rgpu.link.control.access import Actor, Target, require
from rgpu.link.control.verbs import VERBS
from rgpu.link.keys import AuthorizedKeys
from rgpu.migrate.leader.quotas import QuotaReader, advice
from rgpu.migrate.records.quota_decision import NAMES, Quotas, read_limits, shown
from rgpu.migrate.records.quotas import EVERYBODY, check_quota_user
from rgpu.server.node.pool.leader_link import LeaderVerb, Progress
from rgpu.server.node.pool.local_leader import LocalLeader
from rgpu.server.node.pool.records import PoolRecords
from rgpu.server.node.store.checkpoint_quota import LIMIT, CheckpointQuota
from rgpu.session.errors import StoreError, UsageError

log = structlog.get_logger(__name__)


class QuotaVerbs:
    """Answers the verbs. ``authorized``: admitted keys, and so the users. ``stored``: counts their checkpoints."""

    def __init__(self, local: LocalLeader, records: PoolRecords, authorized: AuthorizedKeys,
                 stored: CheckpointQuota) -> None:
        self._local, self._records, self._authorized, self._stored = local, records, authorized, stored
        self.table: dict[str, LeaderVerb] = {"quota.set": self._set, "quota.unset": self._unset}

    def register(self, control: ControlServer) -> None:
        """Enter the verb that any node answers from the registry."""
        control.register("quota.show", self._show)

    # -- where this node leads --------------------------------------------------------
    async def _set(self, args: dict[str, Any], actor: Actor, progress: Progress) -> dict[str, Any]:
        coordinator, user = self._local.leading(), _whose(args)
        limits, inherit = read_limits(args.get("limits") or {}), _inherit(args.get("inherit"))
        if not limits and not inherit:
            raise UsageError("a quota is set by naming at least one limit")
        if limits.keys() & inherit:
            raise UsageError(f"{', '.join(sorted(limits.keys() & inherit))}: either a limit, or everybody's")
        await coordinator.quotas.set(user, limits, inherit)
        coordinator.queue.wake()  # requests that waited for it may fit now
        return await self._told(user)

    async def _unset(self, args: dict[str, Any], actor: Actor, progress: Progress) -> dict[str, Any]:
        coordinator, user = self._local.leading(), _whose(args)
        await coordinator.quotas.unset(user)
        coordinator.queue.wake()
        return await self._told(user)

    async def _told(self, user: str) -> dict[str, Any]:
        """The limits in force now, with notes for the operator."""
        quotas, unknown = await self._counted(await self._quotas(), None if user == EVERYBODY else [user])
        notes = advice(quotas, user)
        if user == EVERYBODY:
            return {"user": None, "limits": _limits(quotas, user), "own": _own(quotas, user), "notes": notes}
        if user not in self._users():
            notes.append(f"no key of a user {user} is let in: the quota holds once there is one (`rgpu keys list`)")
        return {**_row(quotas, user, unknown), "notes": notes}

    # -- any node ---------------------------------------------------------------------
    async def _show(self, request: Request) -> dict[str, Any]:
        asked, actor = request.args.get("user"), request.actor
        quotas = await self._quotas()
        if request.args.get("all_users"):
            users = sorted(quotas.users() | self._users())
        else:
            users = [check_quota_user(str(asked))] if asked else [actor.user]
            require(VERBS["quota.show"], actor, Target(f"the quota of {users[0]}", users[0]))
        quotas, unknown = await self._counted(quotas, users)
        return {"quotas": [_row(quotas, user, unknown) for user in users], "default": _limits(quotas, EVERYBODY)}

    async def _quotas(self) -> Quotas:
        return await QuotaReader(self._records.registry).now(tuple(await self._records.sessions()), line=True)

    async def _counted(self, quotas: Quotas, users: Collection[str] | None) -> tuple[Quotas, bool]:
        """``quotas`` with the bytes of these users' checkpoints (None: of all users with that limit), and whether these
        are unknown because the store does not answer.
        """
        if users is None:
            users = [user for user in quotas.users() | self._users() if LIMIT in quotas.limits(user)]
        try:
            return replace(quotas, stored=await self._stored.used(users)), False
        except StoreError as error:
            log.warning("checkpoints cannot be counted", reason=error.message)
            return quotas, True

    def _users(self) -> set[str]:
        return {key.holder for key in self._authorized.everybody() if key.role != "node"}


def _whose(args: dict[str, Any]) -> str:
    """The user that the arguments name, or EVERYBODY. Raises :class:`UsageError`."""
    user, default = str(args.get("user") or ""), args.get("default") is True
    if default == bool(user):
        raise UsageError("a quota is one user's, or everybody's: name a user, or say default")
    return EVERYBODY if default else check_quota_user(user)


def _inherit(given: object) -> frozenset[str]:
    """Names of limits that return to the default. Raises :class:`UsageError`."""
    names = given if isinstance(given, list) else [] if given is None else [given]
    unknown = [str(name)[:40] for name in names if not isinstance(name, str) or name not in NAMES]
    if unknown:
        raise UsageError(f"there is no limit {unknown[0]!r}; there are: {', '.join(sorted(NAMES))}")
    return frozenset(names)


def _own(quotas: Quotas, user: str) -> dict[str, float | None]:
    """Limits set for that user; None: no limit."""
    record = quotas.records.get(user)
    return shown({name: most for name, most in record.limits.items() if name in NAMES}) if record else {}


def _limits(quotas: Quotas, user: str) -> dict[str, float | None]:
    """Limits in force for that user; None: no limit."""
    return shown({**dict.fromkeys(sorted(NAMES)), **quotas.limits(user)})


def _row(quotas: Quotas, user: str, unknown: bool) -> dict[str, Any]:
    """The row of a user's quota. ``unknown``: the bytes of the user's checkpoints are not known now."""
    use = quotas.use(user)
    amounts = {name: None if unknown and name == LIMIT else use.of(name) for name in sorted(NAMES)}
    return {"user": user, "limits": _limits(quotas, user), "own": _own(quotas, user), "use": shown(amounts),
            "over": quotas.over(user)}
