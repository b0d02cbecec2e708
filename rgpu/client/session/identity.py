"""Identity of a session, as attempts to attach, the shipper and its upkeep report it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a session. ``pid``: the program's, as the kernel names it.

    ``asked_pid``: of the process that requested the session from the pool; 0: the program itself.
    """

    session: str
    pid: int
    command: str
    client: str = ""
    asked_pid: int = 0
