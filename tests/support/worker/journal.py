"""Records of a session, and what is answered to them."""

from __future__ import annotations

from typing import Any

from rgpu.session.addresses import DEVICE_BASE, GRANULE
from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_NAME
from rgpu.session.journal.record import Record


class Journal:
    """Records with growing positions, as the shim would publish them."""

    def __init__(self) -> None:
        self.seq = 0

    def __call__(self, name: str, payload: bytes = b"", **args: Any) -> Record:
        self.seq += 1
        return Record(self.seq, BY_NAME[name].id, decoders.encode_args(name, **args), payload)


def opened(journal: Journal) -> list[Record]:
    return [journal("session_open", version=1, pid=1, environment=b""),
            journal("context_create", context=16, device=0, flags=0, primary=1),
            journal("memory_map", address=DEVICE_BASE, size=GRANULE, device=0),
            journal("memory_allocate", address=DEVICE_BASE, size=4096)]


class Answers(dict):
    def __call__(self, seq: int, result: int, reply: bytes, payload: bytes) -> None:
        self[seq] = (result, bytes(payload))
