"""Limits for the connections of a port whose peers are not authenticated, and which is closed first. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, TypeVar

#: Bounds of the unproven connections of one port, however many descriptors the process may open.
LEAST_WAITING, MOST_WAITING = 16, 512
#: One in so many of a process's descriptors may be held by peers that wait unproven at each port …
WAITING_SHARE = 8
#: … and one in so many may be a proven connection of the control port, which costs three descriptors.
KNOWN_SHARE = 8


class Stage(IntEnum):
    """Progress of a peer's handshake; the connection with the least progress is closed first."""

    SILENT = 0  #: it sent nothing
    SPEAKS = 1  #: it sent something that may be the beginning of the protocol
    KNOWS = 2  #: it has the node's public key: CURVE opened its HELLO
    PROVEN = 3  #: its key or ticket is valid


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one port's connections: unproven in all and of one address; proven in all; seconds for the proof."""

    waiting: int
    of_address: int
    known: int
    seconds: float = 5.0


class Waiting(Protocol):
    """A connection for the budget. ``address``: of the peer's host; ``since``: s, when it was accepted."""

    address: str
    stage: Stage
    since: float
    heard: float


W = TypeVar("W", bound=Waiting)


def budget_for(descriptors: int, each: int = 1) -> Budget:
    """Return a port's budget in a process that may open so many descriptors; ``each``: those of a waiting connection.

    One address gets three quarters of the waiting connections: a host that stands for many clients is served, and
    others are still accepted.
    """
    waiting = min(MOST_WAITING, max(LEAST_WAITING, descriptors // WAITING_SHARE // each))
    return Budget(waiting, max(1, waiting * 3 // 4), max(LEAST_WAITING, descriptors // KNOWN_SHARE))


def least(waiting: Iterable[W]) -> W | None:
    """Return the connection to close first: of those with the least progress, the oldest; None if there is none."""
    return min((one for one in waiting if one.stage is not Stage.PROVEN), key=lambda one: (one.stage, one.since),
               default=None)


def over(budget: Budget, waiting: Iterable[W], newest: W) -> tuple[W, str] | None:
    """Return the connection to close now that ``newest``, one of them, waits too, and why; None within the budget."""
    unproven = [one for one in waiting if one.stage is not Stage.PROVEN]
    beside = [one for one in unproven if one.address == newest.address]
    if len(beside) > budget.of_address:
        gone = least(beside)
        why = f"{len(beside)} connections of one address wait unproven, {budget.of_address} may"
    elif len(unproven) > budget.waiting:
        gone, why = least(unproven), f"{len(unproven)} connections wait unproven, {budget.waiting} may"
    else:
        return None
    assert gone is not None  # the newest is one of them
    return gone, why


def crowded(budget: Budget, known: Iterable[W]) -> tuple[W, str] | None:
    """Return the proven connection to close: idle longest, of the address with the most; None within the budget.

    Its owner connects again when it sends something.
    """
    proven = [one for one in known if one.stage is Stage.PROVEN]
    if len(proven) <= budget.known:
        return None
    count: dict[str, int] = {}
    for one in proven:
        count[one.address] = count.get(one.address, 0) + 1
    most = max(count.values())
    gone = min((one for one in proven if count[one.address] == most), key=lambda one: one.heard)
    return gone, f"{len(proven)} connections are open, {budget.known} may; this one was idle longest"
