"""Sentences about ranks that wait for others at a collective, from workers' figures of their communicators. Pure.

A worker's figures are those of :meth:`rgpu.server.collectives.communicators.Communicators.figures`. The worker may
be of another version, and is untrusted: figures that cannot be read are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from rgpu.session.printable import printable

WAIT_SECONDS = 10.0  #: that a rank may wait at a collective before `rgpu ps` shows it
MOST_TEXT = 200


class Last(msgspec.Struct, frozen=True):
    """The last operation that a rank began. ``seconds``: since then; ``waits_for``: sessions of the missing ranks."""

    rank: int = 0
    number: int = 0
    call: str = ""
    kind: str = ""
    bytes: int = 0
    complete: bool = False
    seconds: float = 0.0
    missing: tuple[int, ...] = ()
    waits_for: tuple[str, ...] = ()
    differs: dict[int, str] = {}


class CommunicatorFigures(msgspec.Struct, frozen=True):
    """One session's figures of a communicator; ``ranks``: its total number of ranks."""

    communicator: str = ""
    ranks: int = 0
    last: tuple[Last, ...] = ()


def read_figures(figures: Any) -> tuple[CommunicatorFigures, ...]:
    """Decode one worker's figures of its communicators; empty where they cannot be read."""
    try:
        return msgspec.convert(figures or (), tuple[CommunicatorFigures, ...], strict=False)
    except msgspec.ValidationError:
        return ()


def who_waits(communicators: Iterable[CommunicatorFigures]) -> list[str]:
    """One sentence for the ranks of a communicator that wait at the same call for the same reason.

    Only for ranks that wait for :data:`WAIT_SECONDS`: for which ranks, or which calls differ. ``communicators``: of
    one session, or of several.
    """
    groups: dict[tuple[str, int, str, str], list[Last]] = {}
    for one, last in _standing(communicators):
        groups.setdefault((one.communicator, one.ranks, last.call, _whom(last)), []).append(last)
    found = []
    for (_, ranks, call, whom), lasts in groups.items():
        numbers = sorted({last.rank for last in lasts})
        who, waits, their = ("rank", "waits", "its") if len(numbers) == 1 else ("ranks", "wait", "their")
        found.append(f"{who} {_list(numbers)} of {ranks} {waits} for {max(last.seconds for last in lasts):.0f} s in "
                     f"{their} {printable(call)[:MOST_TEXT]}{whom}")
    return found


def last_collective(communicators: Iterable[CommunicatorFigures]) -> dict[str, Any] | None:
    """The last operation that a session began in any of its communicators; None: none is known."""
    every = [(one, last) for one in communicators for last in one.last]
    if not every:
        return None
    one, last = min(every, key=lambda found: found[1].seconds)
    return {"communicator": printable(one.communicator)[:MOST_TEXT], "rank": last.rank, "number": last.number,
            "kind": printable(last.kind)[:MOST_TEXT], "bytes": last.bytes, "complete": last.complete,
            "since_s": last.seconds}


def _standing(communicators: Iterable[CommunicatorFigures]) -> Iterator[tuple[CommunicatorFigures, Last]]:
    for one in communicators:
        for last in one.last:
            if not last.complete and last.seconds >= WAIT_SECONDS and (last.differs or last.missing):
                yield one, last


def _whom(last: Last) -> str:
    if last.differs:
        return ": " + ", ".join(f"rank {rank} called {printable(call)[:MOST_TEXT]}"
                                for rank, call in sorted(last.differs.items()))
    names = [printable(name)[:MOST_TEXT] for name in last.waits_for]
    sessions = f" (session{'s' if len(names) > 1 else ''} {', '.join(names)})" if names else ""
    return f" for {'ranks' if len(last.missing) > 1 else 'rank'} {_list(last.missing)}{sessions}"


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
