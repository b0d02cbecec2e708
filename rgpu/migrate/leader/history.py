"""The history of the pool's decisions for people: decision, subject, reason, user.

One stream for `rgpu history` and `rgpu events`: every decision is an entry
below ``history/``, written in the transaction that carried it out, so any node
can read and follow it, and no decision takes effect without its entry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from rgpu.migrate.records.keys import HISTORY
from rgpu.migrate.records.schema import OF_HOST, OF_POOL, HistoryRecord, decode
from rgpu.migrate.registry.base import Compacted, Entry, Registry
from rgpu.session.errors import Corrupt, VersionMismatch

#: Decisions about a session that belong to a move.
OF_MOVES = frozenset({"begin_move", "move_ready", "commit", "abort", "clear_move", "refuse_move", "drain_blocked"})
#: Seconds to wait for further entries before an answer; those of one transaction arrive together.
TOGETHER_SECONDS = 0.02
MAX_EVENTS = 1000  #: entries in one answer

#: Predicate: whether the reader may see a decision, in the form of :func:`view`.
Shown = Callable[[dict[str, Any]], bool]


def everything(event: dict[str, Any]) -> bool:
    """Predicate for operators: every decision is shown."""
    return True


def view(entry: Entry) -> dict[str, Any] | None:
    """Decode an entry: {revision, kind, when, session, host, decision, reason, epoch, owner, leader, actor, user}; None
    for a damaged one."""
    try:
        record = decode(entry.value, HistoryRecord, entry.key)
    except (Corrupt, VersionMismatch):
        return None
    kind = "node" if record.host else "pool" if not record.session else \
        "move" if record.decision in OF_MOVES else "gang" if record.decision.startswith("gang_") else "session"
    return {"revision": entry.mod_revision, "kind": kind, "when": record.when, "session": record.session or None,
            "host": record.host or None, "decision": record.decision, "reason": record.reason,
            "epoch": record.epoch or None, "owner": record.owner, "leader": record.leader or None,
            "actor": record.actor or None, "user": record.user or None}


def _views(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    found = [shown for entry in entries if (shown := view(entry)) is not None]
    return sorted(found, key=lambda shown: (shown["revision"], shown["when"]))


def subject_of(session: str | None = None, host: str | None = None, pool: bool = False) -> str | None:
    """Return the prefix of the keys of one subject's history; None: all subjects."""
    return session or (OF_HOST + host if host else OF_POOL if pool else None)


async def stories(registry: Registry, subject: str | None = None, limit: int = 100,
                  shown: Shown = everything) -> tuple[list[dict[str, Any]], int]:
    """Return the last ``limit`` decisions (about ``subject``) that are ``shown``, oldest first, and the revision to
    follow from."""
    listing = await registry.list(f"{HISTORY}{subject}/@" if subject else HISTORY)
    found = [event for event in _views(listing.entries) if shown(event)]
    return found[-limit:] if limit > 0 else [], listing.revision


async def follow(registry: Registry, since: int, seconds: float,
                 shown: Shown = everything) -> tuple[list[dict[str, Any]], int]:
    """Return the decisions after revision ``since`` that are ``shown``, as soon as there are any, within ``seconds``;
    and the revision to continue from.

    Decisions that were pruned meanwhile are left out; none is returned twice.
    """
    events: list[dict[str, Any]] = []
    watch = registry.watch(HISTORY, since + 1)
    left = seconds
    try:
        while len(events) < MAX_EVENTS:
            async with asyncio.timeout(left):
                change = await anext(watch)
            since = max(since, change.revision)
            found = _views(event.entry for event in change.events if event.entry is not None)
            events += [event for event in found if shown(event)]
            left = TOGETHER_SECONDS if events else left
    except (TimeoutError, StopAsyncIteration):
        pass
    except Compacted:
        listing = await registry.list(HISTORY)
        events = [event for event in _views(listing.entries) if event["revision"] > since and shown(event)]
        since = listing.revision
    finally:
        close = getattr(watch, "aclose", None)
        if close is not None:
            await close()
    return events, since
