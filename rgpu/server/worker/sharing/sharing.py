"""Sharing between a worker's session and other sessions of its host: exports, imports, and the ties that hold them.

An import blocks the applying thread, as the driver's call would, until the daemon has opened a tie to the exporting
worker (``share_open``). That worker answers in a thread of its own, whatever its applying thread waits for.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from rgpu.server.worker.sharing.exports import Exports, Piece
from rgpu.server.worker.sharing.ties import Busy, Tie
from rgpu.session.errors import DeviceError, Refused, RgpuError
from rgpu.session.objects.handle_tokens import TokenKind, decode

log = structlog.get_logger(__name__)

INVALID_VALUE, MAP_FAILED = 1, 205
OPEN_SECONDS = 20.0  #: limit for an import: a daemon may be restarting, the exporter be at a checkpoint
ASK_AGAIN = 2.0  #: seconds after which the request to the daemon is repeated
BUSY_SECONDS = 0.05  #: between two requests to an exporter that is paused


@dataclass(frozen=True, slots=True)
class Denied:
    """The daemon's answer where it cannot open a tie."""

    reason: str


class Sharing:
    """See the module docstring.

    ``ask(number, token)``: has the daemon open a tie; returns whether there is a daemon. ``still()``: whether the
    session is paused, or is not this worker's. ``begun(session)``: called when the first thing is shared with it.
    ``severed(session)``: called when its worker was lost while something was shared.
    """

    def __init__(self, session: str, ask: Callable[[int, bytes], bool], still: Callable[[], bool],
                 begun: Callable[[str], None], severed: Callable[[str], None]) -> None:
        self.session = session
        self.exports = Exports(session)
        self._ask, self._still, self._begun, self._severed = ask, still, begun, severed
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, queue.SimpleQueue[Tie | Denied]] = {}
        self._ties: set[Tie] = set()
        self._lost = False  #: a worker was lost, and ``severed`` was called
        self._with: dict[str, None] = {}  #: sessions that something was shared with, in order; never removed

    # -- the session -----------------------------------------------------------------
    def pins(self) -> list[str]:
        """Return why the session cannot leave: its journal does not contain other sessions' writes to shared memory."""
        return [f"it shares device memory or events with session {peer} (CUDA IPC)" for peer in list(self._with)]

    @property
    def peers(self) -> list[str]:
        """Sessions that something was shared with."""
        return list(self._with)

    def describe(self) -> dict[str, object]:
        """Return {sessions: that something was shared with, ties: how many things are open}."""
        with self._lock:
            return {"sessions": list(self._with), "ties": len(self._ties)}

    def over(self) -> None:
        """Close all ties in order, as the session ends: others keep what they have opened of it."""
        with self._lock:
            ties, self._ties = list(self._ties), set()
        for tie in ties:
            tie.over()

    # -- exporting -------------------------------------------------------------------
    def export(self, kind: TokenKind, number: int, size: int, secret: bytes, pieces: tuple[Piece, ...]) -> bytes:
        """Let others open an object from now on, and return its token.

        Raises :class:`DeviceError` for a secret of another length.
        """
        try:
            return self.exports.add(kind, number, size, secret, pieces)
        except ValueError as error:
            raise DeviceError(str(error), INVALID_VALUE) from error

    def serve(self, fd: int, peer: str) -> None:
        """Answer the worker of ``peer``, a session of the same user, at the other end of this socket."""
        tie = Tie(fd, peer)
        try:
            token = tie.asked()
            export = self.exports.find(decode(token, TokenKind(token[8] if len(token) > 8 else 0)))
        except (RgpuError, ValueError) as error:
            tie.refuse(str(error))
            return
        if not self._begin(peer):
            tie.refuse("the session is paused", busy=True)
            return
        try:
            pieces = self.exports.take(export)
        except DeviceError as error:
            tie.refuse(error.message)
            return
        self._hold(tie)
        try:
            tie.give(pieces)
        except RgpuError as error:
            log.info("a worker went before it had what it asked for", peer=peer, reason=error.message)
        tie.watch(self._ended)

    # -- importing -------------------------------------------------------------------
    def open(self, token: bytes, kind: TokenKind) -> tuple[Tie, list[tuple[int, int]]]:
        """Open the export of a token. Return its tie, for :meth:`close`, and (descriptor, bytes) of each piece.

        The caller closes the descriptors. Raises :class:`DeviceError`: INVALID_VALUE where the token opens nothing for
        this session, MAP_FAILED where there was no answer.
        """
        try:
            decode(token, kind)
        except RgpuError as error:
            raise DeviceError(error.message, INVALID_VALUE) from error
        until = time.monotonic() + OPEN_SECONDS
        while True:
            try:
                tie = self._dial(token, until)
                pieces = self._shown(tie, token)
            except Busy as error:
                if time.monotonic() > until:
                    raise DeviceError(f"the exporting session was paused for {OPEN_SECONDS:.0f} s: {error}",
                                      MAP_FAILED) from error
                time.sleep(BUSY_SECONDS)
                continue
            except RgpuError as error:
                code = error.result if isinstance(error, DeviceError) else \
                    INVALID_VALUE if isinstance(error, Refused) else MAP_FAILED
                raise DeviceError(f"a handle cannot be opened: {error.message}", code) from error
            self._hold(tie)
            tie.watch(self._ended)
            self._begin(tie.peer, also_still=True)  # a call is being applied, so the session cannot be paused
            return tie, pieces

    @staticmethod
    def _shown(tie: Tie, token: bytes) -> list[tuple[int, int]]:
        """Return the pieces that the exporter sends for a token; else close the tie. Raises as :meth:`Tie.ask`."""
        try:
            return tie.ask(token)
        except BaseException:
            tie.over()
            raise

    def close(self, tie: Tie) -> None:
        """Release what was opened by this tie."""
        with self._lock:
            self._ties.discard(tie)
        tie.over()

    def _dial(self, token: bytes, until: float) -> Tie:
        """Return a tie to the exporter. Raises :class:`Refused`, :class:`DeviceError` where no daemon answers."""
        while time.monotonic() < until:
            number, found = next(self._numbers), queue.SimpleQueue[Tie | Denied]()
            self._waiting[number] = found
            try:
                if not self._ask(number, token):
                    time.sleep(BUSY_SECONDS)  # no daemon at the moment
                    continue
                answer = found.get(timeout=ASK_AGAIN)
            except queue.Empty:
                continue
            finally:
                self._waiting.pop(number, None)
            if isinstance(answer, Denied):
                raise Refused(answer.reason)
            return answer
        raise DeviceError(f"no node daemon answered within {OPEN_SECONDS:.0f} s", MAP_FAILED)

    def linked(self, fd: int, number: int, peer: str) -> None:
        """Take a tie to the worker of ``peer``, which the daemon opened for request ``number``."""
        waiting = self._waiting.get(number)
        if waiting is None:
            os.close(fd)
        else:
            waiting.put(Tie(fd, peer))

    def denied(self, number: int, reason: str) -> None:
        """Note that the tie requested by ``number`` is denied to this session."""
        waiting = self._waiting.get(number)
        if waiting is not None:
            waiting.put(Denied(reason))

    # -- ties ------------------------------------------------------------------------
    def _begin(self, peer: str, also_still: bool = False) -> bool:
        """Pin the session: it shares something with ``peer`` from now on. Return False, unpinned, if it is paused."""
        with self._lock:
            known = peer in self._with
            self._with.setdefault(peer)  # first: a thread that pauses the session from here on reads the pins after it
            if not also_still and self._still():
                if not known:
                    del self._with[peer]
                return False
        if not known:
            self._begun(peer)
        return True

    def _hold(self, tie: Tie) -> None:
        with self._lock:
            self._ties.add(tie)

    def _ended(self, tie: Tie, lost: bool) -> None:
        with self._lock:
            if tie not in self._ties:
                return
            self._ties.discard(tie)
            lost, self._lost = lost and not self._lost, self._lost or lost
        if lost:
            log.error("the worker of a session that memory is shared with was lost", peer=tie.peer)
            self._severed(tie.peer)
