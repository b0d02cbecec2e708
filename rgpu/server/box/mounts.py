"""A root of its own for a worker, and namespaces: what is not named is not there (mount_namespaces(7)).

The root is an empty tmpfs into which the places of the plan are bound at the paths that they have outside; /proc is
the worker's own, /dev has the nodes that are named, /tmp and /dev/shm are empty. Needs CAP_SYS_ADMIN.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterable
from pathlib import Path

NEWNS, NEWIPC, NEWPID, NEWNET, NEWUTS = 0x00020000, 0x08000000, 0x20000000, 0x40000000, 0x04000000
#: What to unshare for each wall. The process namespace is for children: whoever starts this program leaves its own.
NAMESPACES = {"mounts": NEWNS, "ipc": NEWIPC | NEWUTS, "network": NEWNET}
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE, _DETACH = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18, 2
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY, _ATTR_NOSUID = 442, -100, 0x8000, 1, 2
_PIVOT_ROOT = 155
_STAGE = "/tmp"  #: any directory that is there: hidden from this namespace for a moment
_OLD, _NEW = "/old", "/new"  #: of the stage
_EMPTY = ("/tmp", "/dev/shm")


def unshare(walls: Iterable[str]) -> None:
    """Leave the namespaces that these walls stand for. Raises OSError."""
    flags = 0
    for wall in walls:
        flags |= NAMESPACES.get(wall, 0)
    if flags:
        _check(_libc().unshare(flags), "unshare")


def leave_processes() -> None:
    """Have the children of this thread begin process namespaces of their own. Raises OSError."""
    _check(_libc().unshare(NEWPID), "unshare of processes")


def new_root(places: Iterable[tuple[str, str]], *, own_processes: bool) -> None:
    """Go into a root that holds ``places`` and no more: (path, "d" | "r" | "rx" | "rw"). Raises OSError."""
    libc = _libc()
    _mount(libc, "", "/", "", _REC | _PRIVATE)
    # First a stage from where the whole old root is seen, also what lies below the stage's mount point.
    _mount(libc, "rgpu-stage", _STAGE, "tmpfs", _NOSUID | _NODEV, "mode=700")
    os.chdir(_STAGE)
    os.mkdir("old")
    os.mkdir("new")
    _check(libc.syscall(_PIVOT_ROOT, b".", b"old"), "pivot_root")
    os.chdir("/")
    _mount(libc, "rgpu-box", _NEW, "tmpfs", _NOSUID | _NODEV, "mode=755")
    for path, rights in sorted(places):
        if rights != "d" and os.path.lexists(_OLD + path):
            _bind(libc, path, rights)
    if own_processes:
        os.makedirs(f"{_NEW}/proc", exist_ok=True)
        _mount(libc, "proc", f"{_NEW}/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    for path in _EMPTY:
        if not os.path.lexists(_NEW + path) or not os.listdir(_NEW + path):
            os.makedirs(_NEW + path, exist_ok=True)
            _mount(libc, "tmpfs", _NEW + path, "tmpfs", _NOSUID | _NODEV, "mode=1777")
    os.chdir(_NEW)
    _check(libc.syscall(_PIVOT_ROOT, b".", b"."), "pivot_root into the box")
    _check(libc.umount2(b".", _DETACH), "umount of the old root")
    os.chdir("/")
    _mount(libc, "", "/", "", _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)


def _bind(libc: ctypes.CDLL, path: str, rights: str) -> None:
    """Have ``path`` in the new root as it is outside."""
    there, here = _OLD + path, Path(_NEW + path)
    covered = os.path.lexists(here)  # it came with a folder above it
    if covered and (rights != "rw" or here.is_symlink() or os.path.ismount(here)):
        return
    if os.path.islink(there):
        here.parent.mkdir(parents=True, exist_ok=True)
        os.symlink(os.readlink(there), here)
        return
    mode = os.stat(there).st_mode
    if covered:
        pass
    elif stat.S_ISDIR(mode):
        here.mkdir(parents=True, exist_ok=True)
    else:
        here.parent.mkdir(parents=True, exist_ok=True)
        here.touch()
    _mount(libc, there, str(here), "", _BIND | _REC)
    if rights != "rw" and (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        attributes = (ctypes.c_uint64 * 4)(_ATTR_RDONLY | _ATTR_NOSUID, 0, 0, 0)
        _check(libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, str(here).encode(), _AT_RECURSIVE, attributes,
                            ctypes.c_size_t(32)), f"making {path} read-only")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _mount(libc: ctypes.CDLL, source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    _check(libc.mount(source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags),
                      data.encode() or None), f"mount of {target.removeprefix(_NEW) or '/'}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
