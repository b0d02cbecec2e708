"""The Unix socket that a program's shim connects to."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from rgpu.session.errors import LinkError


def listen(directory: Path) -> tuple[socket.socket, Path]:
    """Return the agent's socket in ``directory``, which must be private, and its path. Raises :class:`LinkError`."""
    path = directory / "agent.sock"
    if len(os.fsencode(path)) > 107:
        raise LinkError(f"{path} is too long for a Unix socket: set TMPDIR to a shorter directory")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    old = os.umask(0o177)
    try:
        sock.bind(str(path))
    finally:
        os.umask(old)
    sock.listen(64)
    return sock, path
