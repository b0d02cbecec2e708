"""Memory that workers of one node share for direct collectives: pages of communicators, and the GPUs' own memory.

Own pages and segments are announced to every borrower that asks for them; those of other sessions come over rank
memory sockets, and are mapped by the device. Messages: docs/protocols/ranks.md, "The rank memory socket".
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import structlog

from rgpu.link.local.shared import Channel, Message
from rgpu.link.messages.rank_memory import GPU_MEMORY, PAGE
from rgpu.server.collectives.contributions import Unique
from rgpu.server.collectives.direct_page import PAGE_SIZE, Page, digest_of
from rgpu.server.collectives.exchange import PeerMemory
from rgpu.server.device import host_zone
from rgpu.session.errors import Corrupt, LinkError

log = structlog.get_logger(__name__)

MOST_PAGES = 512  #: of one worker, and of one lender: the descriptors of a worker's stay open
MOST_SEGMENTS = 64
LARGEST = 1 << 40  #: bytes of a segment


@dataclass(eq=False, slots=True)
class _Own:
    """What this worker lends. ``pages``: by digest, the descriptor and the page."""

    pages: dict[bytes, tuple[int, Page]] = field(default_factory=dict)
    segments: list[tuple[int, int]] = field(default_factory=list)  #: descriptor, bytes


class Direct:
    """See the module docstring. An implementation of :class:`rgpu.server.collectives.exchange.Direct`. Thread-safe.

    ``epoch_of(session)``: the highest epoch at which a session was seen; ``gone(session)``: it is over;
    ``probe(session)``: finds out whether it is; ``go_back``: as for :class:`.answering.Answering`; ``replaying()``: as
    for :class:`.asking.Asking`.
    """

    def __init__(self, epoch_of: Callable[[str], int], gone: Callable[[str], bool], probe: Callable[[str], None],
                 go_back: Callable[[str], None], replaying: Callable[[], bool]) -> None:
        self._epoch_of, self._gone, self._go_back, self._replaying = epoch_of, gone, go_back, replaying
        self.probe = probe
        self._lock = threading.RLock()
        self._own = _Own()
        self._borrowers: set[Channel] = set()
        self._peers: dict[str, PeerMemory] = {}

    # -- the device ---------------------------------------------------------------------
    def page(self, unique: Unique, rank: int) -> Page | None:
        """Return this worker's page of a communicator, made and announced at the first call; None: no memory."""
        name = digest_of(unique)
        with self._lock:
            if name not in self._own.pages:
                if len(self._own.pages) >= MOST_PAGES:
                    return None
                try:
                    fd = os.memfd_create("rgpu-collectives", os.MFD_CLOEXEC)
                    os.posix_fallocate(fd, 0, PAGE_SIZE)
                    mapped = host_zone.shared(fd, PAGE_SIZE, writable=True)
                except OSError as error:
                    log.warning("no page for direct collectives", reason=str(error))
                    return None
                self._own.pages[name] = fd, Page.make(np.frombuffer(mapped, np.uint8), rank)
                self._announce(PAGE, 0, PAGE_SIZE, fd, name)
            return self._own.pages[name][1]

    def ended(self, unique: Unique) -> None:
        """Note that this session's rank of a communicator is over: its pages are not lent or kept any more."""
        name = digest_of(unique)
        with self._lock:
            if (own := self._own.pages.pop(name, None)) is not None:
                os.close(own[0])
            for peer in self._peers.values():
                peer.pages.pop(name, None)

    def segment(self, fd: int, size: int) -> int:
        """Announce memory of the GPU by a descriptor of the driver's, which becomes this object's; return its number,
        0: too many.
        """
        with self._lock:
            if len(self._own.segments) >= MOST_SEGMENTS:
                os.close(fd)
                return 0
            self._own.segments.append((fd, size))
            number = len(self._own.segments)
            self._announce(GPU_MEMORY, number, size, fd)
            return number

    def peers(self, unique: Unique, members: Sequence[str], session: str) -> dict[int, PeerMemory]:
        """Return the memory of the sessions of all other ranks, by rank; none where any is missing, or over."""
        name = digest_of(unique)
        for peer in list(self._peers.values()):
            peer.refresh()
        with self._lock:
            if self._replaying():
                return {}
            found = {rank: self._peers[member] for rank, member in enumerate(members)
                     if member in self._peers and name in self._peers[member].pages and not self._over(member)}
            return found if len(found) == len(members) - 1 and session not in self._peers else {}

    def over(self, peer: PeerMemory) -> bool:
        """Whether another worker serves that session now."""
        with self._lock:
            return self._peers.get(peer.session) is not peer or self._over(peer.session)

    def gone(self, session: str) -> bool:
        """Whether that session is over."""
        return self._gone(session)

    def go_back(self, why: str) -> None:
        """End this worker, so that its session begins again at its checkpoint."""
        self._go_back(why)

    # -- links ----------------------------------------------------------------------------
    def admit(self, channel: Channel) -> None:
        """Lend to a borrower from now on."""
        with self._lock:
            self._borrowers.add(channel)
            for name, (fd, _) in self._own.pages.items():
                self._send(channel, PAGE, 0, PAGE_SIZE, fd, name)
            for number, (fd, size) in enumerate(self._own.segments, 1):
                self._send(channel, GPU_MEMORY, number, size, fd)

    def dismiss(self, channel: Channel) -> None:
        """Note that a borrower's link ended."""
        with self._lock:
            self._borrowers.discard(channel)

    def borrowed(self, session: str, epoch: int) -> PeerMemory:
        """Return what a link to a session's worker fills by :meth:`take`; it replaces what one before it filled."""
        with self._lock:
            old = self._peers.get(session)
            if old is not None and old.epoch == epoch:
                return old  # the same worker, over another connection: it is the same memory
            made = self._peers[session] = PeerMemory(session, epoch)
            return made

    def take(self, peer: PeerMemory, message: Message) -> None:
        """Take a message of a rank memory socket; the descriptor becomes this object's. Raises :class:`Corrupt`."""
        with self._lock:
            if message.kind == PAGE and message.data not in peer.pages and len(peer.pages) < MOST_PAGES:
                if message.size != PAGE_SIZE or len(message.data) != 16 or os.fstat(message.fd).st_size != PAGE_SIZE:
                    os.close(message.fd)
                    raise Corrupt("PAGE on a rank memory socket is no page", reason="size")
                try:
                    mapped = host_zone.shared(message.fd, PAGE_SIZE, writable=True)
                except OSError as error:
                    raise LinkError(f"a communicator's page cannot be mapped: {error}") from error
                finally:
                    os.close(message.fd)
                peer.pages[message.data] = np.frombuffer(mapped, np.uint8)
            elif message.kind == GPU_MEMORY and message.number == len(peer.segments) + 1 \
                    and len(peer.segments) < MOST_SEGMENTS and 0 < message.size <= LARGEST:
                peer.segments.append((message.fd, message.size))
            else:
                os.close(message.fd)  # the same again, over another connection; or more than is mapped

    def describe(self) -> dict[str, int]:
        """Return {gpu_segments, gpu_segment_bytes}."""
        with self._lock:
            return {"gpu_segments": len(self._own.segments),
                    "gpu_segment_bytes": sum(size for _, size in self._own.segments)}

    # -- with the lock ----------------------------------------------------------------------
    def _over(self, session: str) -> bool:
        return self._epoch_of(session) > self._peers[session].epoch

    def _announce(self, kind: int, number: int, size: int, fd: int, data: bytes = b"") -> None:
        for channel in list(self._borrowers):
            self._send(channel, kind, number, size, fd, data)

    def _send(self, channel: Channel, kind: int, number: int, size: int, fd: int, data: bytes = b"") -> None:
        try:
            if channel.send(kind, number, size, data, fd):
                return
        except LinkError:
            pass
        self._borrowers.discard(channel)  # its link notices as well; a full socket's borrower never gets the rest
