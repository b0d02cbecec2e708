"""Check of the embedded registry's file: it must be private, on a local file system (OWNERSHIP 11)."""

from __future__ import annotations

import ctypes
import os
import stat
from pathlib import Path

from rgpu.session.errors import PoolUnavailable, Refused

#: statfs(2) f_type of file systems whose locks or caches may be shared with other hosts. FUSE is among
#: them because it may be a network file system (sshfs, gcsfuse and the like).
NETWORK_FILE_SYSTEMS: dict[int, str] = {
    0x6969: "NFS", 0x517B: "SMB", 0xFF534D42: "CIFS", 0xFE534D42: "SMB2", 0x00C36400: "CephFS",
    0x65735546: "FUSE", 0x01021997: "9p", 0x5346414F: "AFS", 0x6B414653: "kAFS", 0x73757245: "Coda",
    0x0BD00BD0: "Lustre", 0x01161970: "GFS2", 0x7461636F: "OCFS2", 0x47504653: "GPFS", 0x564C: "NCP",
    0x19830326: "BeeGFS", 0x6E667364: "NFSD",
}


class _Statfs(ctypes.Structure):
    """The fields of 64-bit Linux's struct statfs that are read."""

    _fields_ = [("f_type", ctypes.c_long), ("rest", ctypes.c_long * 32)]


def file_system_type(path: Path) -> int:
    """Return the f_type of the file system that holds ``path``. Raises :class:`OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    result = _Statfs()
    if libc.statfs(os.fsencode(path), ctypes.byref(result)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    return int(result.f_type) & 0xFFFFFFFF


def prepare(path: Path) -> None:
    """Check the place and make the file with mode 0600 if it is new.

    Raises :class:`Refused` for a network file system or a file that others may open,
    :class:`PoolUnavailable` when the folder does not exist or cannot be written.
    """
    try:
        kind = NETWORK_FILE_SYSTEMS.get(file_system_type(path.parent))
        if kind is not None:
            raise Refused(f"{path} lies on {kind}: the embedded registry serves one host and needs a local file "
                          "system; put the pool's folder on one", path=str(path), file_system=kind)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise PoolUnavailable(f"the registry at {path} cannot be opened: {error.strerror}", path=str(path)) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise Refused(f"{path} must be a file of this user with mode 0600 (it has "
                          f"{stat.S_IMODE(status.st_mode):04o}): who can write it owns every session", path=str(path))
    finally:
        os.close(fd)
