"""Garbage collection: removes what no checkpoint and no writer needs, while others write.

:mod:`.intents` explains why that is safe. A pack is removed only when, in this
order, it was listed; no living intent is its writer's or refers to it; no
manifest names it; its condemnation was put, and is as old as the grace; and
intents and manifests, read again, still do not need it. While any manifest or
intent of the namespace cannot be read, no pack is removed: it might be needed by that one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from rgpu.checkpoint.blobs import base as places
from rgpu.checkpoint.blobs.base import Blobs, DirectoryBlobs, Found
from rgpu.checkpoint.blobs.files import TEMPORARY
from rgpu.checkpoint.manifest.manifest import Summary
from rgpu.checkpoint.manifest.packs import pack_blob
from rgpu.checkpoint.store.intents import CONDEMNED, ENDED, FORGET_SECONDS, ID_DIGITS, INTENTS, STALE_SECONDS, read_all
from rgpu.session.errors import Corrupt, RgpuError

log = structlog.get_logger(__name__)

GRACE = 900.0  #: s for which a condemned pack stays for readers that began before


class Namespace(Protocol):
    """Interface of a namespace that is collected (:class:`rgpu.checkpoint.store.checkpoint_store.CheckpointStore`)."""

    blobs: Blobs
    prefix: str

    def summaries(self) -> Iterator[tuple[str, int, float, Summary | RgpuError]]:
        """Yield (name, manifest's bytes, when written, summary or why it cannot be read) of every checkpoint."""


@dataclass
class Collected:
    """Result of a collection. ``blocked``: reasons for which no pack was removed."""

    removed: list[str] = field(default_factory=list)
    condemned: list[str] = field(default_factory=list)  #: packs that wait for the end of their grace
    freed: int = 0  #: bytes
    intents_ended: int = 0
    blocked: list[str] = field(default_factory=list)


class _Blocked(Exception):
    """A manifest or intent that may need packs cannot be read."""


def collect(store: Namespace, *, grace: float = GRACE, dry_run: bool = False) -> Collected:
    """Collect a namespace; see the module docstring. ``grace``: s. ``dry_run``: remove nothing.

    Raises :class:`StoreError`.
    """
    result = Collected()
    if not isinstance(store.blobs, DirectoryBlobs) or store.prefix:
        _collect(store, grace, dry_run, result)
        return result
    with store.blobs.undisturbed() as alone:
        if alone:
            _collect(store, grace, dry_run, result)
        else:
            result.blocked.append("a writer of an earlier version is at work")
    return result


def _collect(store: Namespace, grace: float, dry_run: bool, result: Collected) -> None:
    blobs, prefix = store.blobs, store.prefix
    now = places.now(blobs, prefix + CONDEMNED)
    packs = {_pack_name(found.name): found for found in blobs.ls(prefix + "packs/")}
    leftovers = blobs.leftovers(prefix)
    if not dry_run:
        result.intents_ended = _end_dead_writers(store, now)
    try:
        needed, living = _needed(store)
        garbage = {name: found for name, found in packs.items()
                   if name not in needed and name[:ID_DIGITS] not in living}
        _remove_leftovers(store, leftovers, living, now, dry_run, result)
        marks = {found.name[len(prefix + CONDEMNED):]: found for found in blobs.ls(prefix + CONDEMNED)}
        if dry_run:
            result.condemned = sorted(garbage)
            result.freed += sum(found.size for found in garbage.values())
            return
        for name in garbage.keys() - marks.keys():
            blobs.put(f"{prefix}{CONDEMNED}{name}", b"")
        ripe = {name for name in garbage if grace <= 0 or (name in marks and now - marks[name].modified >= grace)}
        needed, living = _needed(store)  # again: a writer since then has read the condemnations, or its intent is read
        for name in marks.keys() | garbage.keys():
            wanted = name in needed or name[:ID_DIGITS] in living
            if not wanted and name in ripe:
                blobs.delete(pack_blob(prefix, name))
                result.removed.append(name)
                result.freed += packs[name].size
            if wanted or name in ripe or name not in packs:
                blobs.delete(f"{prefix}{CONDEMNED}{name}")
            else:
                result.condemned.append(name)
    except _Blocked as error:
        result.blocked.append(str(error))
        log.warning("no pack is removed", store=blobs.where(prefix), reason=str(error))


def _needed(store: Namespace) -> tuple[set[str], set[str]]:
    """Return (packs that intents and manifests name, IDs of living writers).

    Intents are read first, since a writer removes its own last.
    """
    blobs, prefix = store.blobs, store.prefix
    try:
        intents = read_all(blobs, prefix, [found.name for found in blobs.ls(prefix + INTENTS)])
    except Corrupt as error:
        raise _Blocked(error.message) from error
    over = {found.name[len(prefix + ENDED):] for found in blobs.ls(prefix + ENDED)}
    intents = [intent for intent in intents if intent.id not in over]
    needed = {name for intent in intents for name in intent.packs}
    for _, _, _, about in store.summaries():
        if isinstance(about, RgpuError):
            raise _Blocked(about.message)
        needed.update(pack.name for pack in about.packs)
    return needed, {intent.id for intent in intents}


def _end_dead_writers(store: Namespace, now: float) -> int:
    """End dead writers before anything is read: a writer that is ended here detects it before its checkpoint counts."""
    blobs, prefix, ended = store.blobs, store.prefix, 0
    for found in blobs.ls(prefix + INTENTS):
        if now - found.modified > STALE_SECONDS:
            log.warning("a writer is taken for dead", intent=found.name, silent_s=round(now - found.modified))
            blobs.put(f"{prefix}{ENDED}{found.name[len(prefix + INTENTS):]}", b"")
            blobs.delete(found.name)
            ended += 1
    for found in blobs.ls(prefix + ENDED):
        if now - found.modified > FORGET_SECONDS:
            blobs.delete(found.name)
    return ended


def _remove_leftovers(store: Namespace, leftovers: list[Found], living: set[str], now: float, dry_run: bool,
                      result: Collected) -> None:
    """Remove unfinished files of dead writers: packs by their writer's ID, others by age."""
    start = len(store.prefix + "packs/")
    for found in leftovers:
        of_a_pack = found.name.startswith(store.prefix + "packs/")
        owner = found.name[start:start + ID_DIGITS]
        dead = owner not in living if of_a_pack else now - found.modified > STALE_SECONDS
        if dead and found.name.endswith(TEMPORARY):
            if not dry_run:
                store.blobs.delete(found.name)
            result.freed += found.size


def _pack_name(blob: str) -> str:
    return blob.rsplit("/", 1)[-1].removesuffix(".pack")
