"""A worker's rank links: they connect the device to ranks in other sessions, and those to this session's ranks."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

from rgpu.link.data.frames import SealedConnection, client_preamble
from rgpu.link.local.shared import Channel
from rgpu.server.collectives.contributions import Key, Log, Unique
from rgpu.server.collectives.exchange import Shared
from rgpu.server.collectives.numbers import Array
from rgpu.server.worker.collectives.answering import Answering, Asker
from rgpu.server.worker.collectives.asking import Asking
from rgpu.server.worker.collectives.direct import Direct
from rgpu.server.worker.collectives.segments import OwnSegments, PeerSegments


class Ranks:
    """An implementation of :class:`rgpu.server.collectives.exchange.Exchange`.

    ``dial``, ``replaying``, ``widen``: as for :class:`.asking.Asking`; ``go_back``: as for
    :class:`.answering.Answering`.
    """

    def __init__(self, session: str, log: Log, dial: Callable[[str, int], None],
                 replaying: Callable[[], bool], go_back: Callable[[str], None] = lambda why: None,
                 widen: Callable[[str, int, int], None] | None = None) -> None:
        self.session, self.log = session, log
        self._segments = OwnSegments()
        self._asking = Asking(session, self.log, dial, replaying, widen, self._segments.take)
        self.direct = Direct(self._asking.epoch_of, self._asking.is_gone, self._asking.probe, go_back, replaying)
        self._answering = Answering(self.log, go_back, self._segments, self.direct)
        self._uniques: dict[Unique, Shared] = {}

    # -- the device -------------------------------------------------------------
    def room(self, size: int) -> Array | None:
        """See :meth:`Exchange.room`."""
        return self._segments.take(size)

    def opened(self, unique: Unique, shared: Shared) -> None:
        """See :meth:`Exchange.opened`."""
        self._uniques[unique] = shared
        self._asking.opened(unique, shared)
        self._answering.opened(unique, shared)

    def changed(self, unique: Unique) -> None:
        """See :meth:`Exchange.changed`."""
        self._answering.changed(unique)

    def ask(self, unique: Unique, key: Key, want: Sequence[int], own: Sequence[int]) -> None:
        """See :meth:`Exchange.ask`."""
        self._asking.ask(unique, key, want, own)

    def settle(self, unique: Unique, key: Key) -> None:
        """See :meth:`Exchange.settle`."""
        self._asking.settle(unique, key)

    # -- the daemon -------------------------------------------------------------
    def link(self, fd: int, peer: str, epoch: int, ticket: bytes, secret: bytes, memory: tuple[bytes, int] | None = None
             ) -> None:
        """Ask over this socket, which leads to the port of the node that owns ``peer`` at ``epoch`` by the record.

        ``memory``: the number and the descriptor of a rank memory socket. Raises the node's refusal,
        :class:`Fenced`, :class:`LinkError`.
        """
        sock = socket.socket(fileno=fd)
        lent = None
        if memory is not None:
            borrowed = self.direct.borrowed(peer, epoch)
            lent = PeerSegments(memory[0], Channel(socket.socket(fileno=memory[1])),
                                lambda message: self.direct.take(borrowed, message))
            borrowed.refresh = lent.refresh
        try:
            connection = client_preamble(sock, "ranks", ticket, secret, peer)
        except BaseException:
            sock.close()
            if lent is not None:
                lent.close()
            raise
        self._asking.link(peer, connection, lent)

    def widen(self, fds: Sequence[int], peer: str, grants: Sequence[Sequence[bytes]]) -> None:
        """Use further sockets to that node's port as lanes. ``grants``: ticket and secret for each.

        Raises the node's refusal, :class:`Fenced`, :class:`LinkError`.
        """
        sockets, connections = [socket.socket(fileno=fd) for fd in fds], []
        try:
            for sock, (ticket, secret) in zip(sockets, grants, strict=True):
                connections.append(client_preamble(sock, "ranks", ticket, secret, peer))
        except BaseException:
            for sock in sockets:
                sock.close()
            raise
        self._asking.widened(peer, connections)

    def lend(self, number: bytes, fd: int) -> None:
        """Lend memory over this socket to the worker that will name that number."""
        self._answering.lend(number, Channel(socket.socket(fileno=fd)))

    def gone(self, peer: str, why: str) -> None:
        """Note that a session is over."""
        self._asking.gone(peer, why)

    def serve(self, connection: SealedConnection, agent: str) -> None:
        """Answer another worker. Raises :class:`Fenced`, :class:`Corrupt`."""
        try:
            asker = Asker.read(agent)
        except BaseException:
            connection.close()
            raise
        self._answering.serve(connection, asker)
        if not asker.replaying:
            self._asking.newer(asker.session, asker.epoch)

    def owned(self) -> None:
        """Note that this worker owns its session from now on."""
        self._asking.owned()

    def passed(self, position: int) -> None:
        """Note that the session never begins again before this position of its journal."""
        for unique, shared in list(self._uniques.items()):
            if number := self.log.passed(unique, position):
                self._asking.floor(unique, number)
                self.log.floor(unique, self.session, number, shared.members)

    def describe(self) -> dict[str, Any]:
        """Return {linked, unreached, gone, kept_bytes, segments, segment_bytes, shared_bytes, gpu_segments,
        gpu_segment_bytes}.
        """
        return {**self._asking.describe(), "kept_bytes": self.log.bytes, **self._segments.describe(),
                **self.direct.describe()}
