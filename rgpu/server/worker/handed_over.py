"""Connections that the node daemon accepted and hands over to its worker."""

from __future__ import annotations

import os
import socket

from rgpu.link.data.frames import Handover, SealedConnection
from rgpu.session.errors import LinkError


def adopt(fds: list[int], handover: bytes) -> SealedConnection:
    """Return the sealed connection that the daemon hands over. Raises :class:`LinkError` without exactly one socket."""
    return Handover.unpack(handover).connection(socket.socket(fileno=single(fds, "an attachment")))


def single(fds: list[int], what: str) -> int:
    """Return the one descriptor of a request. Raises :class:`LinkError` for another number of descriptors."""
    return exactly(1, fds, what)[0]


def exactly(number: int, fds: list[int], what: str) -> list[int]:
    """Return the ``number`` descriptors of a request. Raises :class:`LinkError` for another number, and closes them."""
    if len(fds) != number:
        for fd in fds:
            os.close(fd)
        raise LinkError(f"{len(fds)} descriptors came with {what} instead of {number}")
    return fds
