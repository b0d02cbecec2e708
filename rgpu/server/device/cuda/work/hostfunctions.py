"""Host functions on the GPU: a stream that stops until the program's function has run (SEMANTICS 19).

The stream waits on a word of pinned memory (``cuStreamWaitValue32``), never in
a callback of the driver: while a callback runs, no other call may be made, and
the function's answer would have to be one. An event in front of the wait shows
when the stream got there; a thread polls these events while any is open.

Source: CUDA driver API, "Stream Memory Operations". A word is used again only
when its wait is known to be over; each use waits for a higher value, compared
cyclically by the device (CU_STREAM_WAIT_VALUE_GEQ).

A function may be *released* before its ``host_function_done`` is applied
(rgpu.server.worker.apply.lookahead): its word is written then. It stays open until that
record is applied, so that decisions by the journal's order depend on it alone.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from cuda.bindings import driver

from rgpu.checkpoint.device import Done
from rgpu.server.device.cuda.errors import STICKY, check
from rgpu.session.errors import DeviceError

WORDS = 4096  #: host functions that may be open at one time
POLL = 0.00005  #: seconds between two polls
CUDA_ERROR_INVALID_HANDLE = 400
CUDA_ERROR_NOT_READY = 600
CUDA_ERROR_OUT_OF_MEMORY = 2


class HostFunctions:
    """The open host functions of one device. ``is_complete(seq)`` returns whether a call is complete.

    ``opened(whether)`` is called, at each that is opened or returns, with whether any is open; ``returned(seq)`` when
    a stream need not stop at a function any more.
    """

    def __init__(self, context: Any, is_complete: Callable[[int], bool], on_error: Callable[[int, str], None],
                 opened: Callable[[bool], None], returned: Callable[[int], None]) -> None:
        self._context = context
        self._is_complete = is_complete
        self._on_error = on_error
        self._opened, self._returned = opened, returned
        self._changed = threading.Condition()
        self._words: Any = None
        self._values = [0] * WORDS
        self._free: deque[int] = deque(range(WORDS))
        self._used: deque[tuple[int, int]] = deque()  #: (call, word), oldest first; free again when complete
        self._open: dict[int, int] = {}  #: call → word, until host_function_done
        self._released: set[int] = set()  #: of the open ones, those whose stream was released already
        self._coming: list[tuple[int, Any, Done]] = []  #: (call, event in front of the wait, reached)
        self._stopped = False
        self._thread: threading.Thread | None = None

    def enqueue(self, seq: int, stream: Any, reached: Done) -> tuple[Any, ...]:
        """Stop the stream, whose context is current, at call ``seq``; returns the driver's result for the wait."""
        with self._changed:
            self._prepare()
            word = self._take()
            value = self._values[word] = (self._values[word] + 1) & 0x7FFFFFFF
            event = check(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING), "cuEventCreate")
            check(driver.cuEventRecord(event, stream), "cuEventRecord")
            self._open[seq] = word
            self._opened(True)
            self._used.append((seq, word))
            self._coming.append((seq, event, reached))
            result: tuple[Any, ...] = driver.cuStreamWaitValue32(
                stream, self._address(word), value, driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
            self._changed.notify_all()
        return result

    def done(self, seq: int) -> None:
        """Record that the program's function has returned: the stream continues, or does not stop if it is not there
        yet.

        Raises DeviceError(400) for no such call.
        """
        with self._changed:
            if seq not in self._open:
                raise DeviceError(f"call {seq} is no open host function", CUDA_ERROR_INVALID_HANDLE)
            self._let_go(seq)

    @property
    def held(self) -> bool:
        """Whether a function is open and was not released. Implements
        :class:`rgpu.server.worker.apply.lookahead.Gates`."""
        return len(self._open) > len(self._released)

    def is_open(self, call: int) -> bool:
        """Whether the call is a host function that was not released."""
        return call in self._open and call not in self._released

    def release(self, call: int) -> None:
        """Release the stream before :meth:`done`, without the lock, which other threads hold inside the driver.

        Used while the applying thread waits, so no word is handed out meanwhile.
        """
        word = self._open.get(call)
        if word is not None:
            self._released.add(call)
            self._words[word] = self._values[word]
            self._returned(call)

    @property
    def open(self) -> bool:
        """Whether some host function was submitted to a stream and has not returned."""
        return bool(self._open)

    def stop(self) -> None:
        """Release every stream and end the thread."""
        with self._changed:
            self._stopped = True
            for seq in list(self._open):
                self._let_go(seq)
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(5)

    def _prepare(self) -> None:
        if self._words is None:
            memory = check(driver.cuMemHostAlloc(4 * WORDS, driver.CU_MEMHOSTALLOC_PORTABLE), "cuMemHostAlloc")
            self._words = (ctypes.c_uint32 * WORDS).from_address(int(memory))
            for index in range(WORDS):
                self._words[index] = 0
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="cuda-host-functions", daemon=True)
            self._thread.start()

    def _address(self, word: int) -> int:
        return ctypes.addressof(self._words) + 4 * word

    def _take(self) -> int:
        while self._used and self._used[0][0] not in self._open and self._is_complete(self._used[0][0]):
            self._free.append(self._used.popleft()[1])
        if not self._free:
            raise DeviceError(f"more than {WORDS} host functions are open", CUDA_ERROR_OUT_OF_MEMORY)
        return self._free.popleft()

    def _let_go(self, seq: int) -> None:
        word = self._open.pop(seq)
        self._released.discard(seq)
        self._words[word] = self._values[word]
        self._returned(seq)
        self._opened(bool(self._open))

    def _watch(self) -> None:
        driver.cuCtxSetCurrent(self._context)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._coming)
                if self._stopped:
                    return
                arrived = self._arrived()
            for reached, result in arrived:
                reached(result, None)
            if not arrived:
                time.sleep(POLL)

    def _arrived(self) -> list[tuple[Done, int]]:
        """Take the functions whose stream got there; after a sticky error all of them, and no stream stops."""
        arrived: list[tuple[Done, int]] = []
        left = []
        for seq, event, reached in self._coming:
            (status,) = driver.cuEventQuery(event)
            result = int(status)
            if result == CUDA_ERROR_NOT_READY:
                left.append((seq, event, reached))
                continue
            driver.cuEventDestroy(event)
            if result in STICKY:
                self._on_error(result, driver.CUresult(result).name)
                if seq in self._open:
                    self._let_go(seq)
            arrived.append((reached, result))
        self._coming = left
        return arrived
