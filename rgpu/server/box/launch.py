"""The program that a daemon starts for a worker: it goes into the box, and executes the worker there.

``RGPU_BOX_PLAN`` is JSON: ``walls`` (names, :mod:`.walls`), ``places``, ``joins`` (files of cgroups to write itself
to), ``uid``, ``gid``, ``argv``. What stands is told to the worker in ``RGPU_ENTERED_BOX``. A wall that cannot be put
up ends the start with status :data:`FAILED` and one line on stderr: who asked for it shall not go without it unaware.

It is run by its path, with nothing imported but the standard library: the package would take longer to import than
everything here takes.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

if __package__:
    from rgpu.server.box import landlock, mounts, privileges, seccomp
else:
    import landlock  # type: ignore[import-not-found,no-redef]
    import mounts  # type: ignore[import-not-found,no-redef]
    import privileges  # type: ignore[import-not-found,no-redef]
    import seccomp  # type: ignore[import-not-found,no-redef]

PLAN, BOX = "RGPU_BOX_PLAN", "RGPU_ENTERED_BOX"
FAILED = 71  #: EX_OSERR of sysexits.h


def enter(plan: dict[str, Any]) -> None:
    """Put up the walls of the plan around this process, in the order in which each may still be. Raises OSError."""
    walls = frozenset(plan["walls"])
    places = [(str(path), str(rights)) for path, rights in plan["places"]]
    for file in plan["joins"]:
        with open(file, "w") as joined:
            joined.write("0")
    privileges.volunteer_for_oom()
    mounts.unshare(walls)
    if "mounts" in walls:
        mounts.new_root(places, own_processes="processes" in walls)
    os.umask(privileges.UMASK)
    privileges.limit_resources(own_user="user" in walls)
    privileges.set_no_new_privileges()
    if "files" in walls:
        landlock.restrict(places, sockets="syscalls" in walls)
    if "user" in walls:
        privileges.become_user(int(plan["uid"]), int(plan["gid"]))
    if "capabilities" in walls:
        privileges.drop_capabilities()
    if "syscalls" in walls:
        seccomp.install()


def tell(plan: dict[str, Any]) -> None:
    """Set the variable by which the worker knows its box."""
    os.environ[BOX] = json.dumps({name: plan[name] for name in ("walls", "uid", "owner")})


def main() -> None:
    """Read the plan, go into the box, become the worker."""
    plan = json.loads(os.environ.pop(PLAN))
    try:
        enter(plan)
        tell(plan)
        os.execv(plan["argv"][0], plan["argv"])
    except (OSError, ValueError) as error:
        print(f"the worker's box cannot be made: {error}", file=sys.stderr, flush=True)
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
