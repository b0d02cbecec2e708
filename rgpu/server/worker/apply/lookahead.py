"""Reads ahead while a driver call may wait for the device, so that streams waiting at host functions go on.

A stream that waits at a host function goes on at ``host_function_done``. Some
calls of the driver wait for the device (loading a module, registering or
unregistering host memory; CUDA C++ Programming Guide, "Implicit
Synchronization"), and while the applying thread is inside one, that record
lies unread behind it: the two would wait for each other. So before such a call, with a
host function open, the records that the agent has sent are read ahead and only *scanned*:
a ``host_function_done`` among them releases its stream at once (a word of memory is
written, no driver call is made). The records themselves are applied later, in
their order; the flag is then set already, and nothing is done twice.

This lets work run earlier that the program had submitted before, behind
a function that has returned. All work that the program could have seen complete
by then was applied: the program would have awaited it. In a replay these observations
stand in the journal (``completed``), so the scan ends at an observation of
the waiting call or of a later one: when the program ran, the calls in front of it
had been applied before the function returned. At an observation of an earlier call it
goes on once that call is complete here, too: the function may have returned because of it.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from isal.isal_zlib import crc32

from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_NAME
from rgpu.session.journal.record import HEADER, HEADER_SIZE, MAGIC, MAX_ARGS, MAX_PAYLOAD, padded

#: Calls that the driver may answer only when the device is idle, or that take a lock which such calls hold.
MAY_WAIT = frozenset(BY_NAME[name].id for name in (
    "context_destroy", "context_limit", "memory_map", "memory_unmap", "memory_alias", "memory_unalias", "memory_move",
    "module_load", "function_load",
    "cluster_occupancy", "host_allocate", "host_free", "stream_destroy", "graph_instantiate", "graph_exec_update",
    "graph_exec_destroy", "array_create", "array_destroy", "texture_create", "texture_place", "texture_destroy"))
PATIENCE = 0.5  #: seconds that such a call is delayed for the program's functions; then it is made in a thread
READS = 64  #: messages read ahead between two checks
STEP = 4096  #: bytes scanned between two checks
_DONE, _COMPLETED = BY_NAME["host_function_done"].id, BY_NAME["completed"].id
_COVERED = 36  #: bytes of a header under its own checksum


class Gates(Protocol):
    """The host functions of a device at which a stream may wait."""

    @property
    def held(self) -> bool:
        """Whether one of them was not released."""

    def is_open(self, call: int) -> bool:
        """Whether the call is a host function that was not released."""

    def release(self, call: int) -> None:
        """Release the stream that waits, or will wait, at host function ``call``; unknown ones are ignored.

        It makes no driver call and takes no lock that is held during one.
        """


class DoneScanner:
    """Finds ``host_function_done`` in a stream of records that begins with a whole one and is cut anywhere.

    ``position``: the call that waits. ``skip``: bytes in front of that record. ``complete``: whether an applied
    call is complete.
    Bytes that it cannot decode end the scan without an error: the reader that
    applies the stream reports the fault.
    """

    def __init__(self, position: int, skip: int = 0, complete: Callable[[int], bool] = lambda call: True) -> None:
        self._position, self._complete = position, complete
        self._observed = 0  #: the call that has to be complete before the scan goes on
        self._rest = bytearray()  #: not looked at yet
        self._held = bytearray()  #: of a header, or of a record that is looked at whole
        self._need = HEADER_SIZE
        self._skip = skip  #: bytes to the next record
        self.ended = False  #: nothing more will be found

    def feed(self, data: Any) -> list[int]:
        """Return the host functions whose return is recorded in ``data``."""
        if self.waits:
            self._rest += data
            return []
        view, at = memoryview(bytes(self._rest) + bytes(data) if self._rest else data).cast("B"), 0
        self._rest.clear()
        found: list[int] = []
        while at < len(view) and not self.ended and not self._observed:
            if self._skip:
                step = min(self._skip, len(view) - at)
                self._skip -= step
            else:
                step = min(self._need - len(self._held), len(view) - at)
                self._held += view[at:at + step]
                if len(self._held) == self._need:
                    self._look(found)
            at += step
        if self._observed:
            self._rest += view[at:]
            return found + self.feed(b"")
        return found

    @property
    def waits(self) -> bool:
        """Whether the scan stands at an observation of a call that is not complete here."""
        if self._observed and self._complete(self._observed):
            self._observed = 0
        return bool(self._observed)

    def _look(self, found: list[int]) -> None:
        magic, call, _, seq, _, args_len, payload_len, _, crc = HEADER.unpack_from(self._held)
        if magic != MAGIC or args_len > MAX_ARGS or payload_len > MAX_PAYLOAD:
            self.ended = True
            return
        if call in (_DONE, _COMPLETED) and len(self._held) == HEADER_SIZE and args_len:
            self._need = HEADER_SIZE + args_len
            return
        if call in (_DONE, _COMPLETED):
            args = bytes(self._held[HEADER_SIZE:])
            if crc32(args, crc32(self._held[:_COVERED])) != crc or len(args) != 8:
                self.ended = True
                return
            values = decoders.decode(call, args)
            if call == _DONE and values.call < seq:
                found.append(values.call)
            if call == _COMPLETED:
                self.ended = values.observed >= self._position
                self._observed = 0 if self.ended else values.observed
        self._skip = HEADER_SIZE + padded(args_len) + padded(payload_len) - len(self._held)
        self._held.clear()
        self._need = HEADER_SIZE


class LookAhead:
    """Releases streams at host functions whose end stands behind a call that waits.

    ``position``: that call. ``pieces``: bytes read behind it already; ``skip``: bytes of the call at their beginning.
    ``read_ahead(seconds)``: returns the next bytes that arrive within that time, kept to be fed later; None: no link.
    ``complete``: whether an applied call is. ``most``: bytes that are scanned at most.
    """

    def __init__(self, gates: Gates, position: int, pieces: Iterable[Any], skip: int,
                 read_ahead: Callable[[float], Any] | None, complete: Callable[[int], bool],
                 most: float = math.inf) -> None:
        self._gates, self._read_ahead, self._left = gates, read_ahead, most
        self._scanner = DoneScanner(position, skip, complete)
        self._pieces = deque(memoryview(piece).cast("B") for piece in pieces)

    def look(self) -> bool:
        """Scan what has arrived. Return whether the scan ended, as where the journal has the waiting call complete."""
        self._take(b"")
        while self._pieces and self._goes_on():
            piece = self._pieces.popleft()
            self._take(piece[:STEP])
            if len(piece) > STEP:
                self._pieces.appendleft(piece[STEP:])
        for _ in range(READS):
            if self._pieces or self._read_ahead is None or not self._goes_on():
                break
            if not len(data := self._read_ahead(0.0)):
                break
            self._take(data)
        return self._scanner.ended

    def _goes_on(self) -> bool:
        return not (self._scanner.ended or self._scanner.waits) and self._left > 0 and self._gates.held

    def _take(self, data: Any) -> None:
        if self._left > 0:
            self._left -= len(data)
            for call in self._scanner.feed(data):
                self._gates.release(call)


class Under:
    """A driver call that runs in a thread of its own."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._error: BaseException | None = None
        self._finished = threading.Event()
        threading.Thread(target=self._work, name="slow-call", daemon=True).start()

    def _work(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - raised by check(), where the call belongs
            self._error = error
        finally:
            self._finished.set()

    def returned(self, seconds: float) -> bool:
        """Whether the call returns within ``seconds``."""
        return self._finished.wait(seconds)

    def check(self) -> None:
        """Raise the exception of the call, which has returned, if it raised one."""
        if self._error is not None:
            raise self._error
