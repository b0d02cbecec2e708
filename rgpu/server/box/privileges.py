"""What a worker's process may never get (again): capabilities, new privileges, core files, too many of anything."""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from pathlib import Path

PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 24, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_CAPSET, _CAPABILITIES_3 = 126, 0x20080522
_MOST_CAPABILITIES = 64
OPEN_FILES = 65536  #: descriptors: one for each allocation of a device that is given away
TASKS = 4096  #: processes and threads of a worker that has a user of its own
OOM_ABOVE = 500  #: of 1000: how much sooner than its daemon the kernel ends a worker
UMASK = 0o077


def _prctl(option: int, *arguments: int) -> int:
    given = [ctypes.c_ulong(one) for one in (*arguments, 0, 0, 0, 0)[:4]]
    return int(ctypes.CDLL(None, use_errno=True).prctl(option, *given))


def set_no_new_privileges() -> None:
    """Give up what set-user-id programs and file capabilities would give, for good. Raises OSError."""
    if _prctl(PR_SET_NO_NEW_PRIVS, 1) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs")


def drop_capabilities() -> None:
    """Give up every capability, those of a root user too, for good. Raises OSError."""
    for number in range(_MOST_CAPABILITIES):
        _prctl(PR_CAPBSET_DROP, number)  # fails where there is none of that number, and without the right to
    _prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    head = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITIES_3, 0))
    none = ctypes.create_string_buffer(24)
    if ctypes.CDLL(None, use_errno=True).syscall(_CAPSET, head, none) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def hide_memory() -> None:
    """Let no other process of this user look into this one: no tracing, no /proc/PID/mem or environ, no core file.

    It lasts until the next program is executed.
    """
    _prctl(PR_SET_DUMPABLE, 0)


def show_memory() -> None:
    """Undo :func:`hide_memory`, for what the kernel lets only a process that shows itself open of its own."""
    _prctl(PR_SET_DUMPABLE, 1)


def limit_resources(*, own_user: bool) -> None:
    """No core files and message queues; a bound for descriptors, and for processes where they are counted alone."""
    wanted = {resource.RLIMIT_CORE: 0, resource.RLIMIT_MSGQUEUE: 0, resource.RLIMIT_NOFILE: OPEN_FILES}
    if own_user:
        wanted[resource.RLIMIT_NPROC] = TASKS
    for what, most in wanted.items():
        soft, hard = resource.getrlimit(what)
        hard = most if hard == resource.RLIM_INFINITY else min(hard, most)
        soft = hard if soft == resource.RLIM_INFINITY or not most else min(soft, hard)
        resource.setrlimit(what, (soft, hard))


def volunteer_for_oom() -> None:
    """Have the kernel end this process before the one that started it when memory is short."""
    score = Path("/proc/self/oom_score_adj")
    score.write_text(str(min(1000, int(score.read_text()) + OOM_ABOVE)))


def become_user(uid: int, gid: int) -> None:
    """Be that user, with no other group. Raises OSError. A former root has no capability then."""
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
