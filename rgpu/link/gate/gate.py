"""One thread that accepts a port's connections and reads from them, without blocking, until they are proven.

A :class:`Visitor` handles the data of a connection; :mod:`.budget` decides how many there may be, and which is closed
first. Only :meth:`Gate.close` ends the thread.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from rgpu.link.accepting import BACK_OFF, Next, Warned, after
from rgpu.link.gate.budget import Budget, Stage, crowded, least, over
from rgpu.link.loggers import get_logger
from rgpu.session.errors import LinkError

log = get_logger(__name__)

BACKLOG = 4096  #: the kernel allows no more than net.core.somaxconn
BATCH = 64  #: connections accepted in a row before data of others is read
SWEEP_SECONDS = 0.25

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Visitor:
    """One connection before a port. Used by the gate's thread only.

    ``address``: of the peer's host; ``peer``: with its port; ``since`` and ``heard``: monotonic s.
    """

    def __init__(self, gate: Gate, sock: socket.socket, peer: tuple[str, int]) -> None:
        self.gate, self.sock = gate, sock
        self.address, self.peer = peer[0], f"{peer[0]}:{peer[1]}"
        self.stage = Stage.SILENT
        self.since = self.heard = time.monotonic()
        self.over = False

    def ready(self, sock: socket.socket, events: int) -> bool:
        """Make progress without blocking; return whether the connection stays.

        The connection ends when this raises OSError or :class:`rgpu.session.errors.RgpuError`.
        """
        raise NotImplementedError

    def expired(self, now: float) -> str:
        """Return why a proven connection has to end at monotonic ``now``; empty while it may stay."""
        return ""

    @property
    def waits(self) -> bool:
        """Whether :meth:`expired` has to be called again soon, even if no data arrives."""
        return False

    def end(self, why: str) -> None:
        """Close the connection's sockets."""
        self.sock.close()


class Gate:
    """The accepting thread of one port. ``make`` makes the visitor of an accepted connection."""

    def __init__(self, name: str, listen: tuple[str, int], budget: Budget,
                 make: Callable[[Gate, socket.socket, tuple[str, int]], Visitor]) -> None:
        """Bind. Raises :class:`LinkError` where that address is not free."""
        self.name, self.budget = name, budget
        self._make = make
        try:
            self._listener = _listener(listen)
        except OSError as error:
            raise LinkError(f"cannot listen on {listen[0]}:{listen[1]}: {error}",
                            address=f"{listen[0]}:{listen[1]}") from error
        self.bound: tuple[str, int] = self._listener.getsockname()[:2]
        self.turned_away = 0  #: connections that ended before they were proven
        self._visitors: set[Visitor] = set()
        self._unproven: set[Visitor] = set()
        self._waiting: set[Visitor] = set()  #: proven ones whose peers have not read all data
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, READ, None)
        self._selector.register(self._listener, READ, None)
        self._accept_again = 0.0  #: monotonic s from when on to accept; 0: now
        self._broken = False  #: the listening socket has to be created again
        self._closing = False
        self._warned, self._crowd = Warned(), Warned()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to accept."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, the port and every connection that it still holds. May be called more than once."""
        self._closing = True
        try:
            self._wake.send(b"x")
        except OSError:
            pass
        if self._thread.is_alive():
            self._thread.join(5)
        elif not self._thread.ident:  # never started
            self._close_all()

    @property
    def waiting(self) -> int:
        """The number of unproven connections."""
        return len(self._unproven)

    def unproven(self) -> list[Visitor]:
        """Return the unproven visitors; callable from any thread."""
        return list(self._unproven)

    @property
    def known(self) -> int:
        """The number of proven connections that go through the gate."""
        return len(self._visitors) - len(self._unproven)

    # -- for visitors ---------------------------------------------------------------
    @staticmethod
    def now() -> float:
        """Return the monotonic s by which visitors are judged."""
        return time.monotonic()

    def watch(self, visitor: Visitor, sock: socket.socket, events: int) -> None:
        """Call ``visitor`` whenever ``sock`` is ready for ``events``; 0: not any more."""
        try:
            known = self._selector.get_map().get(sock)
            if not events:
                self._selector.unregister(sock)
            elif known is None:
                self._selector.register(sock, events, visitor)
            elif known.events != events:
                self._selector.modify(sock, events, visitor)
        except KeyError:
            pass

    def proven(self, visitor: Visitor) -> None:
        """Count ``visitor`` as proven from now on."""
        visitor.stage = Stage.PROVEN
        self._unproven.discard(visitor)
        found = crowded(self.budget, self._visitors)
        if found is not None:
            self._end(*found)

    def release(self, visitor: Visitor) -> None:
        """Release a proven ``visitor``, whose socket has another owner now."""
        visitor.stage = Stage.PROVEN
        self._forget(visitor)

    # -- the thread -----------------------------------------------------------------
    def _run(self) -> None:
        swept = time.monotonic()
        while not self._closing:
            try:
                self._turn()
                if (self._unproven or self._waiting) and time.monotonic() - swept > SWEEP_SECONDS:
                    swept = time.monotonic()
                    self._sweep(swept)
            except Exception:  # noqa: BLE001 - whatever a peer causes, the port stays open
                log.exception("a port's thread goes on after an error", port=self.name)
                time.sleep(BACK_OFF)
        self._close_all()

    def _turn(self) -> None:
        for key, events in self._selector.select(self._patience()):
            if key.fileobj is self._listener:
                self._accept()
            elif key.data is not None and not key.data.over:
                self._hear(key.data, key.fileobj, events)
        if self._accept_again and time.monotonic() > self._accept_again:
            self._listen_again()

    def _patience(self) -> float | None:
        """Seconds until work is due without an event of a socket; None: no such work."""
        if self._accept_again:
            return BACK_OFF
        if self._unproven or self._waiting:
            return SWEEP_SECONDS
        return None

    def _accept(self) -> None:
        for _ in range(BATCH):
            try:
                sock, peer = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if after(error.errno) is Next.AGAIN:
                    continue
                self._not_accepted(error)
                return
            self._enter(sock, peer)

    def _enter(self, sock: socket.socket, peer: Any) -> None:
        try:
            sock.setblocking(False)
            visitor = self._make(self, sock, (str(peer[0]), int(peer[1])))
        except Exception as error:  # noqa: BLE001 - one connection is lost, not the port
            log.warning("a connection could not be taken", port=self.name, peer=str(peer[0]), reason=str(error))
            sock.close()
            return
        self._visitors.add(visitor)
        self._unproven.add(visitor)
        self.watch(visitor, sock, READ)
        self._hear(visitor, sock, READ)  # mostly its first data has arrived by now
        if not visitor.over and visitor.stage is not Stage.PROVEN:
            found = over(self.budget, self._unproven, visitor)
            if found is not None:
                if self._crowd.due():
                    log.warning("connections are turned away", port=self.name, peer=found[0].peer, reason=found[1])
                self._end(*found)

    def _not_accepted(self, error: OSError) -> None:
        """Handle missing descriptors, or a socket that does not listen any more: the port pauses, then continues."""
        if self._warned.due():
            log.warning("a connection could not be accepted: the port goes on", port=self.name, reason=error.strerror,
                        waiting=len(self._unproven), held=len(self._visitors))
        gone = least(self._unproven)
        if gone is not None:
            self._end(gone, f"the node is short of descriptors ({error.strerror})")
        self._selector.unregister(self._listener)
        self._accept_again = time.monotonic() + BACK_OFF
        self._broken = after(error.errno) is Next.OVER

    def _listen_again(self) -> None:
        if self._broken:
            self._listener.close()
            try:
                self._listener = _listener(self.bound)
            except OSError as error:
                self._accept_again = time.monotonic() + 1.0
                log.error("a port cannot be opened again", port=self.name, reason=error.strerror)
                return
            self._broken = False
        self._accept_again = 0.0
        self._selector.register(self._listener, READ, None)

    def _hear(self, visitor: Visitor, sock: Any, events: int) -> None:
        try:
            if visitor.ready(sock, events):
                if visitor.waits:
                    self._waiting.add(visitor)
                return
            why = "over"
        except BlockingIOError:
            return
        except Exception as error:  # noqa: BLE001 - a peer's data ends that connection alone
            why = str(error)
        self._end(visitor, why)

    def _sweep(self, now: float) -> None:
        for visitor in list(self._unproven):
            if now - visitor.since > self.budget.seconds:
                self._end(visitor, f"it did not prove who it is within {self.budget.seconds:g} s")
        for visitor in list(self._waiting):
            if visitor.stage is Stage.PROVEN and (why := visitor.expired(now)):
                log.info("a connection is ended", port=self.name, peer=visitor.peer, reason=why)
                self._end(visitor, why)
            elif not visitor.waits:
                self._waiting.discard(visitor)

    def _end(self, visitor: Visitor, why: str) -> None:
        if visitor not in self._visitors:
            return
        if visitor.stage is not Stage.PROVEN:
            self.turned_away += 1
        self._forget(visitor)
        visitor.over = True
        visitor.end(why)

    def _forget(self, visitor: Visitor) -> None:
        self._visitors.discard(visitor)
        self._unproven.discard(visitor)
        self._waiting.discard(visitor)
        self.watch(visitor, visitor.sock, 0)

    def _close_all(self) -> None:
        for visitor in list(self._visitors):
            self._end(visitor, "the port is closed")
        self._selector.close()
        for sock in (self._listener, self._wake, self._woken):
            sock.close()


def _listener(address: tuple[str, int]) -> socket.socket:
    """A listening socket that does not block, IPv4 or IPv6 by its host. Raises OSError."""
    host = address[0].strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, address[1]), family=family, backlog=BACKLOG)
    sock.setblocking(False)
    return sock

