"""Cuts the TCP connections of another process: a copy of its socket is shut down, as if its link had broken.

Needs pidfd_getfd (Linux 5.6) and the right to trace the process, which one has over one's own children and as root.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

PIDFD_GETFD = 438  #: the same number on every architecture
ESTABLISHED = "01"
_SOCKET = re.compile(r"socket:\[(\d+)\]")


def cut(pid: int) -> int:
    """Cut all TCP connections that it has; how many. Raises :class:`OSError`."""
    wanted = _established(pid)
    count = 0
    process = os.pidfd_open(pid)
    try:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if (found := _SOCKET.match(os.readlink(path))) and found[1] in wanted:
                    with contextlib.suppress(OSError), _copy(process, int(path.name)) as copy:
                        copy.shutdown(socket.SHUT_RDWR)
                        count += 1
    finally:
        os.close(process)
    return count


def _established(pid: int) -> set[str]:
    """Inodes of the connections in the process's network."""
    found = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == ESTABLISHED:
                    found.add(words[9])
    return found


def _copy(process: int, descriptor: int) -> socket.socket:
    libc = ctypes.CDLL(None, use_errno=True)
    copied = libc.syscall(PIDFD_GETFD, process, descriptor, 0)
    if copied < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return socket.socket(fileno=copied)


@functools.cache
def unavailable() -> str:
    """Why connections cannot be cut here; empty when they can. Tried on a process of our own."""
    child = subprocess.Popen([sys.executable, "-c", "import socket, sys\na, b = socket.socketpair()\n"
                              "print(a.fileno(), flush=True)\nsys.exit(len(a.recv(1)))"],
                             stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        number, process = int(child.stdout.readline()), os.pidfd_open(child.pid)
        try:
            with _copy(process, number) as copy:
                copy.shutdown(socket.SHUT_RDWR)
        finally:
            os.close(process)
        child.wait(5)
    except (OSError, AttributeError, subprocess.TimeoutExpired) as error:
        return f"pidfd_getfd: {error}"
    finally:
        child.kill()
        child.wait()
    return ""
