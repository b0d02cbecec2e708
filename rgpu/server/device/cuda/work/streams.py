"""Completion on the GPU for calls from Python: the native engine reports it, a thread calls back.

The engine (:mod:`rgpu.server.device.cuda.engine`) tracks what is complete. Work that Python
submitted to a stream itself is reported to it with :meth:`Completion.submitted`;
:meth:`Completion.mark` calls back when a stream gets to a point.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from rgpu.checkpoint.device import Done
from rgpu.server.device.cuda.engine import Engine
from rgpu.server.fast_path import Piece, Took
from rgpu.session.errors import DeviceError

log = structlog.get_logger(__name__)

CALLBACK_POLL = 1.0  #: seconds between two checks whether the device closes


@dataclass
class StreamState:
    """One stream of the driver. ``device``: the session's number."""

    handle: Any
    device: int = 0


class Completion:
    """The streams by number, and the callbacks for when their work is complete."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self.streams: dict[int, StreamState] = {}
        self._actions: dict[int, list[Done]] = {}  #: by call
        self._watcher: threading.Thread | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._call_back, name="cuda-callbacks", daemon=True)

    def start(self) -> None:
        """Begin to watch for completed work."""
        self._thread.start()

    def add(self, number: int, handle: Any, context: int, device: int = 0) -> None:
        """Add a stream. ``context``: the driver's, in which it was made; ``device``: the session's number."""
        self.streams[number] = StreamState(handle, device)
        self._engine.add_stream(number, int(handle), context)

    def remove(self, number: int) -> None:
        """Remove a stream; its work still runs to its end."""
        del self.streams[number]
        self._engine.remove_stream(number)

    def submitted(self, stream: int, seq: int) -> None:
        """Record that the caller submitted work of call ``seq`` to the stream."""
        self._engine.submitted(stream, seq)

    def expect(self, seq: int, done: Done) -> None:
        """Let ``done`` receive the answer of the engine's next call ``seq``."""
        with self._lock:
            self._actions.setdefault(seq, []).append(done)

    def unexpect(self, seq: int) -> None:
        """Drop the last :meth:`expect` of a call that the engine refused."""
        with self._lock:
            if actions := self._actions.get(seq):
                actions.pop()
                if not actions:
                    del self._actions[seq]

    def mark(self, stream: int | None, seq: int, action: Callable[[int], None]) -> None:
        """Run ``action(CUresult)`` when all work of the stream (None: of any) so far is complete; as work ``seq``.

        Raises :class:`DeviceError` for an unknown stream.
        """
        self.expect(seq, lambda result, data: action(result))
        if result := self._engine.mark(stream or 0, seq, stream is None):
            self.unexpect(seq)
            raise DeviceError(f"stream {stream} does not exist", result)

    def mark_context(self, context: int, seq: int, action: Callable[[int], None]) -> None:
        """Run ``action(CUresult)`` when the work so far of all streams of one of the driver's contexts is complete."""
        self.expect(seq, lambda result, data: action(result))
        self._engine.mark_context(context, seq)

    def on_progress(self, notify: Callable[[], None]) -> None:
        """Call ``notify()`` whenever progress was made; for callers that do not take the engine's answers."""

        def watch() -> None:
            while not self._stopped:
                if self._engine.take(CALLBACK_POLL) is Took.PROGRESS:
                    notify()

        if self._watcher is None:
            self._watcher = threading.Thread(target=watch, name="cuda-progress", daemon=True)
            self._watcher.start()

    def stop(self) -> None:
        """Stop watching, and wait for the threads."""
        self._stopped = True
        self._engine.stop()
        for thread in (self._thread, self._watcher):
            if thread is not None:
                thread.join(5)

    def _call_back(self) -> None:
        while not self._stopped:
            piece = self._engine.take_callback(CALLBACK_POLL)
            if not isinstance(piece, Piece):
                continue
            data = self._engine.payload(piece.handle) if piece.result == 0 and piece.address else None
            if piece.result == 0 and data is None:
                data = b""
            with self._lock:
                actions = self._actions.get(piece.seq, [])
                action = actions.pop(0) if actions else None
                if not actions:
                    self._actions.pop(piece.seq, None)
            try:
                if action is not None:
                    action(piece.result, data)
            except Exception:  # noqa: BLE001 - one callback must not end all others
                log.exception("a completion callback failed", seq=piece.seq)
            finally:
                self._engine.release(piece)
