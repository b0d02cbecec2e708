"""Callbacks before and after the moves of a session, for a program that runs in it.

A thread of their own reads the pool's events, as `rgpu events` does, and calls them. Nothing waits for them: a callback
delays neither the beginning nor the end of a move, however long it takes.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from rgpu.api import rows, verbs
from rgpu.link.control.control_client import ControlClient
from rgpu.session.errors import NotFound, PoolUnavailable, RgpuError

OUTCOMES = {"begin_move": "begun", "commit": "committed", "abort": "aborted"}  #: decision → outcome of a notice
_AGAIN_SECONDS = 1.0

Callback = Callable[[rows.MoveNotice], object]


class MoveWatch:
    """Callbacks before and after each move, until :meth:`close`; also a context manager.

    A forked child does not inherit it. When a callback raises, its traceback is printed; later moves call it again.
    """

    def __init__(self, client: ControlClient, session: Callable[[], str], run: str, before: Callback | None,
                 after: Callback | None) -> None:
        """``client``: closed after :meth:`close`. ``session()``: name of this process's session; raises NotFound."""
        self._client, self._session, self._run = client, session, run
        self._callbacks = {"begun": before, "committed": after, "aborted": after}
        _, self._since = verbs.past(client, 0)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rgpu-moves", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Call back no more. Return at once; a running callback continues."""
        self._closed.set()

    def __enter__(self) -> MoveWatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def _watch(self) -> None:
        with self._client:
            while not self._closed.is_set():
                try:
                    found = self._client.call("pool.events", {"since": self._since, "wait": verbs.WAIT_SECONDS},
                                              timeout=verbs.WAIT_SECONDS + 10)
                except PoolUnavailable:  # tried again from the same revision: no event is missed
                    time.sleep(_AGAIN_SECONDS)
                    continue
                except RgpuError:
                    traceback.print_exc()
                    return
                self._since = int(found["revision"])
                for event in found["events"]:
                    self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        name = str(event.get("session") or "")
        outcome = OUTCOMES.get(str(event.get("decision")))
        if outcome is None or name != self._run and not name.startswith(f"{self._run}/"):
            return
        callback = self._callbacks[outcome]
        if callback is None or self._closed.is_set():
            return
        try:
            if name != self._session():
                return
        except (NotFound, PoolUnavailable):  # this process has not used the GPU: the session is another process's
            return
        try:
            callback(rows.read(rows.MoveNotice, {**event, "outcome": outcome}))
        except Exception:  # noqa: BLE001 - raised by the program's own code
            traceback.print_exc()
