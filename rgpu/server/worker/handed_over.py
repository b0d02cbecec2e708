"""Connections that the node daemon accepted and hands over to its worker."""

from __future__ import annotations

import os
import socket

from rgpu.link.data.frames import Handover, SealedConnection
from rgpu.session.errors import LinkError


def adopt(fds: list[int], handover: bytes) -> SealedConnection:
    """The sealed connection that the daemon hands over. Raises :class:`LinkError` without exactly one socket."""
    if len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise LinkError(f"{len(fds)} descriptors came with an attachment instead of one")
    return Handover.unpack(handover).connection(socket.socket(fileno=fds[0]))
