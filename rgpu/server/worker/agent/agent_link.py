"""The worker's end of the data link to the agent: calls in, answers and watermarks out.

One thread receives and applies; one sends. Device threads only append to the
sender's queue, so a slow agent never holds up the device. A watermark is built
when it is sent, so that many completions cost one message.

With a fast path the sender takes answers from it. A program that waits has
sent nothing behind its call: then the receiving thread looks for the answer
itself for a short time, and sends it, so that no thread has to be woken.
"""

from __future__ import annotations

import os
import queue
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from rgpu.link import versions
from rgpu.link.data.frames import SealedConnection
from rgpu.link.data.lanes import WORTH
from rgpu.link.data.published import Clocks, Issued, Ping, pong
from rgpu.link.data.sealing import BULK
from rgpu.link.local.shared import SMALLEST
from rgpu.link.messages.data import (
    ANSWER,
    ANSWER_AT,
    ANSWER_HEAD_LAYOUT,
    ANSWER_STICKY,
    AREA_LAYOUT,
    AREA_READY,
    ATTACH,
    ATTACHED,
    BYE,
    CALLS,
    CALLS_AT,
    CALLS_REF,
    HAVE,
    ISSUED,
    LANED,
    LANES,
    NOTICE,
    PIECE_AT_LAYOUT,
    PING,
    PONG,
    POSITION_LAYOUT,
    PRINTED,
    STATS,
    STREAM_MARK_LAYOUT,
    TEXT,
    WATERMARK,
    WATERMARK_HEAD_LAYOUT,
)
from rgpu.server.fast_path import FastPath, Piece, Took
from rgpu.server.module_cache import ModuleCache
from rgpu.server.worker.agent.link_lanes import LinkLanes, mark_back
from rgpu.server.worker.agent.module_stream import ModuleStream
from rgpu.server.worker.agent.same_host import DeviceArea, Door, HostMemory, PlainArea
from rgpu.server.worker.apply.ordering import GAP, LATE
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.session.errors import Corrupt, Fenced, RgpuError, TimedOut, VersionMismatch
from rgpu.session.journal import issue_order

log = structlog.get_logger(__name__)

PIECE = 1 << 20  #: longest piece of an answer's payload in one frame
WATERMARK_INTERVAL = 0.0005  #: seconds between two watermarks that no answer asks for
DRY_SECONDS = 0.02  #: without anything to read, after which an agent that ships has nothing left
SIGN_OF_LIFE = 2.0  #: seconds of silence after which the agent is told that the worker is there
SPIN = 0.0003  #: seconds that the receiving thread looks for an answer before it leaves that to the others
#: And, when it has sent one, for the program's next calls before it sleeps: that wake-up costs as much as all the rest
#: of a short call. Not where the program, or its agent, may need the processor.
LOOK = 0.0002 if len(os.sched_getaffinity(0)) >= 4 else 0.0

_LAST, _MORE, _AT = bytes([ANSWER, 0]), bytes([ANSWER, 1]), bytes([ANSWER_AT])  #: how a piece of an answer begins
_WATERMARK = bytes([WATERMARK])
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode

#: (event, values): attached, detached, stats, bye
Report = Callable[[str, dict[str, Any]], None]


class AgentLink:
    """See the module docstring. ``report`` is called from the link's threads."""

    def __init__(self, connection: SealedConnection, runtime: SessionRuntime, report: Report,
                 modules: ModuleCache | None = None, host: HostMemory | None = None) -> None:
        """``host``: what may be shared with an agent on this host; None: nothing."""
        self.connection = connection
        self.runtime = runtime
        self.report = report
        self._stream = ModuleStream(modules, lambda kind, body: self._put("raw", (kind, body)))
        self._host = host
        self._asked: Any = None  #: which host the agent says it is on
        self._door: Door | None = None
        self._area: DeviceArea | PlainArea | None = None  #: the program's side has mapped it
        self._lanes = LinkLanes(runtime.fast)
        self._queue: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._progress_queued = threading.Event()
        self._closed = threading.Event()
        self._last_watermark: tuple[Any, ...] | None = None
        self._published = 0
        self._printed: int | None = None  #: bytes of printed text that the agent has; None: it takes none
        self._order = threading.Lock()  #: watermarks leave in the order in which they were made
        self._whole = True  #: the next watermark names every stream
        #: Messages read ahead, in order: (type, body, the bytes of records that it stands for). The agent's journal
        #: bounds what there can be: it ships nothing that it does not hold.
        self._ahead: deque[tuple[int, Any, Any]] = deque()
        self._clocks = Clocks()
        self._receiver = threading.Thread(target=self._receive, name="agent-link", daemon=True)
        sender = self._send if runtime.fast is None else self._send_fast
        self._sender = threading.Thread(target=sender, name="agent-send", daemon=True)

    def start(self) -> None:
        self._receiver.start()

    # -- receiving ----------------------------------------------------------------
    def _receive(self) -> None:
        reason, feeding = "the connection ended", False
        try:
            self._check_attach()
            self.runtime.take_over()
            feeding = True
            self._attach()
            self._sender.start()
            feed, stream = self.runtime.open_stream(), self._stream
            self.runtime.loop.read_ahead = self._read_ahead
            order = self.runtime.order
            order.queued = self._read_already
            fast = self.runtime.fast
            room, answered = None if fast is None else fast.room, False
            while True:
                if answered and fast is not None and not self._ahead and not self.connection.opener.pending:
                    fast.look(LOOK, self.connection.fileno())
                answered = False
                if order.catching_up and not self._more():
                    order.feed(issue_order.Dry(*self.runtime.reach()))
                kind, body, data = self._ahead.popleft() if self._ahead else (*self.connection.recv(room=room), None)
                if kind == LANED:
                    kind, body = self._lanes.message(body)
                self.runtime.look()
                if kind in (CALLS, CALLS_REF, CALLS_AT):
                    awaiting = 0
                    try:
                        for part in self._parts(kind, body) if data is None else (data,):
                            awaiting = self.runtime.applying(feed, part)
                    finally:
                        self._give_back(body)
                    if awaiting and fast is not None and not self._ahead and not self.connection.opener.pending:
                        answered = self._answer_here(fast)
                elif kind == PING:
                    if not stream.waiting:  # else what it asks about was dropped; the agent asks again
                        self._pinged(Ping.unpack(body))
                        # And how much of it is complete, which the agent may wait for to let go of shared memory:
                        # what completed before its position was known is in no watermark yet.
                        self._progressed()
                elif kind == ISSUED:
                    self._issued(Issued.unpack(body))
                elif kind == PRINTED:
                    self._confirmed(body)
                elif kind == HAVE:
                    stream.have(body)
                elif kind == AREA_READY:
                    self._use_area(body)
                elif kind == LANES:
                    self._lanes.use(body)
                elif kind == STATS:
                    self.report("stats", _map(body))
                elif kind == BYE:
                    self.report("bye", _map(body))
                    return
                else:
                    raise Corrupt(f"unknown message type {kind} from the agent", type=kind, reason="type")
        except RgpuError as error:
            reason = error.message
            log.info("agent link ended", session=self.runtime.session, error=error.code, reason=reason)
        except Exception as error:  # noqa: BLE001 - one bad peer must not end the worker
            reason = str(error)
            log.exception("agent link failed", session=self.runtime.session)
        finally:
            for _, ahead, _ in self._ahead:
                self._give_back(ahead)
            if feeding:
                self.runtime.loop.read_ahead = None
                self.runtime.order.queued = tuple
                self.runtime.hand_back()
            self.close()
            self.report("detached", {"reason": reason, "link": id(self)})

    def _more(self) -> bool:
        """Whether more has come, or comes within a moment."""
        if self._ahead or self.connection.opener.pending:
            return True
        poller = select.poll()
        try:
            poller.register(self.connection.fileno(), select.POLLIN)
        except ValueError:
            return True  # it was closed, which whoever receives will hear
        return bool(poller.poll(DRY_SECONDS * 1000))

    def _pinged(self, ping: Ping) -> None:
        """Say how far it is, and take in how far the program is."""
        runtime, distance = self.runtime, self.runtime.order.distance
        if ping.published is not None:
            distance.tell(ping.usual)
        self._put("raw", (PONG, pong(ping.shipped, distance.usual)))
        if ping.published is None:
            return
        late = self._clocks.late(time.monotonic_ns(), ping.sent) / 1e9
        if ping.stood or late > GAP:
            runtime.stood_still("the program's agent" if ping.stood else "the link", max(late, GAP))
        runtime.order.feed(issue_order.Told(*runtime.reach(), ping.published, distance.usual, late))

    def _issued(self, issued: Issued) -> None:
        """Calls follow: whether they come later than the program issued them."""
        order, late = self.runtime.order, self._clocks.late(time.monotonic_ns(), issued.sent)
        usual = order.distance.usual
        late_calls = (late + issued.sent - issued.since) / 1e9
        if late_calls > LATE:
            order.feed(issue_order.Late(self.runtime.applied, late_calls, usual))
        elif order.catching_up:
            order.feed(issue_order.Told(*self.runtime.reach(), issued.published, usual, late / 1e9))

    def _read_already(self) -> list[Any]:
        """Records that were read ahead and not fed yet."""
        return [data for _, _, data in self._ahead if data is not None]

    def _read_ahead(self, seconds: float) -> Any:
        """Receive a message while a call waits; the records in it, to be looked at: they are fed later."""
        try:
            kind, body = self.connection.recv(seconds)
        except TimedOut:
            return b""
        if kind == LANED:
            kind, body = self._lanes.message(body)
        if kind == PRINTED:  # what the call waits for may be this
            self._confirmed(body)
            return b""
        if kind not in (CALLS, CALLS_REF, CALLS_AT):
            self._ahead.append((kind, body, None))
            return b""
        parts = self._parts(kind, body)
        if not parts:
            self._give_back(body)
            return b""  # it was dropped, and comes again
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self._ahead.append((kind, body, data))
        return data

    def _give_back(self, body: Any) -> None:
        """The memory of a message that was fed or dropped, if it is the engine's."""
        if self.runtime.fast is not None and len(body) >= BULK - 1:
            self.runtime.fast.give(body)

    def _parts(self, kind: int, body: Any) -> tuple[Any, ...]:
        """The bytes of records that a message brings or names; none where it is to be dropped."""
        if kind != CALLS_AT:
            data = self._stream.take(kind, body)
            return () if data is None else (data,)
        if self._door is None:
            raise Corrupt("a place in shared memory, where none is shared", reason="place")
        offset, before, payload = self._door.place(body)
        return (before, payload) if self._stream.take_placed(offset, len(before) + len(payload)) else ()

    def _use_area(self, body: Any) -> None:
        area = self._host.area if self._host is not None and self._door is not None else None
        if area is None or len(body) != AREA_LAYOUT.size or AREA_LAYOUT.unpack(body)[0] != area.number:
            raise Corrupt("the agent has mapped an area that it was not given", reason="area")
        self._area = area

    def _confirmed(self, body: Any) -> None:
        if len(body) != 8:
            raise Corrupt(f"a count of printed text has {len(body)} bytes", reason="printed text")
        self.runtime.text.confirm(self, int.from_bytes(body, "little"))

    def _check_attach(self) -> None:
        kind, body = self.connection.recv()
        if kind != ATTACH:
            raise Corrupt(f"the first message is of type {kind}, not ATTACH", reason="protocol")
        request = _map(body)
        try:
            versions.check(request.get("versions"), "the client")
        except VersionMismatch as error:
            self.connection.send(ATTACHED, _encode({"refused": error.as_dict()}))
            raise
        if request.get("session") != self.runtime.session or request.get("epoch") != self.runtime.epoch:
            raise Fenced(f"attach for {request.get('session')} epoch {request.get('epoch')}; here is "
                         f"{self.runtime.session} epoch {self.runtime.epoch}")
        self._asked = request.get("host")
        usual = request.get("usual")
        if type(usual) is int and usual >= 0:
            self.runtime.order.distance.tell(usual)
        published = request.get("delivered")
        self._published = published if isinstance(published, int) else 0
        self.runtime.order.distance.earlier |= self._published > 0
        printed = request.get("printed")
        self._printed = printed if type(printed) is int and 0 <= printed < 1 << 63 else None

    def _attach(self) -> None:
        self.connection.send(ATTACHED, _encode({"epoch": self.runtime.epoch, "next": self.runtime.applied + 1,
                                                "state": "running", "versions": versions.ours(), **self._invite()}))
        self.runtime.text.attach(self, self._printed, self._progressed)
        for seq, result, reply, payload in self.runtime.attach(self.deliver, self._published):
            self.deliver(seq, result, reply, payload)
        if self.runtime.fast is None:
            self.runtime.device.on_progress(self._progressed)
        self._progressed()
        self.report("attached", {"link": id(self)})

    def _invite(self) -> dict[str, Any]:
        """What ATTACHED says about shared memory."""
        if self._host is None:
            return self._lanes.offer()
        said: dict[str, Any] = {"worker": self._host.worker, **self._lanes.offer()}
        found = self._host.invite(self._asked)
        if isinstance(found, str):
            said["shared"] = {"refused": found}
        elif found is not None:
            self._door = found
            found.start()
            said["shared"] = found.offer.as_dict()
            if self._closed.is_set():
                found.close()
        return said

    # -- sending ------------------------------------------------------------------
    def deliver(self, seq: int, result: int, reply: bytes, payload: bytes) -> None:
        """Queue an answer; called from device threads."""
        self._put("answer", (seq, result, reply, payload))

    def _put(self, kind: str, value: Any) -> None:
        self._queue.put((kind, value))
        if self.runtime.fast is not None:
            self.runtime.fast.wake()

    def notice(self, kind: str, **values: Any) -> None:
        self._put("raw", (NOTICE, _encode({"kind": kind, "epoch": self.runtime.epoch, **values})))

    def _progressed(self) -> None:
        if not self._progress_queued.is_set():
            self._progress_queued.set()
            self._put("progress", None)

    def _send(self) -> None:
        due = 0.0  #: when a watermark that nobody waits for is to be sent; 0: none
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
                    # First the watermark: a program that saw its wait return may free memory
                    # without asking only if the shim knows by then that nothing is left running.
                    self._send_watermark()
                    self._send_answer(*value)
                elif kind == "raw":
                    self.connection.send(value[0], value[1])
                else:
                    due = due or time.monotonic() + WATERMARK_INTERVAL
        except RgpuError:
            self._closed.set()

    def _send_fast(self) -> None:
        """The sender's loop with a fast path: its answers and what Python queued."""
        fast = self.runtime.fast
        assert fast is not None
        try:
            while not self._closed.is_set():
                while not self._queue.empty():
                    kind, value = self._queue.get()
                    if kind == "stop":
                        return
                    if kind == "raw":
                        self.connection.send(value[0], value[1])
                        continue
                    with self._order:
                        self._send_watermark()
                        if kind == "answer":
                            self._send_answer(*value)
                taken = fast.take(SIGN_OF_LIFE)
                if isinstance(taken, Piece):
                    self._send_piece(fast, taken)
                elif taken is Took.PROGRESS:
                    with self._order:
                        self._send_watermark()
                elif taken is Took.NOTHING:
                    self._give_sign()
        except RgpuError:
            self._closed.set()

    def _give_sign(self) -> None:
        """Of life, where the agent's next step does not hang on our silence.

        While the session stands still for a move: if nobody ever tells this worker how the move ended, the agent has
        to ask for the owner. In the middle of a frame that does not come on: its length may be damaged, and then the
        agent has to attach anew.
        """
        if not self.connection.stands() and not self.runtime.paused:
            self.connection.send(PONG, POSITION_LAYOUT.pack(0))

    def _answer_here(self, fast: FastPath) -> bool:
        """True: the program has an answer now, and most likely goes on."""
        answered = False
        while (piece := fast.take_here(SPIN, self.connection.fileno())) is not None:
            self._send_piece(fast, piece)
            answered = LOOK > 0.0
        return answered

    def _send_piece(self, fast: FastPath, piece: Piece) -> None:
        """One piece of an answer, before the first the watermark."""
        if piece.result:
            self.runtime.judge(piece.result)
        head = _MORE if piece.more else _LAST
        over, release = None, lambda: fast.release(piece)
        try:
            placed = self._place(piece)
            begin = b""
            if not piece.index:
                begin = ANSWER_HEAD_LAYOUT.pack(piece.seq, piece.result, self._sticky(piece.result), 0)
                self.runtime.answering(piece.seq)
            whole: Any = placed + begin if placed else fast.plaintext(piece, head + begin)
            if self._lanes.out and len(whole) >= WORTH:
                number, over = self._lanes.turn()
                mark = mark_back(number, len(whole))
            with self._order:
                messages = [] if piece.index else self._before_an_answer(fast)
                self.connection.send_whole(*messages, whole if over is None else mark)
            if over is not None:
                over.send_run(whole, release)
                release = _nothing
        finally:
            release()

    def _before_an_answer(self, fast: FastPath) -> list[bytes]:
        """First the watermark; printed text goes out at once."""
        body = self._watermark_body(fast)
        self._send_text()
        return [_WATERMARK + body] if body else []

    def _place(self, piece: Piece) -> bytes:
        """The beginning of an ANSWER_AT for a piece that lies in the area; empty: it goes in a frame.

        Only for calls that were published on this connection: the record ``completed`` of an older one may be
        on its way already, and with it the area's piece would be used again before it was read.
        """
        area = self._area
        if not isinstance(area, DeviceArea) or piece.size < SMALLEST or piece.seq <= self._published:
            return b""
        offset = area.offset(piece.address, piece.size)
        return b"" if offset is None else _AT + PIECE_AT_LAYOUT.pack(piece.more, area.number, offset, piece.size)

    def _watermark_body(self, fast: FastPath) -> bytes:
        whole, self._whole = self._whole, False
        body = fast.watermark(whole, self.runtime.executor.broken)
        if body:
            done, error, _ = WATERMARK_HEAD_LAYOUT.unpack_from(body)
            self.runtime.place.complete(done)
            if error:
                self.runtime.judge(error)
        return body

    def _sticky(self, result: int) -> int:
        return ANSWER_STICKY if result and result == self.runtime.executor.error else 0

    def _send_watermark(self) -> None:
        self._progress_queued.clear()
        if self.runtime.fast is not None:
            body = self._watermark_body(self.runtime.fast)
            self._send_text()
            if body:
                self.connection.send(WATERMARK, body)
            return
        done, error, streams = self.runtime.watermark()
        if error:
            self.runtime.judge(error)
        self._send_text()
        state = (done, error, tuple(sorted(streams.items())))
        if state == self._last_watermark:
            return
        changed = [item for item in state[2] if not self._last_watermark or item not in self._last_watermark[2]]
        self._last_watermark = state
        body = WATERMARK_HEAD_LAYOUT.pack(done, error, len(changed))
        body += b"".join(STREAM_MARK_LAYOUT.pack(*item) for item in changed)
        self.connection.send(WATERMARK, body)

    def _send_text(self) -> None:
        """What kernels printed, behind the look at what is complete and ahead of telling it.

        So the program has the text of all work that it knows to be complete.
        """
        for position, text in self.runtime.text.pieces(self):
            self.connection.send(TEXT, position.to_bytes(8, "little"), text)

    def _send_answer(self, seq: int, result: int, reply: bytes, payload: bytes) -> None:
        if result:
            self.runtime.judge(result)
        head = ANSWER_HEAD_LAYOUT.pack(seq, result, self._sticky(result), len(reply)) + reply
        view = memoryview(payload)
        more = len(view) > PIECE
        self.runtime.answering(seq)
        area = self._area
        if isinstance(area, PlainArea) and len(view) >= SMALLEST and seq > self._published:  # see _place
            offset = area.place(seq, view)
            if offset is not None:
                self.connection.send(ANSWER_AT, PIECE_AT_LAYOUT.pack(0, area.number, offset, len(view)), head)
                return
        self._send_part(b"\x01" if more else b"\x00", head, view[:PIECE])
        at = PIECE
        while more:
            more = at + PIECE < len(view)
            self._send_part(b"\x01" if more else b"\x00", view[at:at + PIECE])
            at += PIECE

    def _send_part(self, *parts: Any) -> None:
        """A piece of an answer, over a lane if it is long."""
        length = 1 + sum(map(len, parts))
        if not self._lanes.out or length < WORTH:
            self.connection.send(ANSWER, *parts)
            return
        number, lane = self._lanes.turn()
        self.connection.send_whole(mark_back(number, length))
        lane.send(ANSWER, *parts)

    def finish(self, timeout: float = 1.0) -> None:
        """Send what is queued, then close."""
        self._put("stop", None)
        if self._sender.is_alive():
            self._sender.join(timeout)
        self.close()

    def close(self) -> None:
        self._closed.set()
        self.runtime.detach(self.deliver)
        self._put("stop", None)
        self.connection.close()
        self._lanes.close()
        if self._door is not None:
            self._door.close()

    def add_lane(self, connection: SealedConnection) -> None:
        """A further connection of this attachment's agent. Raises :class:`RgpuError`; the caller then closes it."""
        self._lanes.add(connection)


def _nothing() -> None:
    """It was given to somebody else to do."""


def _map(body: Any) -> dict[str, Any]:
    try:
        value = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corrupt(f"a message from the agent is no msgpack: {error}", reason="msgpack") from error
    if not isinstance(value, dict):
        raise Corrupt("a message from the agent is no map", reason="msgpack")
    return value
