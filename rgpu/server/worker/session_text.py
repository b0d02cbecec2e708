"""Text that a session's kernels print, between the device and the agent's link.

A device whose kernels can print offers a :class:`DeviceText` as its
attribute ``text``. Three kinds of thread use this module: the link's sender takes
pieces ahead of each watermark and answer, the applying thread pauses
while too much is under way, and the thread that takes the session's state collects
the rest. :class:`rgpu.session.printed.PrintedText` does the counting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from rgpu.session.printed import PrintedText

PIECE = 256 * 1024  #: longest piece of text in one message
LIMIT = 16 * 1024 * 1024  #: bytes under way, in the device and here, beyond which no further call is applied
STEP = 4096  #: bytes of the record stream applied between two checks of LIMIT


class DeviceText(Protocol):
    """A device's buffer of printed text that was not fetched yet. Thread-safe."""

    holds_stdout: bool  #: the device uses the process's standard output: nothing else may be put there

    @property
    def printing(self) -> bool:
        """Whether some kernel of the session may print, or has printed."""

    @property
    def waiting(self) -> int:
        """Bytes to be taken, as far as is known without :meth:`flush`."""

    def flush(self) -> None:
        """Make the text of completed work ready to be taken. Returns soon, whatever the device does."""

    def take(self, most: int) -> bytes:
        """Return the next bytes, ``most`` at most; empty: there are none."""


class SessionText:
    """See the module docstring. It costs nothing for a device that prints nothing."""

    def __init__(self, source: DeviceText | None) -> None:
        self._source = source
        self._book = PrintedText()
        self._lock = threading.Lock()
        self._owner: object = None  #: the link that sends it
        self._nudge: Callable[[], None] | None = None

    @property
    def printing(self) -> bool:
        """Whether there may be text, now or later."""
        return self._source is not None and self._source.printing or self._book.unsent

    @property
    def crowded(self) -> bool:
        """Whether more than :data:`LIMIT` is under way: no further call may be applied."""
        if self._source is None or not self._source.printing:
            return False
        if self._book.discarding and self._source.waiting > PIECE:
            self._collect()
        return self._source.waiting + self._book.size > LIMIT

    # -- the link ----------------------------------------------------------------
    def attach(self, owner: object, delivered: int | None, nudge: Callable[[], None]) -> None:
        """Let ``owner`` send from now on; its agent has the first ``delivered`` bytes (None: it takes no text)."""
        with self._lock:
            self._owner, self._nudge = owner, nudge
            self._book.attach(delivered)

    def confirm(self, owner: object, delivered: int) -> None:
        """Note that the agent has the first ``delivered`` bytes. Raises :class:`Corrupt`."""
        with self._lock:
            if owner is self._owner:
                self._book.confirm(delivered)

    def nudge(self) -> None:
        """Have the link send the text that is ready."""
        if self._nudge is not None:
            self._nudge()

    def pieces(self, owner: object) -> Iterator[tuple[int, bytes]]:
        """Yield (position, bytes) of the text that completed work has printed and ``owner`` has not sent."""
        source = self._source
        if not self.printing:
            return
        if source is not None:
            source.flush()
        left = source.waiting if source is not None else 0  # a kernel may go on printing for ever
        while True:
            with self._lock:
                if owner is not self._owner:
                    return
                if not self._book.unsent and source is not None and left > 0:
                    text = source.take(min(PIECE, left))
                    left = left - len(text) if text else 0
                    self._book.add(text)
                piece = self._book.take(PIECE)
            if piece is not None:
                yield piece
            elif left <= 0:
                return

    # -- the state ----------------------------------------------------------------
    def discard(self) -> None:
        """Drop printed text from now on: in a replay that another worker's state will end, or without a program."""
        with self._lock:
            self._book.discard()

    def state(self) -> list[Any]:
        """Return the state of a session whose work is complete: its byte count, and text perhaps not delivered yet."""
        if self.printing:
            if self._source is not None:
                self._source.flush()
            self._collect()
        with self._lock:
            return self._book.as_state()

    def restore(self, state: Any) -> None:
        """Continue from ``state``; text that this device printed so far is dropped.

        Raises :class:`Corrupt`.
        """
        book = PrintedText.from_state(state)
        if self._source is not None:
            self._source.flush()
            self._collect()
        with self._lock:
            self._book = book

    def _collect(self) -> None:
        assert self._source is not None
        with self._lock:
            while text := self._source.take(PIECE):
                self._book.add(text)
