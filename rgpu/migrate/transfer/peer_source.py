"""The source's side of pages that are pulled out of its memory: which may be pulled, and when.

The messages are in :mod:`.peer_plan`. A round hashes the pages at the source,
compares them with the hashes that the destination reported, grants the
memory behind regions that the destination was not granted yet, and has the differing
runs pulled. Regions that were never pulled are pulled whole, without hashing them at the source.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import structlog

from rgpu.checkpoint.device import PAGE, Device, Region
from rgpu.checkpoint.pages.pages import PageTable, hash_present
from rgpu.checkpoint.peer import PeerMemory
from rgpu.checkpoint.phases import Phases
from rgpu.link.data.frames import SealedConnection
from rgpu.link.messages.pages import (
    FAILED,
    GRANT,
    GRANTED,
    HASHES,
    PULL,
    PULLED,
    RUN_LAYOUT,
    Answer,
    Ask,
    Grant,
    Granted,
    Pulled,
)
from rgpu.migrate.transfer import peer_plan as plan
from rgpu.migrate.transfer.peer_link import Giver, boot_id, close_all, ends
from rgpu.session.errors import DeviceError, LinkError, TimedOut, from_dict

log = structlog.get_logger(__name__)

PIECE = 8 << 30  #: bytes of one PULL
SHARED_PIECE = 8 << 20  #: the same where pages are copied by processors that the program needs
STALL = 30.0  #: seconds that one PULL or GRANT may take

Array = np.ndarray[Any, Any]


class NoPeer(Exception):
    """Pages cannot be pulled, or no longer; completed rounds stay valid. The move continues over the connection."""


def ask(connection: SealedConnection, device: Device) -> Ask | None:
    """Return the offer for BEGIN; None: this device's memory cannot be exported."""
    memory: PeerMemory | None = getattr(device, "peer", None)
    boot = boot_id()
    if memory is None or not boot:
        return None
    return Ask(boot, memory.kind, *ends(connection.sock))


class PeerSource:
    """The source's side of the pulls of one move, for the destination's ``answer``. Raises :class:`NoPeer`."""

    def __init__(self, connection: SealedConnection, device: Device, answer: Answer, *,
                 fault: Callable[[str], object] = lambda point: None) -> None:
        if answer.why or not answer.path:
            raise NoPeer(answer.why or "the destination cannot pull pages")
        self.connection = connection
        self.fault = fault
        self._memory: PeerMemory = device.peer  # type: ignore[attr-defined]
        self._piece = SHARED_PIECE if getattr(device, "shares_processors", False) else PIECE
        self._granted: dict[tuple[int, int], int] = {}  #: (address, size) → serial
        self._pulled: set[tuple[int, int]] = set()  #: regions for which the table holds the other side's hashes
        #: After a round with the session paused: (address, size) of regions whose hashes the other side can derive from
        #: those that it reported and from these: (indices of pages, their hashes now).
        self.known: dict[tuple[int, int], tuple[Array, Array]] = {}
        self.pace: Callable[[float], None] = lambda busy: None
        self.count: Callable[[int, int], None] = lambda pages, size: None
        self.rounds: list[dict[str, float]] = []  #: times and sizes of each round
        try:
            self._giver = Giver(answer.path, answer.token)
        except LinkError as error:
            raise NoPeer(error.message) from error

    def close(self) -> None:
        """Close the socket over which descriptors are handed over."""
        self._giver.close()

    def forget_told(self) -> None:
        """Forget the other side's hashes, because its pages change otherwise than by pulls."""
        self._pulled.clear()
        self.known = {}

    def round(self, view: Device, regions: Sequence[Region], table: PageTable, *, still: bool) -> None:
        """Have every mapped page pulled that differs from the other side's, by the hashes in ``table``.

        ``view``: the device, or a view of it at this moment; ``still``: the session is paused, so pulled pages have
        the hashes that ``view`` reports. Raises :class:`NoPeer`, :class:`LinkError`, :class:`DeviceError`, and the
        error that the destination reports.
        """
        phases = Phases()
        mapped = {_identity(region): region for region in regions if region.kind == "mapped" and not region.size % PAGE}
        self._granted = {identity: serial for identity, serial in self._granted.items() if identity in mapped}
        self._pulled &= mapped.keys()
        fresh = [] if still else [region for identity, region in mapped.items() if identity not in self._pulled]
        known = [region for identity, region in mapped.items() if still or identity in self._pulled]
        with phases.phase("hash_ms"):
            hashed = list(hash_present(view, known, table.key)) if known else []
        with phases.phase("compare_ms"):
            found = [(region, now.hashes, table.dirty(region, now.hashes)) for region, now in hashed]
            wanted = [(region, plan.whole(region)) for region in fresh]
            wanted += [(region, plan.runs_of(region, changed)) for region, _, changed in found if len(changed)]
        self._grant([region for region, _ in wanted], phases)
        runs = self._still_granted(np.concatenate([np.zeros(0, RUN_LAYOUT), *(runs for _, runs in wanted)]))
        for piece in plan.pieces(runs, self._piece):
            self._pull(piece, table, phases, tell=not still)
        self.known = {}
        if still:
            room = plan.MOST_KNOWN
            for region, hashes, changed in found:
                if _identity(region) in self._pulled and len(changed) <= min(room, len(hashes) // plan.FEW):
                    self.known[_identity(region)] = changed, hashes[changed]
                    room -= len(changed)
                table.assume(region, hashes)
        self._pulled |= self._granted.keys() & {_identity(region) for region in fresh}
        self._note(runs, phases)

    def _note(self, runs: Array, phases: Phases) -> None:
        found = phases.ms()
        size = int(runs["bytes"].sum())
        took = found.get("pull_ms", 0.0)
        found |= {"bytes": size, "runs": len(runs), "gb_per_s": round(size / took / 1e6, 3) if took else 0.0}
        self.rounds.append(found)
        log.info("pages pulled by the destination", **found)

    # -- granting -------------------------------------------------------------------------
    def _grant(self, regions: Sequence[Region], phases: Phases) -> None:
        """Have the destination import the memory behind these regions, where it has not done so yet."""
        missing = [region for region in regions
                   if self._memory.serial(*_identity(region)) != self._granted.get(_identity(region), 0)]
        for at in range(0, len(missing), plan.MOST_GRANTED):
            rows: list[tuple[int, int, int]] = []
            fds: list[int] = []
            try:
                with phases.phase("export_ms"):
                    for region in missing[at:at + plan.MOST_GRANTED]:
                        self._export(region, rows, fds)
                if rows:
                    self.fault("peer.grant")
                    with phases.phase("grant_ms"):
                        self._hand_over(rows, fds, phases)
            finally:
                close_all(fds)
            self._granted.update({(address, size): serial for address, size, serial in rows})

    def _export(self, region: Region, rows: list[tuple[int, int, int]], fds: list[int]) -> None:
        before = self._memory.serial(region.address, region.size)
        try:
            serial, fd = self._memory.export(region.address, region.size)
        except DeviceError as error:
            if before is None or self._memory.serial(region.address, region.size) != before:
                return  # the program has just unmapped it: the next round reads the regions again
            raise NoPeer(f"memory cannot be exported: {error.message}") from error
        rows.append((region.address, region.size, serial))
        fds.append(fd)

    def _hand_over(self, rows: list[tuple[int, int, int]], fds: list[int], phases: Phases) -> None:
        self.connection.send(GRANT, plan.encode(Grant(rows)))
        try:
            self._giver.send(fds)
        except LinkError as error:
            answer = plan.decode(self._receive(GRANTED), Granted)
            raise NoPeer(f"{error.message} ({answer.why or 'and the destination has them'})") from error
        answer = plan.decode(self._receive(GRANTED), Granted)
        phases.add("import_ms", answer.import_ms / 1000)
        if answer.why:
            raise NoPeer(answer.why)

    def _still_granted(self, runs: Array) -> Array:
        """Return the runs without those of regions that were unmapped before they could be granted."""
        spans = sorted(self._granted)
        starts = np.array([address for address, _ in spans], np.uint64)
        stops = np.array([address + size for address, size in spans], np.uint64)
        if not len(spans) or not len(runs):
            return runs[:0]
        index = np.searchsorted(starts, runs["address"], "right").astype(np.int64) - 1
        return runs[(index >= 0) & (runs["address"] < stops[np.maximum(index, 0)])]

    # -- pulling --------------------------------------------------------------------------
    def _pull(self, runs: Array, table: PageTable, phases: Phases, *, tell: bool) -> None:
        began = time.monotonic()
        self.fault("peer.pull")
        pages = plan.pages_of(runs)
        self.connection.send(PULL, plan.pull(runs, tell))
        try:
            hashes = self._hashes(pages, phases) if tell else None
            answer = plan.decode(self._receive(PULLED), Pulled)
        except _Failed as failed:
            answer, hashes = failed.answer, None
        phases.add("pull_ms", answer.pull_ms / 1000)
        phases.add("dest_hash_ms", answer.hash_ms / 1000)
        if tell or answer.why:
            at = 0
            for address, size in runs.tolist():
                count = size // PAGE
                table.learn(address, None if hashes is None else hashes[at:at + count], count)
                at += count
        if answer.why:
            raise NoPeer(answer.why)
        self.count(pages, pages * PAGE)
        busy = time.monotonic() - began
        phases.add("pulls_ms", busy)
        self.pace(busy)

    def _hashes(self, pages: int, phases: Phases) -> Array:
        found: list[Array] = []
        left, last = pages, False
        while not last:
            kind, body = self._next()
            if kind == PULLED:
                raise _Failed(plan.decode(body, Pulled))
            if kind != HASHES:
                raise LinkError(f"message type {kind} where page hashes were due", reason="protocol")
            last, some = plan.read_hashes(body, left)
            found.append(some.copy())
            left -= len(some)
        return np.concatenate(found)

    def _receive(self, wanted: int) -> Any:
        kind, body = self._next()
        if kind != wanted:
            raise LinkError(f"message type {kind} where {wanted} was due", reason="protocol")
        return body

    def _next(self) -> tuple[int, Any]:
        limit = self.connection.sock.gettimeout()
        try:
            kind, body = self.connection.recv(STALL if limit is None else limit)
        except TimedOut as error:
            raise LinkError(f"the destination did not answer: {error.message}", reason="stalled") from error
        if kind == FAILED:
            raise from_dict(plan.decode(body, dict[str, Any]))
        return kind, body


class _Failed(Exception):
    """A PULL that failed before its hashes arrived."""

    def __init__(self, answer: Pulled) -> None:
        super().__init__(answer.why)
        self.answer = answer


def _identity(region: Region) -> tuple[int, int]:
    return region.address, region.size
