"""Walls that a worker gets: a table, and one pure decision with a reason for each.

``off`` puts up those that need nothing and hinder nobody; ``auto`` (default) what this host allows, and what needs a
user of the worker's own only where the node was given users; ``strict`` all of them, or the node does not start. A wall
that an option asks for is none of them where it was not given.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rgpu.session.errors import Refused


class Mode(StrEnum):
    """Values of ``rgpu server --box``."""

    AUTO = "auto"
    OFF = "off"
    STRICT = "strict"


@dataclass(frozen=True, slots=True)
class Wall:
    """``needs``: what it cannot be without; ``users``: only where each worker has a user of its own.

    ``asked``: only where an option of the node asks for it.
    """

    name: str
    keeps: str  #: what it keeps a worker from, in words
    needs: str = ""
    users: bool = False
    always: bool = False  #: also with ``off``
    asked: bool = False


WALLS: tuple[Wall, ...] = (
    Wall("environment", "the daemon's environment", always=True),
    Wall("limits", "core files, new privileges, outliving its daemon when memory is short", always=True),
    Wall("undumpable", "being read or traced by other processes of its user", always=True),
    Wall("capabilities", "what root may beyond a user"),
    Wall("files", "files and folders other than its own and the system's", "landlock"),
    Wall("syscalls", "tracing, mounting, namespaces, sockets of networks, loading code into the kernel", "seccomp"),
    Wall("memory", "more memory than a worker may have", "cgroup"),
    Wall("tasks", "more processes and threads than a worker may have", "cgroup"),
    Wall("io", "reading and writing disks faster than a worker may", "io", asked=True),
    Wall("user", "what belongs to its daemon's user and to other workers", "root", users=True),
    Wall("mounts", "seeing other folders and devices", "root", users=True),
    Wall("processes", "seeing and signalling other processes", "root", users=True),
    Wall("ipc", "shared memory and queues of other processes", "root", users=True),
    Wall("network", "every network, and abstract sockets of others", "root", users=True),
)
NAMES = tuple(wall.name for wall in WALLS)


@dataclass(frozen=True, slots=True)
class Standing:
    """One wall of a node's workers. ``reason``: why it does not stand; empty where it does."""

    wall: Wall
    stands: bool
    reason: str = ""


def decide(mode: Mode, missing: Mapping[str, str], *, users: bool, asked: Collection[str] = ()) -> tuple[Standing, ...]:
    """Return every wall, and whether it is put up.

    ``missing``: what this host lacks of ``needs``, with the reason. ``users``: workers get users of their own.
    ``asked``: names of walls that options ask for; the others of that kind are left out.
    """
    found = []
    for wall in WALLS:
        if wall.asked and wall.name not in asked:
            continue
        why = missing.get(wall.needs, "")
        if mode == Mode.OFF and not wall.always:
            why = "the node was started with --box off"
        elif wall.users and not users:
            why = why or "no users were given (--worker-uids FIRST-LAST)"
        found.append(Standing(wall, not why, why))
    return tuple(found)


def check(mode: Mode, standing: Sequence[Standing]) -> None:
    """Raises :class:`Refused` where ``strict`` was asked for and a wall does not stand."""
    if mode == Mode.STRICT and (lacking := [one for one in standing if not one.stands]):
        raise Refused("workers cannot have every wall here, which --box strict asks for: " + "; ".join(
            f"{one.wall.name}: {one.reason}" for one in lacking))
