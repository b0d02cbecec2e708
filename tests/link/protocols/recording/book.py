"""What recordings are made with: sealed connections, and the book of what was seen, the same in every run."""

from __future__ import annotations

import hashlib
import socket
import threading
from typing import Any

import msgspec

from rgpu.link.data.frames import Handover, SealedConnection
from rgpu.link.messages import data as to_data

SHOWN = 256  #: bytes of a long body that are kept; of the rest there is a digest
#: Keys of maps whose values differ from run to run.
CHANGING = {"boot", "near", "far", "path", "token", "versions", "worker", "ms", "phases_ms", "import_ms", "pull_ms",
            "hash_ms", "key"}


def shown(body: bytes) -> str:
    """Hexadecimal; a long body is its beginning, its length and a digest."""
    return body.hex() if len(body) <= SHOWN \
        else f"{body[:SHOWN].hex()}… {len(body)} {hashlib.sha256(body).hexdigest()}"


def settled(body: bytes) -> bytes:
    """A map of msgpack with its keys in their order and its changing values as those of one type."""
    def settle(value: Any, key: str = "") -> Any:
        if key in CHANGING:
            return type(value)()
        if isinstance(value, dict):
            return {name: settle(held, name) for name, held in value.items()}
        return value
    return msgspec.msgpack.encode(settle(msgspec.msgpack.decode(body)))


class Book:
    """What was seen on one link: the bodies of each type, each once, sorted."""

    def __init__(self) -> None:
        self._seen: dict[int, set[str]] = {}
        self._lock = threading.Lock()

    def note(self, kind: int, body: bytes, changing: bool = False) -> None:
        with self._lock:
            self._seen.setdefault(kind, set()).add(shown(settled(body) if changing else body))

    def told(self) -> dict[str, list[str]]:
        return {str(kind): sorted(bodies) for kind, bodies in sorted(self._seen.items())}


def pair(session: str = "s", epoch: int = 1, purpose: str = "calls") -> tuple[SealedConnection, SealedConnection]:
    """The two ends of a connection, the client's first."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    keys = bytes(32), bytes(range(32))
    return (Handover(keys[0], keys[1], to_data.TO_NODE, session, epoch, purpose).connection(near),
            Handover(keys[1], keys[0], to_data.FROM_NODE, session, epoch, purpose).connection(far))
