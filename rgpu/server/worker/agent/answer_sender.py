"""The sending half of a worker's data link: answers, watermarks ahead of them, printed text, notices.

One thread sends. Device threads only append to its queue, so a slow agent never holds up the device. A watermark is
built when it is sent, so that many completions cost one message. With a native path the thread takes answers from it.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from typing import Any

import msgspec
import structlog

from rgpu.link.data.frames import SealedConnection
from rgpu.link.data.lanes import WORTH
from rgpu.link.local.shared import SMALLEST
from rgpu.link.messages.data import (
    ANSWER,
    ANSWER_AT,
    ANSWER_HEAD_LAYOUT,
    ANSWER_STICKY,
    NOTICE,
    PIECE_AT_LAYOUT,
    PONG,
    POSITION_LAYOUT,
    STREAM_MARK_LAYOUT,
    TEXT,
    WATERMARK,
    WATERMARK_HEAD_LAYOUT,
)
from rgpu.server.fast_path import FastPath, Piece, Took
from rgpu.server.worker.agent.link_lanes import LinkLanes, mark_back
from rgpu.server.worker.agent.same_host import DeviceArea, PlainArea
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.session.errors import RgpuError

PIECE = 1 << 20  #: longest piece of an answer's payload in one frame
WATERMARK_INTERVAL = 0.0005  #: seconds between two watermarks that no answer requires
SIGN_OF_LIFE = 2.0  #: seconds of silence after which the agent is sent a sign of life
SPIN = 0.0003  #: seconds that the receiving thread polls for an answer before it leaves that to the other threads
#: Seconds that it polls, after it sent one, for the program's next calls before it sleeps: that wake-up costs as much
#: as all the rest of a short call. 0 where the program, or its agent, may need the processor.
LOOK = 0.0002 if len(os.sched_getaffinity(0)) >= 4 else 0.0

_LAST, _MORE, _AT = bytes([ANSWER, 0]), bytes([ANSWER, 1]), bytes([ANSWER_AT])  #: how a piece of an answer begins
_WATERMARK = bytes([WATERMARK])
_encode = msgspec.msgpack.Encoder().encode
log = structlog.get_logger(__name__)


class AnswerSender:
    """See the module docstring."""

    def __init__(self, connection: SealedConnection, runtime: SessionRuntime, lanes: LinkLanes) -> None:
        self.area: DeviceArea | PlainArea | None = None  #: set once the program's side has mapped it
        self.published = 0  #: calls up to this position were published on earlier connections
        self._connection, self._runtime, self._lanes = connection, runtime, lanes
        self._queue: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._progress_queued = threading.Event()
        self._closed = threading.Event()
        self._last_watermark: tuple[Any, ...] | None = None
        self._order = threading.Lock()  #: watermarks leave in the order in which they were made
        self._answer = threading.Lock()  #: held from an answer's first piece to its last: pieces do not mix
        self._whole = True  #: the next watermark names every stream
        target = self._send if runtime.fast is None else self._send_fast
        self._thread = threading.Thread(target=target, name="agent-send", daemon=True)

    def start(self) -> None:
        """Begin to send what is queued."""
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Send what is queued, for that long at most; nothing is sent after it."""
        self._put("stop", None)
        if self._thread.is_alive():
            self._thread.join(seconds)

    def close(self) -> None:
        """Send nothing more."""
        self._closed.set()
        self._put("stop", None)

    @property
    def closed(self) -> bool:
        """Whether nothing is sent any more."""
        return self._closed.is_set()

    def deliver(self, seq: int, result: int, reply: bytes, payload: bytes) -> None:
        """Queue an answer; called from device threads."""
        self._put("answer", (seq, result, reply, payload))

    def send_raw(self, kind: int, body: Any) -> None:
        """Queue a message."""
        self._put("raw", (kind, body))

    def _put(self, kind: str, value: Any) -> None:
        self._queue.put((kind, value))
        if self._runtime.fast is not None:
            self._runtime.fast.wake()

    def notice(self, kind: str, **values: Any) -> None:
        """Queue a notice about the session."""
        self._put("raw", (NOTICE, _encode({"kind": kind, "epoch": self._runtime.epoch, **values})))

    def progressed(self) -> None:
        """Queue a watermark: what is complete may have changed."""
        if not self._progress_queued.is_set():
            self._progress_queued.set()
            self._put("progress", None)

    def _send(self) -> None:
        due = 0.0  #: when a watermark that no answer requires is to be sent; 0: none
        try:
            while not self._closed.is_set():
                try:
                    timeout = max(0.0, due - time.monotonic()) if due else SIGN_OF_LIFE
                    kind, value = self._queue.get(timeout=timeout)
                except queue.Empty:
                    if due:
                        due = 0.0
                        self._send_watermark()
                    else:
                        self._give_sign()
                    continue
                if kind == "stop":
                    return
                if kind == "answer":
                    # First the watermark: a program whose wait has returned may free memory without
                    # a round trip only if the shim has read by then that nothing is left running.
                    self._send_watermark()
                    self._send_answer(*value)
                elif kind == "raw":
                    self._connection.send(value[0], value[1])
                else:
                    due = due or time.monotonic() + WATERMARK_INTERVAL
        except Exception as error:  # noqa: BLE001 - a link on which nothing is sent any more must not stand
            self._broke(error)

    def _send_fast(self) -> None:
        """Send the native path's answers and what Python queued: the thread's loop with a native path."""
        fast = self._runtime.fast
        assert fast is not None
        within = False  # an answer's pieces
        try:
            while not self._closed.is_set():
                while not within and not self._queue.empty():
                    kind, value = self._queue.get()
                    if kind == "stop":
                        return
                    if kind == "raw":
                        self._connection.send(value[0], value[1])
                        continue
                    with self._order:
                        self._send_watermark()
                        if kind == "answer":
                            self._send_answer(*value)
                taken = fast.take(SIGN_OF_LIFE)
                if isinstance(taken, Piece):
                    within = False  # it releases the answer's lock when it fails
                    self._send_piece(fast, taken)
                    within = taken.more
                elif taken is Took.TIMES:
                    self._send_times(fast)
                elif taken is Took.PROGRESS:
                    with self._order:
                        self._send_watermark()
                elif taken is Took.NOTHING:
                    self._give_sign()
        except Exception as error:  # noqa: BLE001 - as above
            self._broke(error)
        finally:
            if within:
                self._answer.release()

    def _broke(self, error: Exception) -> None:
        """End the link, so that the agent attaches anew at once and is sent everything again."""
        self._closed.set()
        if not isinstance(error, RgpuError):
            log.error("a bug ended the sending of answers: the agent attaches anew", exc_info=error)
            self._connection.close()

    def _give_sign(self) -> None:
        """Send a sign of life, but not where the agent has to act on silence.

        No sign is sent while the session is paused for a move: if this worker is never informed how the move ended,
        the agent has to look for the owner. Nor in the middle of a frame of which no more arrives: its length may be
        damaged, and then the agent has to attach anew.
        """
        if not self._connection.stands() and not self._runtime.paused_for_long:
            self._connection.send(PONG, POSITION_LAYOUT.pack(0))

    def answer_here(self, fast: FastPath) -> bool:
        """Poll for the answer that the program waits for. Return True if it was sent: more calls will likely follow.

        Called by the thread that receives.
        """
        answered = False
        while not self._answer.locked() and (piece := fast.take_here(SPIN, self._connection.fileno())) is not None:
            self._send_piece(fast, piece)
            answered = LOOK > 0.0
        return answered

    def look_for_more(self, fast: FastPath) -> None:
        """Poll for the program's next calls without sleeping, after an answer of :meth:`answer_here`."""
        fast.look(LOOK, self._connection.fileno())

    # -- answers sent by other code ---------------------------------------------------
    def lend(self) -> bool:
        """Have nothing sent until :meth:`take_back`.

        Return False where that is not possible now, or the next watermark has to name all streams.
        """
        if self._whole or not self._answer.acquire(blocking=False):
            return False
        if self._order.acquire(blocking=False):
            if self._connection.lend():
                return True
            self._order.release()
        self._answer.release()
        return False

    def take_back(self, unsent: bytes, mark: bytes) -> None:
        """End :meth:`lend`. ``unsent``: the rest of frames; ``mark``: a watermark that is still to be sent.

        Raises :class:`LinkError`.
        """
        try:
            self._connection.take_back(unsent)
            if mark:
                self._note_mark(mark)
                self._connection.send(WATERMARK, mark)
        finally:
            self._order.release()
            self._answer.release()

    def send_taken(self, fast: FastPath, piece: Piece) -> None:
        """Send an answer that other code has taken. Raises :class:`LinkError`."""
        self._send_piece(fast, piece)

    def _send_piece(self, fast: FastPath, piece: Piece) -> None:
        """Send one piece of an answer, with a watermark ahead of the first piece."""
        if not piece.index:
            self._answer.acquire()
        last = True
        head = _MORE if piece.more else _LAST
        over, release = None, lambda: fast.release(piece)
        try:
            if piece.result:
                self._runtime.judge(piece.result)
            placed = self._place(piece)
            begin = b""
            if not piece.index:
                begin = ANSWER_HEAD_LAYOUT.pack(piece.seq, piece.result, self._sticky(piece.result), 0)
                self._runtime.answering(piece.seq)
            whole: Any = placed + begin if placed else fast.plaintext(piece, head + begin)
            if self._lanes.out and len(whole) >= WORTH:
                number, over = self._lanes.turn()
                mark = mark_back(number, len(whole))
            with self._order:
                messages = [] if piece.index else self._before_an_answer(fast)
                self._connection.send_whole(*messages, whole if over is None else mark)
            if over is not None:
                over.send_run(whole, release)
                release = _nothing
            last = not piece.more
        finally:
            if last:
                self._answer.release()
            release()

    def _send_times(self, fast: FastPath) -> None:
        """Send the answers of timed calls, many in one write, with a watermark ahead of them."""
        with self._answer:  # not between the pieces of another answer
            messages = []
            for seq, result, reply in fast.take_times():
                if result:
                    self._runtime.judge(result)
                self._runtime.answering(seq)
                messages.append(_LAST + ANSWER_HEAD_LAYOUT.pack(seq, result, self._sticky(result), len(reply)) + reply)
            with self._order:
                self._connection.send_whole(*self._before_an_answer(fast), *messages)

    def _before_an_answer(self, fast: FastPath) -> list[bytes]:
        """Return the watermark that precedes an answer; printed text is sent at once."""
        body = self._watermark_body(fast)
        self._send_text()
        return [_WATERMARK + body] if body else []

    def _place(self, piece: Piece) -> bytes:
        """Return the beginning of an ANSWER_AT for a piece that lies in the area; empty: it is sent in a frame.

        Only for calls that were published on this connection: the record ``completed`` of an older call may be
        on its way already, and would make the area's piece reused before it was read.
        """
        area = self.area
        if not isinstance(area, DeviceArea) or piece.size < SMALLEST or piece.seq <= self.published:
            return b""
        offset = area.offset(piece.address, piece.size)
        return b"" if offset is None else _AT + PIECE_AT_LAYOUT.pack(piece.more, area.number, offset, piece.size)

    def _watermark_body(self, fast: FastPath) -> bytes:
        whole, self._whole = self._whole, False
        body = fast.watermark(whole, self._runtime.executor.broken)
        if body:
            self._note_mark(body)
        return body

    def _note_mark(self, body: bytes) -> None:
        """Note a watermark that is about to be sent."""
        done, error, _ = WATERMARK_HEAD_LAYOUT.unpack_from(body)
        self._runtime.place.complete(done)
        if error:
            self._runtime.judge(error)

    def _sticky(self, result: int) -> int:
        return ANSWER_STICKY if result and result == self._runtime.executor.error else 0

    def _send_watermark(self) -> None:
        self._progress_queued.clear()
        if self._runtime.fast is not None:
            body = self._watermark_body(self._runtime.fast)
            self._send_text()
            if body:
                self._connection.send(WATERMARK, body)
            return
        done, error, streams = self._runtime.watermark()
        if error:
            self._runtime.judge(error)
        self._send_text()
        state = (done, error, tuple(sorted(streams.items())))
        if state == self._last_watermark:
            return
        changed = [item for item in state[2] if not self._last_watermark or item not in self._last_watermark[2]]
        self._last_watermark = state
        body = WATERMARK_HEAD_LAYOUT.pack(done, error, len(changed))
        body += b"".join(STREAM_MARK_LAYOUT.pack(*item) for item in changed)
        self._connection.send(WATERMARK, body)

    def _send_text(self) -> None:
        """Send what kernels printed: after the watermark was read and before it is sent.

        So the program has the text of all work that was reported to it as complete.
        """
        for position, text in self._runtime.text.pieces(self):
            self._connection.send(TEXT, position.to_bytes(8, "little"), text)

    def _send_answer(self, seq: int, result: int, reply: bytes, payload: bytes) -> None:
        if result:
            self._runtime.judge(result)
        head = ANSWER_HEAD_LAYOUT.pack(seq, result, self._sticky(result), len(reply)) + reply
        view = memoryview(payload)
        more = len(view) > PIECE
        self._runtime.answering(seq)
        area = self.area
        if isinstance(area, PlainArea) and len(view) >= SMALLEST and seq > self.published:  # see _place
            offset = area.place(seq, view)
            if offset is not None:
                self._connection.send(ANSWER_AT, PIECE_AT_LAYOUT.pack(0, area.number, offset, len(view)), head)
                return
        self._send_part(b"\x01" if more else b"\x00", head, view[:PIECE])
        at = PIECE
        while more:
            more = at + PIECE < len(view)
            self._send_part(b"\x01" if more else b"\x00", view[at:at + PIECE])
            at += PIECE

    def _send_part(self, *parts: Any) -> None:
        """Send a piece of an answer, over a lane if it is long."""
        length = 1 + sum(map(len, parts))
        if not self._lanes.out or length < WORTH:
            self._connection.send(ANSWER, *parts)
            return
        number, lane = self._lanes.turn()
        self._connection.send_whole(mark_back(number, length))
        lane.send(ANSWER, *parts)


def _nothing() -> None:
    """Do nothing: the lane releases the piece."""
