"""What a session's kernels print, between the device and the agent's link.

A device that has kernels which print offers a :class:`DeviceText` as its
attribute ``text``. Three kinds of thread meet here: the link's sender takes
pieces ahead of each watermark and answer, the applying thread stands still
while too much is under way, and the taking of the session's state collects
what there is. The counting is :class:`rgpu.session.printed.PrintedText`'s.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from rgpu.session.printed import PrintedText

PIECE = 256 * 1024  #: longest piece of text in one message
LIMIT = 16 * 1024 * 1024  #: bytes under way, in the device and here, beyond which no further call is applied
STEP = 4096  #: bytes of the record stream applied between two looks at that


class DeviceText(Protocol):
    """Where a device keeps what kernels printed until it is fetched. Thread-safe."""

    holds_stdout: bool  #: the process's standard output is its own: nothing else may be put there

    @property
    def printing(self) -> bool:
        """Some kernel of the session may print, or has."""

    @property
    def waiting(self) -> int:
        """Bytes to be taken, as far as is known without :meth:`flush`."""

    def flush(self) -> None:
        """Make what complete work has printed ready to be taken. Returns soon, whatever the device does."""

    def take(self, most: int) -> bytes:
        """The next bytes, at most so many; empty: there are none."""


class SessionText:
    """See the module docstring. Of a device that prints nothing it costs nothing."""

    def __init__(self, source: DeviceText | None) -> None:
        self._source = source
        self._book = PrintedText()
        self._lock = threading.Lock()
        self._owner: object = None  #: the link that sends it
        self._nudge: Callable[[], None] | None = None

    @property
    def printing(self) -> bool:
        """There may be text, now or later."""
        return self._source is not None and self._source.printing or self._book.unsent

    @property
    def crowded(self) -> bool:
        """More is under way than may be: apply no further call."""
        if self._source is None or not self._source.printing:
            return False
        if self._book.discarding and self._source.waiting > PIECE:
            self._collect()
        return self._source.waiting + self._book.size > LIMIT

    # -- the link ----------------------------------------------------------------
    def attach(self, owner: object, delivered: int | None, nudge: Callable[[], None]) -> None:
        """``owner`` sends from now on; its agent has the first ``delivered`` bytes (None: takes no text)."""
        with self._lock:
            self._owner, self._nudge = owner, nudge
            self._book.attach(delivered)

    def confirm(self, owner: object, delivered: int) -> None:
        """The agent has so much. Raises :class:`Corrupt`."""
        with self._lock:
            if owner is self._owner:
                self._book.confirm(delivered)

    def nudge(self) -> None:
        """Have the link send what there is."""
        if self._nudge is not None:
            self._nudge()

    def pieces(self, owner: object) -> Iterator[tuple[int, bytes]]:
        """(position, bytes) of what all work that is complete now has printed and ``owner`` has not sent."""
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
        """What is printed goes nowhere: in a replay that another worker's state will end, or without a program."""
        with self._lock:
            self._book.discard()

    def state(self) -> list[Any]:
        """State of a session whose work is complete: its count, and what might not have been delivered."""
        if self.printing:
            if self._source is not None:
                self._source.flush()
            self._collect()
        with self._lock:
            return self._book.as_state()

    def restore(self, state: Any) -> None:
        """The session stands where ``state`` was taken; what this device printed so far is of no account.

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
