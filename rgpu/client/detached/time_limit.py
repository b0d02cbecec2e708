"""The time limit of a run: which signals its program gets, and when. Pure but for the classes that send them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from rgpu.link.local.processes import alive, family, signal_program
from rgpu.link.loggers import get_logger

log = get_logger(__name__)

KILL_AFTER = 30.0  #: seconds
LOOK_SECONDS = 1.0  #: on a host that was suspended a longer wait would end too late


@dataclass(frozen=True, slots=True)
class Step:
    """One signal. ``at``: seconds after the program's start. ``ends``: why the run ended, if it ends by this."""

    at: float
    number: int
    ends: str


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """Limit in seconds. ``seconds``: after the program's start; 0: none. ``kill_after``: from SIGTERM to SIGKILL.

    ``warning``: number of a signal, sent ``warning_before`` seconds before the limit; 0: none.
    """

    seconds: float = 0.0
    kill_after: float = KILL_AFTER
    warning: int = 0
    warning_before: float = 0.0

    def steps(self) -> list[Step]:
        """Return the signals to send, in order."""
        if not self.seconds:
            return []
        why = f"its time limit of {duration(self.seconds)} was reached: SIGTERM"
        found = [Step(self.seconds, signal.SIGTERM, why),
                 Step(self.seconds + self.kill_after, signal.SIGKILL,
                      f"{why}, and SIGKILL {duration(self.kill_after)} later")]
        if self.warning:
            found.insert(0, Step(max(0.0, self.seconds - self.warning_before), self.warning, ""))
        return found


AT_ONCE = TimeLimit(0.001)


def duration(seconds: float) -> str:
    """Return seconds as text in the largest unit that is exact: ``90 s``, ``15 min``, ``2 h``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length and seconds % length == 0 and (seconds > length or unit != "min"):
            return f"{seconds / length:g} {unit}"
    return f"{seconds:g} s"


def clock() -> float:
    """Return the seconds since the host's start, including those in which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Timekeeper:
    """Sends a program the signals of a time limit. ``tell``: called once with each reason for the run's end."""

    def __init__(self, limit: TimeLimit, pid: int, begun: float, tell: Callable[[str], None]) -> None:
        """``begun``: when the program was started, by :func:`clock`."""
        self._left, self._pid, self._begun, self._tell = limit.steps(), pid, begun, tell
        self._kill_at = limit.seconds + limit.kill_after
        self._over = threading.Event()
        self._family: list[tuple[int, str]] = []  #: processes that the program had started when its time was over

    def start(self) -> None:
        """Keep the time in a thread of its own, until :meth:`stop`."""
        if self._left:
            threading.Thread(target=self._run, name="time-limit", daemon=True).start()

    def stop(self) -> None:
        """Send nothing more: the program has ended."""
        self._over.set()

    def await_rest(self) -> None:
        """Wait, after the program's end by the limit, for the processes that it had started, and kill them when due."""
        last = self._begun + self._kill_at
        while rest := [pid for pid, started in self._family if alive(pid, started)]:
            if clock() >= last:
                for pid in rest:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return
            time.sleep(0.05)

    def _run(self) -> None:
        while self._left and not self._over.wait(min(LOOK_SECONDS, max(0.01, self.left()))):
            self.look()

    def left(self) -> float:
        """Return the seconds to the next signal; a day where none is left."""
        return self._begun + self._left[0].at - clock() if self._left else 86400.0

    def look(self) -> None:
        """Send the signals that are due."""
        while self._left and self.left() <= 0 and not self._over.is_set():
            step = self._left.pop(0)
            if step.ends:
                self._tell(step.ends)
                self._family = family(self._pid)
            log.info("a signal by the time limit", pid=self._pid, signal=step.number, reason=step.ends)
            with contextlib.suppress(ProcessLookupError):
                signal_program(self._pid, step.number)


class Ending:
    """Ends a program on demand, independent of its time limit: SIGTERM, and SIGKILL after :data:`KILL_AFTER`."""

    def __init__(self, pid: int) -> None:
        self._pid, self._over = pid, False
        self._lock = threading.Lock()
        self._keeper: Timekeeper | None = None

    def now(self) -> None:
        """Begin to send the signals; from any thread, only the first call counts."""
        with self._lock:
            if not self._over and self._keeper is None:
                self._keeper = Timekeeper(AT_ONCE, self._pid, clock(), lambda why: None)
                self._keeper.start()

    def stop(self) -> None:
        """Send nothing more: the program has ended. Wait for its other processes, as :meth:`Timekeeper.await_rest`."""
        with self._lock:
            self._over = True
        if self._keeper is not None:
            self._keeper.stop()
            self._keeper.await_rest()
