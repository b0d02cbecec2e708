"""Why tests of numba-cuda's suite do not pass: the table that the runner holds its results against."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Known:
    """Tests, by patterns of their ids, that do not pass, and why. ``sometimes``: they may pass, too."""

    text: str
    tests: tuple[str, ...]
    sometimes: bool = False


KNOWN: tuple[Known, ...] = ()

#: What the suite skips itself: the beginning of its reason, and what a user may do about it.
SKIPS: dict[str, str] = {}


def reason_of(test: str) -> Known | None:
    """The entry of the table for a test's id (``cudapy.test_ipc.TestIpcMemory.test_ipc_array``)."""
    return next((known for known in KNOWN if any(fnmatch.fnmatchcase(test, pattern) for pattern in known.tests)), None)


def skip_group(reason: str) -> str:
    """The key that a skip is counted under: the beginning in ``SKIPS`` that it has, or its own words."""
    return next((start for start in SKIPS if reason.startswith(start)), reason)
