"""Files that a worker may reach (landlock(7)): everything below the places that are named, and nothing else.

Needs no right, from Linux 5.13 on. Newer kernels keep more out: TCP (6.7), abstract Unix sockets and signals to
processes outside (6.12). A confined process can trace nothing outside either.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterable

_CREATE, _ADD, _RESTRICT = 444, 445, 446  #: system calls
_VERSION, _BENEATH = 1, 1
EXECUTE, WRITE, READ, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_CHANGES = 0x1FF0  #: removing and making entries of each kind
_CHAR, _BLOCK = 1 << 6, 1 << 11  #: making devices
_REFER, _TRUNCATE, _IOCTL = 1 << 13, 1 << 14, 1 << 15
_NETWORK, _SCOPES = 0b11, 0b11
_OF_FILES = EXECUTE | WRITE | READ | _TRUNCATE  #: the only rights that a rule about a file may have
RIGHTS = {"d": READ_DIR, "r": READ | READ_DIR, "rx": READ | READ_DIR | EXECUTE,
          "rw": READ | READ_DIR | WRITE | (_CHANGES & ~_CHAR & ~_BLOCK) | _REFER | _TRUNCATE}
#: What each version of the kernel's interface knows beside the one before.
_FILES_BY_VERSION = {1: 0x1FFF, 2: _REFER, 3: _TRUNCATE}


def version() -> int:
    """Return that of the kernel's interface; 0 where there is none, or it is switched off."""
    found = int(ctypes.CDLL(None, use_errno=True).syscall(_CREATE, None, ctypes.c_size_t(0), _VERSION))
    return max(0, found)


def restrict(places: Iterable[tuple[str, str]], *, sockets: bool = True) -> int:
    """Confine this process, and what it starts, to ``places``: (path, "d" | "r" | "rx" | "rw"); absent ones are none.

    ``sockets``: abstract Unix sockets and TCP of others are kept out, too, where the kernel can. To be called before
    there is a second thread, after no_new_privs. Returns the interface's version. Raises OSError.
    """
    libc, known = ctypes.CDLL(None, use_errno=True), version()
    if not known:
        raise OSError(errno.EOPNOTSUPP, "the kernel has no Landlock")
    handled = 0
    for since, added in _FILES_BY_VERSION.items():
        handled |= added if known >= since else 0
    network = _NETWORK if sockets and known >= 4 else 0
    scopes = _SCOPES if sockets and known >= 6 else 0
    attributes = struct.pack("=QQQ", handled, network, scopes)[:8 if known < 4 else 16 if known < 6 else 24]
    ruleset = libc.syscall(_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        _fail("no Landlock ruleset")
    try:
        for path, rights in places:
            _allow(libc, ruleset, path, RIGHTS[rights] & handled)
        if libc.syscall(_RESTRICT, ruleset, 0) != 0:
            _fail("Landlock")
    finally:
        os.close(ruleset)
    return known


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _OF_FILES
        if libc.syscall(_ADD, ruleset, _BENEATH, struct.pack("=Qi", rights, descriptor), 0) != 0:
            _fail(f"Landlock rule of {path}")
    finally:
        os.close(descriptor)


def _fail(what: str) -> None:
    number = ctypes.get_errno()
    raise OSError(number, f"{what}: {errno.errorcode.get(number, number)}")
