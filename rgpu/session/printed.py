"""Delivery of the text that kernels print to the program: counted, kept until it is delivered. Pure.

Kept by the worker. Positions are counts of bytes since the session's beginning,
so they have the same meaning in every worker that ever holds the session: text
that a replay prints again is counted again from the checkpoint's count on, and
dropped as far as the program has received it. Text of blocks that run side by
side may be printed in another order in a replay; only the count is preserved
(docs/developers/devices.md, "Device printf").
"""

from __future__ import annotations

from collections import deque
from typing import Any

from rgpu.session.errors import Corrupt

MAX_KEPT = 1 << 30  #: bytes that a state may carry: far more than a worker keeps


class PrintedText:
    """See the module docstring. Not locked: the caller orders its threads.

    ``produced``: bytes printed so far. ``delivered``: bytes that the program's
    side is known to have; larger than ``produced`` while a replay catches up.
    """

    def __init__(self, produced: int = 0, kept: bytes = b"") -> None:
        self.produced = produced
        self.delivered = 0
        self.discarding = False  #: the text is only counted, not delivered
        self._unsent: deque[bytes] = deque([kept] if kept else [])
        self._sent: deque[bytes] = deque()  #: sent, but not known to be delivered
        self._begin = produced - len(kept)  #: position of the first byte kept
        self._next = self._begin  #: position of the first byte not sent
        self.size = len(kept)  #: bytes kept

    @property
    def unsent(self) -> bool:
        """Whether :meth:`take` has text to return."""
        return bool(self._unsent)

    def add(self, text: bytes) -> None:
        """Add text that kernels printed."""
        begin = self.produced
        self.produced += len(text)
        if self.discarding or self.produced <= self.delivered:
            self._forget()
        elif text:
            if begin < self.delivered:  # the replay has caught up within this piece
                text = text[self.delivered - begin:]
                self._begin = self._next = self.delivered
            self._unsent.append(text)
            self.size += len(text)

    def take(self, most: int) -> tuple[int, bytes] | None:
        """Return the next text to send: (position, at most ``most`` bytes). It is kept until it is delivered."""
        if not self._unsent:
            return None
        piece = self._unsent.popleft()
        if len(piece) > most:
            self._unsent.appendleft(piece[most:])
            piece = piece[:most]
        position = self._next
        self._next += len(piece)
        self._sent.append(piece)
        return position, piece

    def attach(self, delivered: int | None) -> None:
        """Begin a connection whose other side has the first ``delivered`` bytes. None: it takes no text."""
        self._unsent.extendleft(reversed(self._sent))
        self._sent.clear()
        self._next = self._begin
        self.discarding = delivered is None
        if delivered is None:
            self._forget()
        else:
            self._drop(delivered)

    def confirm(self, delivered: int) -> None:
        """Note that the program's side has ``delivered`` bytes. Raises :class:`Corrupt` for more than were sent."""
        if delivered > max(self._next, self.delivered):
            raise Corrupt(f"{delivered} bytes of printed text are confirmed, {self._next} were sent",
                          reason="printed text")
        self._drop(delivered)

    def discard(self) -> None:
        """Count further text without keeping it, and drop the text that is kept."""
        self.discarding = True
        self._forget()

    def _drop(self, delivered: int) -> None:
        self.delivered = max(self.delivered, delivered)
        if self.delivered >= self.produced:
            self._forget()
            return
        while self._begin < self.delivered:
            queue = self._sent or self._unsent
            piece = queue.popleft()
            surplus = self._begin + len(piece) - self.delivered
            if surplus > 0:
                queue.appendleft(piece[len(piece) - surplus:])
            gone = len(piece) - max(0, surplus)
            self._begin += gone
            self.size -= gone
        self._next = max(self._next, self._begin)

    def _forget(self) -> None:
        self._sent.clear()
        self._unsent.clear()
        self._begin = self._next = self.produced
        self.size = 0

    def as_state(self) -> list[Any]:
        """Return the state for a checkpoint or a move: [produced, the last bytes, which might not be delivered]."""
        return [self.produced, b"".join((*self._sent, *self._unsent))]

    @staticmethod
    def from_state(state: Any) -> PrintedText:
        """Invert :meth:`as_state`; None (of an older version) is no text. Raises :class:`Corrupt`."""
        if state is None:
            return PrintedText()
        if not isinstance(state, list | tuple) or len(state) != 2:
            raise Corrupt("printed text is no pair of a count and bytes", reason="printed text")
        produced, kept = state
        if type(produced) is not int or not isinstance(kept, bytes) or len(kept) > MAX_KEPT \
                or not len(kept) <= produced < 1 << 63:
            raise Corrupt("the count of printed text does not go with its bytes", reason="printed text")
        return PrintedText(produced, kept)
