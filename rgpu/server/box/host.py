"""What this host allows a daemon to put around its workers."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterable
from pathlib import Path

from rgpu.server.box import landlock
from rgpu.server.box.cgroups import Cgroups
from rgpu.server.box.disks import disks_of

_SYS_ADMIN, _SETUID, _SETGID, _CHOWN = 21, 7, 6, 0  #: bits of CapEff
_SECCOMP, _GET_ACTION_AVAIL = 317, 2


def missing(cgroups: Cgroups | None = None, folders: Iterable[Path] = ()) -> dict[str, str]:
    """Return what is not to be had here of what walls need (:mod:`.walls`), each with the reason.

    ``folders``: those that workers write to, whose disks are to be bounded.
    """
    found = {}
    if not landlock.version():
        found["landlock"] = "the kernel has no Landlock (Linux 5.13, with landlock in `lsm=`)"
    if platform.machine() != "x86_64" or not _has_seccomp():
        found["seccomp"] = "the kernel has no seccomp filters, or this is no x86-64"
    if why := _lacks_rights():
        found["root"] = why
    cgroups = cgroups or Cgroups.find("")
    if cgroups.reason:
        found["cgroup"] = cgroups.reason
    if why := cgroups.io_reason or "; ".join(disks_of(folders).lacking):
        found["io"] = why
    return found


def _has_seccomp() -> bool:
    action = ctypes.c_uint32(0x00050000)
    return ctypes.CDLL(None, use_errno=True).syscall(_SECCOMP, _GET_ACTION_AVAIL, 0, ctypes.byref(action)) == 0


def _lacks_rights() -> str:
    """Why this process cannot make namespaces and become other users; empty where it can."""
    try:
        status = Path("/proc/self/status").read_text()
        held = int(next(line for line in status.splitlines() if line.startswith("CapEff")).split()[1], 16)
    except (OSError, StopIteration, ValueError):
        held = 0
    lacking = [name for name, bit in (("CAP_SYS_ADMIN", _SYS_ADMIN), ("CAP_SETUID", _SETUID), ("CAP_SETGID", _SETGID),
                                      ("CAP_CHOWN", _CHOWN)) if not held >> bit & 1]
    return f"the daemon (user {os.geteuid()}) has no {', '.join(lacking)}" if lacking else ""
