"""Retention: which checkpoints of a session may be removed. Pure.

The order of checkpoints is that of (epoch, position), never of a clock; a clock only
gives the age of a checkpoint, and one dated in the future is not old.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rgpu.checkpoint.store.checkpoint_store import CheckpointInfo


@dataclass(frozen=True, slots=True)
class Policy:
    """Retention policy. ``keep_last``: checkpoints to keep of each session, at least 1. ``max_age``: s; older ones are
    removed even if fewer than ``keep_last`` remain. None: no limit.
    """

    keep_last: int | None = 3
    max_age: float | None = None


def superfluous(checkpoints: Iterable[CheckpointInfo], policy: Policy, named: Collection[str], now: float) -> list[str]:
    """List the names of the checkpoints to remove, oldest first.

    Never one that the registry names (``named``), never the newest readable one of
    its session, and never one that cannot be read: an operator should examine it.
    """
    sessions: dict[str, list[CheckpointInfo]] = {}
    for info in checkpoints:
        if not info.error:
            sessions.setdefault(info.session, []).append(info)
    gone: list[CheckpointInfo] = []
    for found in sessions.values():
        found.sort(key=lambda info: info.age, reverse=True)
        for rank, info in enumerate(found):
            too_many = policy.keep_last is not None and rank >= max(1, policy.keep_last)
            too_old = policy.max_age is not None and now - info.created > policy.max_age
            if rank and (too_many or too_old) and info.name not in named:
                gone.append(info)
    return [info.name for info in sorted(gone, key=lambda info: info.age)]
