"""Round trips of awaited calls without the interpreter: when they may run, and the books afterwards.

A run of the native end (:mod:`rgpu.server.worker.exchange.library`) opens short messages with calls, feeds them to the
device's native path, and sends the answer that the program waits for. It runs only where nothing is out of the
ordinary; what it leaves, the link's thread does.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable

from rgpu.link.data.frames import SealedConnection
from rgpu.link.data.published import Clocks
from rgpu.link.messages.data import ISSUED, PING
from rgpu.server.fast_path import FastPath
from rgpu.server.worker.agent.answer_sender import LOOK, SPIN, AnswerSender
from rgpu.server.worker.agent.module_stream import ModuleStream
from rgpu.server.worker.agent.same_host import DeviceArea, Door
from rgpu.server.worker.apply.ordering import LATE, SLOW
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.server.worker.exchange.library import ANSWER, FED, LEFT, MARK, REST, Exchange

PENDING = 512 * 1024  #: bytes received and not opened that a run takes over, at most (``kBuffer`` in channel.hpp)
BUSY_MS = 5  #: between two attempts to pin memory while the device works
SKIPPED = 16  #: messages that the link's thread receives by itself behind runs that did nothing, at most
_SELDOM = frozenset({PING, ISSUED})  #: messages between those for here


class Rounds:
    """See the module docstring. Used by the thread that receives."""

    def __init__(self, connection: SealedConnection, runtime: SessionRuntime, fast: FastPath, sender: AnswerSender,
                 stream: ModuleStream, clocks: Clocks, exchange: Exchange, door: Door | None,
                 busy: Callable[[], bool]) -> None:
        """``busy``: whether messages were read ahead, and are to be applied before others are received.

        ``door``: of the memory that is shared with the agent.
        """
        self._door, self._mapped = door, -1
        self._connection, self._runtime, self._fast, self._sender = connection, runtime, fast, sender
        self._stream, self._clocks, self._exchange, self._busy = stream, clocks, exchange, busy
        self._poller = select.poll()
        self._poller.register(exchange.socket, select.POLLIN)
        if door is not None:
            self._poller.register(door.host.news, select.POLLIN)
        self._answered = False
        self._skip = self._useless = 0
        given = exchange.given
        given.late, given.spin, given.patience = int(LATE * 1e9), int(LOOK * 1e9), int(SPIN * 1e9)

    def step(self) -> bool:
        """Wait for messages, and handle those that can be. Return False where the caller has to receive the next.

        Raises :class:`LinkError`, :class:`Corrupt`.
        """
        if self._skip:
            self._skip -= 1
            if not self._busy() and not self._stream.waiting and not self._connection.opener.pending:
                self._wait()
            return False
        if not self._possible():
            return False
        if not self._connection.opener.pending:
            if self._answered and LOOK:
                self._fast.look(LOOK, self._exchange.socket)
            self._wait()
            if not self._possible():
                return False
        self._runtime.look()
        given = self._exchange.given
        self._run()
        self._answered = given.answered > 0
        piece = self._fast.taken_here() if given.why & ANSWER else None
        while piece is not None:  # all of its pieces are there, and no other thread takes them
            self._sender.send_taken(self._fast, piece)
            piece = self._fast.take_here(0.0, -1) if piece.more else None
        done = bool(given.why & FED or given.issued)
        if given.why & LEFT:  # the link's thread receives that message, and more of them where none is for here
            self._useless = 0 if done or given.left in _SELDOM else min(2 * self._useless + 1, SKIPPED)
            self._skip = max(1, self._useless)
        return done

    def _wait(self) -> None:
        """Wait for messages. Meanwhile the agent's memory is pinned, so that no copy from there has to wait for it."""
        host, busy = None if self._door is None else self._door.host, False
        while True:
            unpinned = host is not None and host.unpinned
            ready = self._poller.poll(None if not unpinned else BUSY_MS if busy else 0)
            if any(fd == self._exchange.socket for fd, _ in ready):
                return
            if host is not None:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(host.news)
                busy = unpinned and not host.pin_ahead()

    def answered(self) -> None:
        """Note that the caller has answered a call: the program's next will likely follow."""
        self._answered, self._skip, self._useless = True, 0, 0

    def close(self) -> None:
        """Free the native end."""
        self._exchange.close()

    def _possible(self) -> bool:
        return not self._busy() and not self._stream.waiting and self._runtime.loop.plain \
            and self._connection.opener.pending <= PENDING

    def _run(self) -> None:
        runtime, given, loop = self._runtime, self._exchange.given, self._runtime.loop
        given.why = given.issued = given.answered = 0
        loop.begin()
        try:
            # Behind a pause it may have to be copied, or kept in order.
            if not self._possible() or not self._sender.lend():
                return
            unsent = mark = b""
            try:
                self._prepare()
                self._exchange.run()
                unsent = self._exchange.unsent
                mark = self._exchange.mark if given.why & MARK else b""
            finally:
                self._sender.take_back(unsent, mark)
            self._stream.continue_at(given.stream)
            if given.why & FED:
                loop.fed(self._fast.fed(), *(self._exchange.rest, self._exchange.behind) if given.why & REST else ())
        finally:
            loop.end()
        if given.issued:
            self._clocks.late(given.arrived, given.arrived - given.ahead)
        if given.slow > SLOW * 1e9:
            runtime.stood_still("the driver", given.slow / 1e9)

    def _prepare(self) -> None:
        given, place, known = self._exchange.given, self._runtime.place, self._clocks.known
        given.applied, given.complete = place.applied_address, place.complete_address
        given.stream = self._stream.expected
        if self._door is not None and self._mapped != (changes := self._door.changes):
            self._exchange.map(self._door.pinned())
            self._mapped = changes
        area = self._sender.area
        if isinstance(area, DeviceArea):
            given.area, given.area_size, given.area_number = area.address, area.size, area.number
            given.published = self._sender.published
        given.clock = known is not None
        if known is not None:
            given.least, given.known_until = known
