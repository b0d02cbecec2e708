"""Intents: coordination of writers and the garbage collector, without a lock and without trusting a clock.

``intents/ID``     a writer at work: the packs of others that it refers to. The names
                   of its own packs begin with its ID. Put before the first pack.
``condemned/PACK`` a pack that nothing names any more. Put before it is removed.

To refer to a stored pack, a writer puts its intent and *then* reads the
condemnations; the collector puts a condemnation and *then* reads the intents. So
at least one of them detects the other: the writer stores the chunks again, or
the collector keeps the pack.

``ended/ID``       a writer regarded as dead, because its intent is old by the store's
                   own clock. In case the clock has jumped, or the writer was suspended,
                   the writer puts its manifest and *then* checks whether it was
                   ended, and removes the manifest if so; the collector ends it
                   and *then* reads the manifests, before it removes packs. So a
                   wrong clock costs one new checkpoint, never a checkpoint that counts.
"""

from __future__ import annotations

import os
import secrets
import socket
import time

import msgspec

from rgpu.checkpoint.blobs.base import Blobs
from rgpu.session.errors import Corrupt, Fenced, StoreMissing

INTENTS, CONDEMNED, ENDED = "intents/", "condemned/", "ended/"
ID_DIGITS = 16
BEAT_SECONDS = 60.0  #: a writer's intent is put again this often
STALE_SECONDS = 3600.0  #: a writer whose intent was not put again for so long is regarded as dead
FORGET_SECONDS = 30 * 86400.0  #: the mark of an ended writer is removed after so long
_LIMIT = 16 << 20


class Intent(msgspec.Struct, kw_only=True):
    """A writer's intent. ``packs``: names of others' packs; ``who``: host and PID, for people."""

    v: int = 1
    id: str
    image: str
    packs: list[str] = []
    who: str = ""
    beat: int = 0


def decode(data: bytes, where: str) -> Intent:
    """Decode an intent. ``where``: its place, for messages. Raises :class:`Corrupt`."""
    try:
        return msgspec.msgpack.decode(data, type=Intent)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Corrupt(f"{where} is no intent: {error}", offset=0, reason="msgpack") from error


class Announced:
    """This writer's own intent. Not thread-safe."""

    def __init__(self, blobs: Blobs, prefix: str, checkpoint: str) -> None:
        self._blobs, self._prefix = blobs, prefix
        self.intent = Intent(id=secrets.token_hex(ID_DIGITS // 2), image=checkpoint,
                             who=f"{socket.gethostname()}:{os.getpid()}")
        self._name = f"{prefix}{INTENTS}{self.intent.id}"
        self._beaten = 0.0

    def refer(self, packs: list[str]) -> set[str]:
        """Announce that these packs of others are needed; returns the condemned ones, which must not be referred to."""
        self.intent.packs = sorted({*self.intent.packs, *packs})
        self._put()
        start = len(self._prefix + CONDEMNED)
        condemned = {found.name[start:] for found in self._blobs.ls(self._prefix + CONDEMNED)}
        return condemned & set(packs)

    def beat(self) -> None:
        """Put the intent again if BEAT_SECONDS have passed. Raises :class:`Fenced` if the writer was ended as dead."""
        if time.monotonic() - self._beaten >= BEAT_SECONDS:
            self.check()
            self._put()

    def check(self) -> None:
        """Raise :class:`Fenced` if the collector ended this writer as dead: its packs may have been removed."""
        if self._blobs.size(f"{self._prefix}{ENDED}{self.intent.id}") is not None:
            raise Fenced(f"checkpoint {self.intent.image} took too long: its writer was taken for dead; take it again",
                         image=self.intent.image)

    def end(self) -> None:
        """Remove the intent: the writer refers to no packs of others any more."""
        self._blobs.delete(self._name)

    def _put(self) -> None:
        self.intent.beat += 1
        self._blobs.put(self._name, msgspec.msgpack.encode(self.intent))
        self._beaten = time.monotonic()


def read_all(blobs: Blobs, prefix: str, names: list[str]) -> list[Intent]:
    """Read the intents of these names that still exist. Raises :class:`Corrupt`."""
    found = []
    for name in names:
        try:
            found.append(decode(blobs.read(name, _LIMIT), blobs.where(name)))
        except StoreMissing:
            continue  # its writer has just finished
    return found
