"""The destination's side of pages that it pulls out of the source's memory. Messages: :mod:`.peer_plan`.

Messages of the source are not trusted: a run must lie inside one granted
region that this side has mapped too, and received pages are hashed here, in this
device's own memory.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from msgspec import structs

from rgpu.checkpoint.device import Device, Region
from rgpu.checkpoint.manifest.state import SessionState
from rgpu.checkpoint.peer import Imported, PeerMemory
from rgpu.link.data.frames import SealedConnection
from rgpu.link.messages.pages import HASHES, PULLED, Answer, Ask, Grant, Granted, Pulled
from rgpu.migrate.transfer import peer_plan as plan
from rgpu.migrate.transfer.peer_link import Listener, boot_id, close_all, ends
from rgpu.session.addresses import PAGE
from rgpu.session.errors import Corrupt, DeviceError, LinkError, RecoveryFailed

log = structlog.get_logger(__name__)

Array = np.ndarray[Any, Any]


class PeerTarget:
    """The destination's side of the pulls of one move, for the receiving thread; :meth:`close` is for any thread."""

    def __init__(self, connection: SealedConnection, device: Device, folder: Path | None,
                 fault: Callable[[str], object] = lambda point: None) -> None:
        """Make the side of one move. ``folder``: of this worker alone, to listen in; None: pulling is refused."""
        self.connection = connection
        self.device = device
        self.fault = fault
        self._folder = folder
        self._memory: PeerMemory | None = getattr(device, "peer", None)
        self._listener: Listener | None = None
        self._imports: dict[int, Imported] = {}  #: imported regions by address
        self._starts: list[int] = []  #: the addresses of ``_imports``, sorted
        self._closing = threading.Lock()
        self._told: dict[tuple[int, int], Array] = {}  #: hashes that were reported, by (address, size) of a region
        #: (page numbers, hashes) by which the last ROUND replaced some of ``_told``, by the same keys
        self._known: dict[tuple[int, int], tuple[Array, Array]] = {}

    # -- may pages be pulled --------------------------------------------------------------
    def answer(self, asked: Ask) -> Answer:
        """Return the answer for READY, with the reason where this side cannot pull; pages are then sent instead."""
        why = self._why_not(asked)
        if why:
            return Answer(why)
        assert self._folder is not None
        try:
            if self._listener is None:
                self._listener = Listener(self._folder)
        except OSError as error:
            return Answer(f"the destination cannot listen in its folder: {error}")
        return Answer(path=str(self._listener.path), token=self._listener.token)

    def _why_not(self, asked: Ask) -> str:
        if self._memory is None or self._folder is None:
            return "the destination's device cannot pull pages"
        if asked.boot != boot_id():
            return "source and destination are different hosts"
        if asked.kind != self._memory.kind:
            return f"the source is a {asked.kind} device, the destination a {self._memory.kind} device"
        near, far = ends(self.connection.sock)
        if (asked.near, asked.far) != (far, near):
            return "the connection between source and destination leads through something else"
        return ""

    # -- granting -------------------------------------------------------------------------
    def grant(self, body: Any) -> Granted:
        """Import the memory behind some regions. Raises :class:`Corrupt`, an injected fault's error."""
        rows = plan.decode(body, Grant).regions
        if self._listener is None or self._memory is None or not 1 <= len(rows) <= plan.MOST_GRANTED:
            raise Corrupt(f"memory of {len(rows)} regions is granted unasked", reason="grant")
        began = time.monotonic()
        self.fault("peer.import")
        try:
            fds = self._listener.receive(len(rows))
        except LinkError as error:
            return Granted(error.message)
        try:
            admitted = self._memory.admit([(address, size, serial, fd)
                                           for (address, size, serial), fd in zip(rows, fds, strict=True)])
        except DeviceError as error:
            return Granted(f"memory cannot be imported: {error.message}")
        finally:
            close_all(fds)
        self._dismiss([one.address for one in admitted])
        self._imports |= {one.address: one for one in admitted}
        self._starts = sorted(self._imports)
        return Granted(import_ms=(time.monotonic() - began) * 1000)

    def follow(self, mapped: set[tuple[int, int]]) -> None:
        """Release imports of regions that the source has freed: an import here keeps the memory allocated."""
        self._dismiss([at for at, found in self._imports.items() if (at, found.size) not in mapped])
        self._told = {identity: hashes for identity, hashes in self._told.items() if identity in mapped}

    def _dismiss(self, addresses: list[int]) -> None:
        gone = [self._imports.pop(address) for address in addresses if address in self._imports]
        if gone:
            self._starts = sorted(self._imports)
            assert self._memory is not None
            self._memory.dismiss(gone)

    # -- pulling --------------------------------------------------------------------------
    def pull(self, body: Any, mapped: set[tuple[int, int]], key: bytes) -> None:
        """Carry out a PULL and answer it. Raises :class:`Corrupt`, :class:`LinkError`, an injected fault's error."""
        tell, runs = plan.read_pull(body)
        copies = [self._copy(address, size, mapped) for address, size in runs.tolist()]
        assert self._memory is not None
        answer = Pulled()
        try:
            began = time.monotonic()
            self._memory.pull(copies)
            answer.pull_ms = (time.monotonic() - began) * 1000
            self.fault("peer.pulled")
            if tell:
                began = time.monotonic()
                found = self.device.hash_regions([Region(address, size, "mapped") for address, size in runs.tolist()],
                                                 key)
                answer.hash_ms = (time.monotonic() - began) * 1000
                self._tell(copies, [one.hashes for one in found])
        except DeviceError as error:
            answer.why = f"pages cannot be pulled: {error.message}"
        self.connection.send(PULLED, plan.encode(answer))

    def _tell(self, copies: list[tuple[Imported, int, int]], found: list[Array]) -> None:
        for (source, address, size), hashes in zip(copies, found, strict=True):
            told = self._told.get((source.address, source.size))
            if told is None:
                told = np.full((source.size // PAGE, 2), 2**64 - 1, "<u8")
                self._told[source.address, source.size] = told
            first = (address - source.address) // PAGE
            told[first:first + size // PAGE] = hashes
        for piece in plan.hashes(np.concatenate(found)):
            self.connection.send(HASHES, piece)

    def round(self, body: Any) -> None:
        """Take the known hashes of a ROUND, which ends a round. Raises :class:`Corrupt`."""
        self._known = plan.read_known(body)

    def complete(self, state: SessionState) -> None:
        """Add to a state the hashes that the source left out. Raises :class:`Corrupt`."""
        for number, region in enumerate(state.regions):
            identity = region.address, region.size
            if region.hashes or region.kind != "mapped":
                continue
            told, known = self._told.get(identity), self._known.get(identity)
            if told is None or known is None:
                raise Corrupt(f"no hashes came of the range at {region.address:#x}, and none are known",
                              address=region.address, reason="known")
            indices, values = known
            told[indices] = values
            state.regions[number] = structs.replace(region, hashes=told.tobytes())

    def _copy(self, address: int, size: int, mapped: set[tuple[int, int]]) -> tuple[Imported, int, int]:
        index = bisect.bisect_right(self._starts, address) - 1
        found = self._imports[self._starts[index]] if index >= 0 else None
        if found is None or address + size > found.address + found.size or (found.address, found.size) not in mapped:
            raise Corrupt(f"{size} bytes at {address:#x} are to be pulled, which lie in no region that was granted",
                          address=address, reason="no region")
        return found, address, size

    def mend(self, region: Region, indices: Array) -> bool:
        """Pull pages of a region once more, from a paused source; False: they cannot be pulled."""
        found = self._imports.get(region.address)
        if found is None or found.size != region.size or region.kind != "mapped" or self._memory is None:
            return False
        log.warning("pages that were pulled are not as the source has them: they are pulled again",
                    address=hex(region.address), pages=len(indices))
        try:
            self._memory.pull([(found, address, size)
                               for address, size in plan.runs_of(region, indices).tolist()])
        except DeviceError as error:
            raise RecoveryFailed(f"pages could not be pulled again: {error.message}", reason="device") from error
        return True

    def close(self) -> None:
        """Release the source's memory; nothing is imported when this returns. May be called more than once."""
        with self._closing, suppress(DeviceError):
            if self._listener is not None:
                self._listener.close()
                self._listener = None
            began, count = time.monotonic(), len(self._imports)
            self._dismiss(list(self._imports))
            if count:
                log.info("the source's memory is let go of", regions=count,
                         ms=round((time.monotonic() - began) * 1000, 3))
