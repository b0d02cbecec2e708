"""What a worker's session shares with other sessions of its host: exports, imports, and the ties that hold them.

An import blocks the applying thread, as the driver's call would, until the daemon has brought a tie to the exporting
worker (``share_open``). That one answers in a thread of its own, whatever its applying thread waits for.
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
OPEN_SECONDS = 20.0  #: that an import may take: a daemon may be restarting, the exporter be at a checkpoint
ASK_AGAIN = 2.0  #: seconds after which the daemon is asked again
BUSY_SECONDS = 0.05  #: between two questions to an exporter that stands still


@dataclass(frozen=True, slots=True)
class Denied:
    """The daemon's answer where there is no tie to be had."""

    reason: str


class Sharing:
    """See the module docstring.

    ``ask``: has the daemon bring a tie: (number of the question, token). ``still``: whether the session stands still,
    or is not this worker's. ``begun``: told the other session's name when the first thing is shared with it.
    ``severed``: told the other session's name when its worker was lost while something was shared.
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
        self._lost = False  #: a worker was, and this was told
        self._with: dict[str, None] = {}  #: sessions that something was shared with, in order; never taken out

    # -- the session -----------------------------------------------------------------
    def pins(self) -> list[str]:
        """Why the session cannot leave: what others wrote to shared memory stands in no journal of its own."""
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
        """The session ends in order: others go on with what they have of it."""
        with self._lock:
            ties, self._ties = list(self._ties), set()
        for tie in ties:
            tie.over()

    # -- exporting -------------------------------------------------------------------
    def export(self, kind: TokenKind, number: int, size: int, secret: bytes, pieces: tuple[Piece, ...]) -> bytes:
        """The token of what others may open from now on. Raises :class:`DeviceError` for a secret of another length."""
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
            tie.refuse("the session stands still", busy=True)
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
        """What a token opens: (descriptor, bytes) of each piece, the caller's; the tie is closed by :meth:`close`.

        Raises :class:`DeviceError`: INVALID_VALUE where it opens nothing for this session, MAP_FAILED where nobody
        answered.
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
                    raise DeviceError(f"the exporting session stood still for {OPEN_SECONDS:.0f} s: {error}",
                                      MAP_FAILED) from error
                time.sleep(BUSY_SECONDS)
                continue
            except RgpuError as error:
                code = error.result if isinstance(error, DeviceError) else \
                    INVALID_VALUE if isinstance(error, Refused) else MAP_FAILED
                raise DeviceError(f"a handle cannot be opened: {error.message}", code) from error
            self._hold(tie)
            tie.watch(self._ended)
            self._begin(tie.peer, also_still=True)  # it is at a call, so it cannot be standing still
            return tie, pieces

    @staticmethod
    def _shown(tie: Tie, token: bytes) -> list[tuple[int, int]]:
        """What the exporter gives for a token; else the tie is closed. Raises as :meth:`Tie.ask`."""
        try:
            return tie.ask(token)
        except BaseException:
            tie.over()
            raise

    def close(self, tie: Tie) -> None:
        """Let go of what was opened by this tie."""
        with self._lock:
            self._ties.discard(tie)
        tie.over()

    def _dial(self, token: bytes, until: float) -> Tie:
        """A tie to the exporter. Raises :class:`Refused`, :class:`DeviceError` where nobody answers."""
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
        """The daemon brings a tie to the worker of ``peer``, as it was asked by ``number``."""
        waiting = self._waiting.get(number)
        if waiting is None:
            os.close(fd)
        else:
            waiting.put(Tie(fd, peer))

    def denied(self, number: int, reason: str) -> None:
        """Note that this session is denied what was asked for by ``number``."""
        waiting = self._waiting.get(number)
        if waiting is not None:
            waiting.put(Denied(reason))

    # -- ties ------------------------------------------------------------------------
    def _begin(self, peer: str, also_still: bool = False) -> bool:
        """The session is pinned by what it shares with ``peer`` from now on. False: it stands still, and is not."""
        with self._lock:
            known = peer in self._with
            self._with.setdefault(peer)  # first: who stands still from here on looks at the pins after it
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
