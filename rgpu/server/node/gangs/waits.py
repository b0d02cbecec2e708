"""The sentences about who waits for whom in a gang, from the last collective of each rank. Pure.

A session's figures may have ``collectives``: {number: of the last one that it began, kind, bytes, communicator,
since_s: how long ago}. Where they have none, nothing is said of that rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rgpu.session.printable import printable

PATIENCE = 10.0  #: seconds after which ranks that call different things are told


@dataclass(frozen=True, slots=True)
class Last:
    """The last collective that a rank began. ``bytes``: of its contribution; ``since_s``: None where nobody says."""

    rank: int
    number: int
    kind: str
    bytes: int
    communicator: str = ""
    since_s: float | None = None

    @property
    def what(self) -> str:
        """Text for people."""
        return f"{self.kind} of {self.bytes} bytes"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of ``-o json``."""
        return {"number": self.number, "kind": self.kind, "bytes": self.bytes,
                "communicator": self.communicator or None, "since_s": self.since_s}


def last_of(rank: int, figures: Any) -> Last | None:
    """What a worker says of itself, which may be anything; None for nothing that can be read."""
    if not isinstance(figures, Mapping):
        return None
    number, size, since = figures.get("number"), figures.get("bytes", 0), figures.get("since_s")
    if type(number) is not int or type(size) is not int or number < 0:
        return None
    kind, communicator = (printable(str(figures.get(name) or ""))[:64] for name in ("kind", "communicator"))
    return Last(rank, number, kind or "collective", max(size, 0), communicator,
                float(since) if isinstance(since, int | float) else None)


def who_waits(ranks: Iterable[Last]) -> list[str]:
    """One sentence for each communicator whose ranks are not at the same collective; none where all are."""
    groups: defaultdict[str, list[Last]] = defaultdict(list)
    for last in ranks:
        groups[last.communicator].append(last)
    return [said for _, group in sorted(groups.items()) for said in _of_group(sorted(group, key=lambda one: one.rank))]


def _of_group(group: list[Last]) -> list[str]:
    most = max(one.number for one in group)
    ahead, behind = [one for one in group if one.number == most], [one for one in group if one.number < most]
    where = f" of {group[0].communicator}" if group[0].communicator else ""
    calls: defaultdict[str, list[Last]] = defaultdict(list)
    for one in ahead:
        calls[one.what].append(one)
    if len(calls) > 1 and all(one.since_s is None or one.since_s >= PATIENCE for one in ahead):
        said = "; ".join(f"{_ranks(ones)} {what}" for what, ones in calls.items())
        return [f"collective {most}{where} is not the same call on all ranks, so none of them returns: {said}"]
    if not behind:
        return []
    late = "; ".join(f"rank {one.rank} (last: {one.number}, {one.what})" for one in behind)
    return [f"{_ranks(ahead)} in collective {most}{where}, {ahead[0].what}: waiting for {late}"]


def _ranks(ones: list[Last]) -> str:
    numbers = ", ".join(str(one.rank) for one in ones)
    return f"rank {numbers}" if len(ones) == 1 else f"ranks {numbers}"
