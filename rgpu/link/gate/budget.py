"""How many connections a port holds for peers that have not proven who they are, and which one goes first. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, TypeVar

#: Bounds of what one port holds unproven, whatever the process may open.
LEAST_WAITING, MOST_WAITING = 16, 512
#: Of a process's descriptors, one in so many may be held by peers that wait unproven at each port …
WAITING_SHARE = 8
#: … and one in so many may be a proven connection of the control port, which costs three descriptors.
KNOWN_SHARE = 8


class Stage(IntEnum):
    """How far a peer has come; who has come least far goes first."""

    SILENT = 0  #: it said nothing
    SPEAKS = 1  #: it said something that may be the beginning of the protocol
    KNOWS = 2  #: it knows the node's public key: CURVE opened its HELLO
    PROVEN = 3  #: its key or ticket is good


@dataclass(frozen=True, slots=True)
class Budget:
    """Connections of one port: unproven in all and of one address; proven in all; seconds to prove oneself."""

    waiting: int
    of_address: int
    known: int
    seconds: float = 5.0


class Waiting(Protocol):
    """A connection as the budget sees it. ``address``: of the peer's host; ``since``: s, when it came."""

    address: str
    stage: Stage
    since: float
    heard: float


W = TypeVar("W", bound=Waiting)


def budget_for(descriptors: int, each: int = 1) -> Budget:
    """A port's budget in a process that may open so many descriptors; ``each``: what one that waits costs.

    One address gets three quarters of what waits: a host behind which many clients stand is served, and others still
    find room.
    """
    waiting = min(MOST_WAITING, max(LEAST_WAITING, descriptors // WAITING_SHARE // each))
    return Budget(waiting, max(1, waiting * 3 // 4), max(LEAST_WAITING, descriptors // KNOWN_SHARE))


def least(waiting: Iterable[W]) -> W | None:
    """The connection that goes first: the one that came least far, and of those the oldest. None of nobody."""
    return min((one for one in waiting if one.stage is not Stage.PROVEN), key=lambda one: (one.stage, one.since),
               default=None)


def over(budget: Budget, waiting: Iterable[W], newest: W) -> tuple[W, str] | None:
    """The connection that has to go now that ``newest``, one of them, waits too, and why; None where there is room."""
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
    """The proven connection that has to go: idle longest, of the address that has most; None where there is room.

    Its owner connects again when it has something to say.
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
