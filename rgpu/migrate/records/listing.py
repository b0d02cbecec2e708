"""Pages of many sessions and requests: those that match a query, in the order of names. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rgpu.migrate.records.schema import QueueRecord, SessionRecord

PER_PAGE = 50
OVER = ("ended", "failed")
Listed = SessionRecord | QueueRecord


@dataclass(frozen=True, slots=True)
class Listing:
    """One page. ``number`` counts from 1; ``total``: all matches; ``states``: states that occur in all."""

    records: Sequence[Listed]
    number: int
    pages: int
    total: int
    states: tuple[str, ...]


def page(records: Iterable[Listed], question: Mapping[str, Any], user_of: Callable[[Listed], str]) -> Listing:
    """Return the requested page, or the nearest existing one.

    ``question``: untrusted; ``state``, ``host``, ``user``; ``q`` in name, command or labels; ``all``: also ended and
    failed sessions; ``page``: a number.
    """
    every = [record for record in records if question.get("all") or state_of(record) not in OVER]
    wanted = {name: str(question[name]) for name in ("state", "host", "user") if question.get(name)}
    text = str(question.get("q") or "").casefold()
    of = {"state": state_of, "host": _host, "user": user_of}
    found = [record for record in every if all(of[name](record) == value for name, value in wanted.items())
             and (not text or _has(record, text))]
    found.sort(key=lambda record: record.name)
    pages = max(1, -(-len(found) // PER_PAGE))
    asked = str(question.get("page") or "1")
    number = min(max(1, int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 9 else 1), pages)
    return Listing(found[(number - 1) * PER_PAGE:number * PER_PAGE], number, pages, len(found),
                   tuple(sorted({state_of(record) for record in every})))


def state_of(record: Listed) -> str:
    """Return a session's state; that of a request is queued."""
    return record.state if isinstance(record, SessionRecord) else "queued"


def _host(record: Listed) -> str:
    return (record.owner or "") if isinstance(record, SessionRecord) else ""


def _has(record: Listed, text: str) -> bool:
    words = (record.name, record.program.command, *(f"{key}={value}" for key, value in record.wants.labels.items()))
    return any(text in word.casefold() for word in words)
