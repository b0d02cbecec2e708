"""One session from its begin to its verdict: the program runs, its plan is carried out, its digest is compared."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.chaos.disturb import Deed, Disturber
from bench.chaos.plan import Plan
from bench.chaos.pool import ChaosPool
from bench.chaos.running import Running, first_difference
from rgpu.session.errors import PoolUnavailable, RgpuError
from tests.support.processes import state

#: Seconds for which what has its own moment waits until what was asked of the pool before is over.
CALM = 5.0
ENDED, GRACE = 5.0, 60.0  #: seconds after which checkpoints of ended sessions go, and what no checkpoint needs
#: Times its patience that a program has to come to its first step (imports, compilers), and a recovery to its end.
SLOW = 3.0
LONG_GAP = 60.0  #: seconds between two steps above which it is looked into, though the session ended well
STARTS = 5  #: of a run that no node answers
SAME, WRONG, LOST, HUNG, LATE = "same", "WRONG", "LOST", "HUNG", "LATE"


@dataclass(frozen=True)
class Reference:
    """What a kind of program gives undisturbed."""

    digest: str
    marks: tuple[str, ...]
    seconds: float


@dataclass
class Case:
    """What became of one session. ``gap``: the longest silence between two of its steps, before step ``gap_step``."""

    plan: Plan
    verdict: str = ""
    text: str = ""
    gap: float = 0.0
    gap_step: int = 0
    seconds: float = 0.0
    deeds: list[Deed] = field(default_factory=list)
    evidence: str = ""  #: the folder of what was kept of a failure, or of a gap longer than ``LONG_GAP``


@dataclass(frozen=True)
class Limits:
    """``patience``: seconds of silence after the last disturbance that are too many; ``stop``: of
    ``time.monotonic``, from when on nothing is disturbed any more; ``late``: by when programs have to have ended."""

    patience: float
    stop: float
    late: float


class SessionRun:
    """Use once: :meth:`run`. ``over`` is set when everything is broken off."""

    def __init__(self, pool: ChaosPool, plan: Plan, command: list[str], steps: int, memory: str,
                 environment: dict[str, str], reference: Reference, limits: Limits, folder: Path,
                 over: threading.Event) -> None:
        self.pool, self.plan, self.steps, self.reference, self.limits = pool, plan, steps, reference, limits
        self.folder, self.over = folder, over
        self.name = f"{plan.kind}-{plan.number}"
        self.case = Case(plan)
        self._applied: Any = None  #: calls, by its worker
        self._got_on = 0.0  #: when it was last seen to get on
        self._standing: tuple[Any, Any] = (None, None)  #: its epoch and state when they were last asked for
        self._command = [sys.executable, "-m", "rgpu.cli.main", "run", "--name", self.name, "--memory", memory,
                         "--queue", "--", *command]
        alone = {"RGPU_RESIDENT": "off"}  # `rgpu run` is its own agent, which is disturbed
        self._environment = {**pool.environment, **environment, **alone}
        self._start()

    def _start(self) -> None:
        self.program = Running(self._command, self._environment, self.folder / self.name)
        self.disturber = Disturber(self.pool, self.name, self.program.process.pid)

    def run(self) -> Case:
        began = time.monotonic()
        try:
            self._begin()
            self._disturb()
            self._judge()
        finally:
            if self.case.verdict != SAME or self.program.gap > LONG_GAP:
                self._keep_evidence()
            self.program.end()
            self.disturber.finish(20)
            self.case.gap, self.case.gap_step = self.program.gap, self.program.gap_step
            self.case.seconds = time.monotonic() - began
            self._clear()
        return self.case

    def _clear(self) -> None:
        """End the session where it still lives; images of those that ended make room, as an operator sees to it."""
        with contextlib.suppress(RgpuError, OSError):
            if self.case.verdict != SAME:
                self.pool.ask("session.kill", {"session": self.name})
            self.pool.ask("image.gc", {"keep_last": None, "max_age": None, "ended": ENDED, "grace": GRACE,
                                       "dry_run": False}, timeout=60)

    def _begin(self) -> None:
        """Wait for its first step. A run that no node answers is started again, as its user would: the plans of other
        sessions may have ended or frozen every daemon for some seconds."""
        for _ in range(STARTS - 1):
            self._until(lambda: bool(self.program.marks))
            if self.program.alive or self.program.marks or self.program.wait(10) != PoolUnavailable.exit_code:
                return
            self._start()

    # -- the plan -------------------------------------------------------------------------------
    def _disturb(self) -> None:
        for fault in self.plan.faults:
            if fault.after is None:
                ready = self._until(lambda at=fault.at: len(self.program.marks) >= at * self.steps)
                ready = ready and self._until_calm()
            else:
                later = time.monotonic() + fault.after
                ready = self._until(lambda later=later: time.monotonic() >= later)
            deed = Deed(fault, len(self.program.marks), time.monotonic() - self.program.began)
            self.case.deeds.append(deed)
            if not ready or time.monotonic() > self.limits.stop:
                deed.outcome = f"missed: {self._why()}"
                continue
            self.disturber.strike(deed)

    def _until(self, reached: Any) -> bool:
        """Whether it came so far while the program runs and is well."""
        while self.program.alive and not self.case.verdict and not self.over.is_set():
            if reached():
                return True
            self._watch()
            time.sleep(0.005)
        return False

    def _why(self) -> str:
        if self.case.verdict:
            return f"the session was {self.case.verdict}"
        return "time was up" if self.program.alive else "the program was over"

    def _until_calm(self) -> bool:
        until = time.monotonic() + CALM
        return self._until(lambda: not self.disturber.busy or time.monotonic() > until)

    def _watch(self) -> None:
        """Silence of the program, since it was last disturbed or its session got on, is a verdict."""
        now = time.monotonic()
        quiet = now - max(self.program.last, self.disturber.busy_until, self._got_on)
        if quiet > self.limits.patience * (1.0 if self.program.marks else SLOW) and not self._gets_on(now):
            self.case.verdict = HUNG
            self.case.text = f"silent for {quiet:.0f} s after step {len(self.program.marks)} of {self.steps}"
        elif now > self.limits.late:
            self.case.verdict = LATE
            self.case.text = f"only at step {len(self.program.marks)} of {self.steps} when time was up"

    def _gets_on(self, now: float) -> bool:
        """Whether its worker is further in its calls than when that was last asked (a replay prints nothing), or the
        pool has decided about it since: others' plans kill daemons, too, and its recovery begins again then. Decisions
        alone do for :data:`SLOW` times the patience after the last step; so does a pool that cannot say."""
        row = self.pool.row(self.name)
        applied, standing = row.get("applied"), (row.get("epoch"), row.get("state"))
        further = isinstance(applied, int) and applied != self._applied
        decided = not row or row["state"] != "running" or standing != self._standing
        if further:
            self._applied = applied
        self._standing = standing
        if further or decided and now - self.program.last < SLOW * self.limits.patience:
            self._got_on = now
            return True
        return False

    def _judge(self) -> None:
        while self.program.alive and not self.case.verdict and not self.over.is_set():
            self._watch()
            time.sleep(0.05)
        if self.over.is_set() and not self.case.verdict:
            self.case.verdict, self.case.text = LATE, "broken off"
        if self.case.verdict:
            return
        code = self.program.wait(10)
        marks = self.program.marks
        differs = first_difference(marks, self.reference.marks)
        at = "" if differs is None else f"; differs from step {differs}: {marks[differs]}, " \
            f"undisturbed {self.reference.marks[differs]}"
        if code or not self.program.digest:
            self.case.verdict = LOST
            self.case.text = f"ended with {code} after step {len(marks)} of {self.steps}{at}: {self.program.errors()}"
        elif self.program.digest != self.reference.digest:
            self.case.verdict, self.case.text = WRONG, at[2:] or "only what is digested at the end differs"
        else:
            self.case.verdict = SAME

    # -- what is kept of a failure, and of a long gap ---------------------------------------------
    def _keep_evidence(self) -> None:
        """Its output stands there already; logs of daemons and workers, the history and events, and who does what."""
        folder = self.folder / f"{self.name}-{'slow' if self.case.verdict == SAME else 'failed'}"
        folder.mkdir(exist_ok=True)
        self.case.evidence = str(folder)
        for suffix in (".out", ".err"):
            with contextlib.suppress(OSError):
                shutil.copy(self.program.log.with_suffix(suffix), folder)
        (folder / "plan.txt").write_text("".join(f"{deed}\n" for deed in self.case.deeds))
        asked = {"describe": ("session.describe", {"session": self.name}),
                 "history": ("pool.history", {"session": self.name, "limit": 500}),
                 "events": ("pool.history", {"limit": 1000}),
                 "list": ("session.list", {"all": True, "all_users": True}),
                 "nodes": ("node.list", {})}
        for name, (verb, args) in asked.items():
            with contextlib.suppress(RgpuError, OSError):
                (folder / f"{name}.json").write_text(json.dumps(self.pool.ask(verb, args), indent=1, default=str))
        for path in self.pool.folder.rglob("*.log"):
            if "workers" in path.parts and self.name not in path.parts:
                continue
            with contextlib.suppress(OSError):
                shutil.copy(path, folder / "-".join(path.relative_to(self.pool.folder).parts))
        (folder / "processes.txt").write_text("".join(map(_process, self.pool.processes())))


def _process(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        where = Path(f"/proc/{pid}/wchan").read_text()
        return f"{pid} {state(pid)} {where} {words}\n"
    return ""
