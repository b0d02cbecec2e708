"""Answers of a session: made by device threads, delivered to the agent, kept until the program has observed them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from rgpu.server.apply_path import ApplyPath
from rgpu.session.answers import RetainedAnswers

#: (seq, CUresult, encoded reply arguments, payload)
Deliver = Callable[[int, int, bytes, Any], None]


class KeptAnswers:
    """See the module docstring. ``path`` keeps the answers of calls that it applies itself. Thread-safe."""

    def __init__(self, path: ApplyPath) -> None:
        self.retained = RetainedAnswers()
        self.unanswered: set[int] = set()  #: awaited calls that were applied and have no answer yet
        self._path = path
        self._deliver: Deliver | None = None  #: where answers go while an agent is attached
        self._lock = threading.Lock()
        self._made = threading.Condition(self._lock)

    # -- the applying thread ------------------------------------------------------
    def expect(self, seq: int) -> None:
        """Note that an awaited call is about to be applied."""
        with self._lock:
            self.unanswered.add(seq)

    def wait(self, seq: int, seconds: float) -> bool:
        """Whether the answer to a call is made within ``seconds``."""
        with self._lock:
            return self._made.wait_for(lambda: seq not in self.unanswered, seconds)

    def observed(self, seq: int) -> None:
        """Note that the program has observed that call."""
        with self._lock:
            self.retained.observed(seq, seq in self.unanswered)

    # -- device threads -------------------------------------------------------------
    def answered(self, seq: int, result: int, reply: bytes, payload: bytes) -> None:
        """Keep an answer, and deliver it where an agent is attached."""
        with self._lock:
            self.unanswered.discard(seq)
            self._made.notify_all()
            self.retained.answered(seq, result, reply, payload)
            deliver = self._deliver
        if deliver is not None:
            deliver(seq, result, reply, payload)

    # -- the agent's link -----------------------------------------------------------
    def attach(self, deliver: Deliver) -> list[tuple[int, int, bytes, bytes]]:
        """Send answers to ``deliver`` from now on. Return those that were not yet observed."""
        with self._lock:
            self._deliver = deliver
            self._path.attach()
            return self.retained.unobserved()

    def detach(self, deliver: Deliver) -> None:
        """Undo :meth:`attach`, unless another link is attached by now."""
        with self._lock:
            if self._deliver == deliver:
                self._deliver = None
                self._path.detach()

    # -- the state --------------------------------------------------------------------
    def rows(self) -> list[list[Any]]:
        """Return every answer that the program might not have, for a checkpoint or a move: rows of seq, result, reply,
        payload.
        """
        return sorted(self.retained.as_list() + [list(row) for row in self._path.retained()])

    def replace(self, rows: list[Any]) -> list[int]:
        """Hold the rows that :meth:`rows` returned elsewhere, and no others. Return the calls that may be observed yet.

        Raises :class:`Corrupt`.
        """
        with self._lock:
            self.retained = RetainedAnswers.from_list(rows)
            self.unanswered.clear()
            return [row[0] for row in self.retained.unobserved()]
