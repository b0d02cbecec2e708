"""Writers and the collector of garbage, without a lock and without trusting a clock.

``intents/ID``     a writer at work: the packs of others that it refers to. Its own
                   packs begin with its ID. Put before the first pack.
``condemned/PACK`` a pack that nothing names any more. Put before it is removed.

A writer that wants to refer to a stored pack puts its intent and *then* looks
for a condemnation; the collector puts the condemnation and *then* looks at the
intents. One of them sees the other: the writer stores the chunks again, or the
collector lets the pack live.

``ended/ID``       a writer taken for dead, because its intent is old by the store's
                   own clock. Should the clock have jumped, or the writer have slept:
                   the writer puts its manifest and *then* looks whether it was
                   ended, and takes the manifest back if so; the collector ends it
                   and *then* reads the manifests, before it removes packs. So a
                   wrong clock costs one checkpoint, never a checkpoint that counts.
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
STALE_SECONDS = 3600.0  #: an intent that was not put again for so long is a dead writer's
FORGET_SECONDS = 30 * 86400.0  #: the mark of an ended writer goes after so long
_LIMIT = 16 << 20


class Intent(msgspec.Struct, kw_only=True):
    """``packs``: names of others' packs. ``who``: for people."""

    v: int = 1
    id: str
    image: str
    packs: list[str] = []
    who: str = ""
    beat: int = 0


def decode(data: bytes, where: str) -> Intent:
    """Raises :class:`Corrupt`."""
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
        """Announce that these packs of others are needed; returns those that must not be referred to: they are
        condemned.
        """
        self.intent.packs = sorted({*self.intent.packs, *packs})
        self._put()
        start = len(self._prefix + CONDEMNED)
        condemned = {found.name[start:] for found in self._blobs.ls(self._prefix + CONDEMNED)}
        return condemned & set(packs)

    def beat(self) -> None:
        """Put it again if it is time: the writer lives. Raises :class:`Fenced` if it was taken for dead."""
        if time.monotonic() - self._beaten >= BEAT_SECONDS:
            self.check()
            self._put()

    def check(self) -> None:
        """Raises :class:`Fenced` if the collector took this writer for dead: its packs may be gone."""
        if self._blobs.size(f"{self._prefix}{ENDED}{self.intent.id}") is not None:
            raise Fenced(f"checkpoint {self.intent.image} took too long: its writer was taken for dead; take it again",
                         image=self.intent.image)

    def end(self) -> None:
        """Remove the intent: nothing of others is referred to any more."""
        self._blobs.delete(self._name)

    def _put(self) -> None:
        self.intent.beat += 1
        self._blobs.put(self._name, msgspec.msgpack.encode(self.intent))
        self._beaten = time.monotonic()


def read_all(blobs: Blobs, prefix: str, names: list[str]) -> list[Intent]:
    """The intents of these names that are still there. Raises :class:`Corrupt`."""
    found = []
    for name in names:
        try:
            found.append(decode(blobs.read(name, _LIMIT), blobs.where(name)))
        except StoreMissing:
            continue  # its writer has just finished
    return found
