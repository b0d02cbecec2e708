"""A place in the journal."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Cursor:
    """A place in the stream of wire records: run number (counted from the first ever) and offset."""

    number: int
    offset: int
