"""Framing for both ends of the control link: one message is one frame of msgpack (docs/protocols/control.md)."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

MESSAGE_LIMIT = 16 * 1024 * 1024  #: bytes of an answer; a client disconnects from a node that sends more

encode = msgspec.msgpack.Encoder().encode


def heartbeat(socket: Any) -> None:
    """Enable ZMTP heartbeats: a peer whose host disappeared is detected within 15 s, idle or not."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10000)
    socket.setsockopt(zmq.HEARTBEAT_TTL, 15000)
