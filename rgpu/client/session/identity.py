"""Identity of a session: what an attempt to attach, the shipper and its upkeep say of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a session. ``pid``: the program's, as the kernel names it.

    ``asked_pid``: of the process that asked the pool for the session; 0: the program itself did.
    """

    session: str
    pid: int
    command: str
    client: str = ""
    asked_pid: int = 0
