"""The worker's end of the data link to the agent: calls in, answers and watermarks out.

One thread receives and applies; one sends. Device threads only append to the
sender's queue, so a slow agent never holds up the device. A watermark is built
when it is sent, so that many completions cost one message.
"""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from rgpu.link.frames import SealedConnection
from rgpu.link.module_refs import CALLS_REF, HAVE
from rgpu.server.module_cache import ModuleCache
from rgpu.server.module_stream import ModuleStream
from rgpu.server.runtime import SessionRuntime
from rgpu.session.errors import Corrupt, Fenced, RgpuError
from rgpu.session.record import RecordReader

log = structlog.get_logger(__name__)

ATTACH, CALLS, BYE, PING, STATS = 1, 2, 3, 4, 5
ATTACHED, ANSWER, WATERMARK, NOTICE, PONG = 16, 17, 18, 19, 20
PIECE = 1 << 20  #: longest piece of an answer's payload in one frame
WATERMARK_INTERVAL = 0.0005  #: seconds between two watermarks that no answer asks for
SIGN_OF_LIFE = 2.0  #: seconds of silence after which the agent is told that the worker is there
STICKY = 1

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode

#: (event, values): attached, detached, stats, bye
Report = Callable[[str, dict[str, Any]], None]


class AgentLink:
    """See the module docstring. ``report`` is called from the link's threads."""

    def __init__(self, connection: SealedConnection, runtime: SessionRuntime, report: Report,
                 modules: ModuleCache | None = None) -> None:
        self.connection = connection
        self.runtime = runtime
        self.report = report
        self._stream = ModuleStream(modules, lambda kind, body: self._queue.put(("raw", (kind, body))))
        self._queue: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._progress_queued = threading.Event()
        self._closed = threading.Event()
        self._last_watermark: tuple[Any, ...] | None = None
        self._published = 0
        self._receiver = threading.Thread(target=self._receive, name="agent-link", daemon=True)
        self._sender = threading.Thread(target=self._send, name="agent-send", daemon=True)

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
            reader, stream = RecordReader(), self._stream
            while True:
                kind, body = self.connection.recv()
                if kind in (CALLS, CALLS_REF):
                    data = stream.take(kind, body)
                    if data is not None:
                        self.runtime.feed(reader.feed(data))
                elif kind == PING:
                    if not stream.waiting:  # else what it asks about was dropped; the agent asks again
                        self._queue.put(("raw", (PONG, bytes(body))))
                elif kind == HAVE:
                    stream.have(body)
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
            if feeding:
                self.runtime.hand_back()
            self.close()
            self.report("detached", {"reason": reason, "link": id(self)})

    def _check_attach(self) -> None:
        kind, body = self.connection.recv()
        if kind != ATTACH:
            raise Corrupt(f"the first message is of type {kind}, not ATTACH", reason="protocol")
        request = _map(body)
        if request.get("session") != self.runtime.session or request.get("epoch") != self.runtime.epoch:
            raise Fenced(f"attach for {request.get('session')} epoch {request.get('epoch')}; here is "
                         f"{self.runtime.session} epoch {self.runtime.epoch}")
        published = request.get("delivered")
        self._published = published if isinstance(published, int) else 0

    def _attach(self) -> None:
        self.connection.send(ATTACHED, _encode({"epoch": self.runtime.epoch, "next": self.runtime.applied + 1,
                                                "state": "running"}))
        for seq, result, reply, payload in self.runtime.attach(self.deliver, self._published):
            self.deliver(seq, result, reply, payload)
        self.runtime.device.on_progress(self._progressed)
        self._progressed()
        self.report("attached", {"link": id(self)})

    # -- sending ------------------------------------------------------------------
    def deliver(self, seq: int, result: int, reply: bytes, payload: bytes) -> None:
        """Queue an answer; called from device threads."""
        self._queue.put(("answer", (seq, result, reply, payload)))

    def notice(self, kind: str, **values: Any) -> None:
        self._queue.put(("raw", (NOTICE, _encode({"kind": kind, "epoch": self.runtime.epoch, **values}))))

    def _progressed(self) -> None:
        if not self._progress_queued.is_set():
            self._progress_queued.set()
            self._queue.put(("progress", None))

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
                    elif not self.runtime.paused:
                        # Not while it stands still for a move: if nobody ever tells this worker how
                        # the move ended, its silence makes the agent ask for the owner.
                        self.connection.send(PONG, bytes(8))
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

    def _send_watermark(self) -> None:
        self._progress_queued.clear()
        done, error, streams = self.runtime.watermark()
        state = (done, error, tuple(sorted(streams.items())))
        if state == self._last_watermark:
            return
        changed = [item for item in state[2] if not self._last_watermark or item not in self._last_watermark[2]]
        self._last_watermark = state
        body = struct.pack("<QII", done, error, len(changed)) + b"".join(struct.pack("<QQ", *item) for item in changed)
        self.connection.send(WATERMARK, body)

    def _send_answer(self, seq: int, result: int, reply: bytes, payload: bytes) -> None:
        flags = STICKY if self.runtime.executor.error and result == self.runtime.executor.error else 0
        head = struct.pack("<QiII", seq, result, flags, len(reply)) + reply
        view = memoryview(payload)
        more = len(view) > PIECE
        self.connection.send(ANSWER, b"\x01" if more else b"\x00", head, view[:PIECE])
        at = PIECE
        while more:
            more = at + PIECE < len(view)
            self.connection.send(ANSWER, b"\x01" if more else b"\x00", view[at:at + PIECE])
            at += PIECE

    def finish(self, timeout: float = 1.0) -> None:
        """Send what is queued, then close."""
        self._queue.put(("stop", None))
        if self._sender.is_alive():
            self._sender.join(timeout)
        self.close()

    def close(self) -> None:
        self._closed.set()
        self.runtime.detach(self.deliver)
        self._queue.put(("stop", None))
        self.connection.close()


def _map(body: Any) -> dict[str, Any]:
    try:
        value = _decode(body)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"a message from the agent is no msgpack: {error}", reason="msgpack") from error
    if not isinstance(value, dict):
        raise Corrupt("a message from the agent is no map", reason="msgpack")
    return value
