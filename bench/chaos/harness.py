"""Runs it all: references first, then sessions side by side until time is up; ends whatever it started."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.chaos import catalog, sockets
from bench.chaos.catalog import Kind, Missing
from bench.chaos.plan import DECK, session_plan
from bench.chaos.pool import ChaosPool
from bench.chaos.running import SKIPPED, Running
from bench.chaos.session import SAME, Case, Limits, Reference, SessionRun

ROOM = 1.4  #: times its pace that a session is given before no further one begins
AFTER = 60.0  #: seconds after its time in which what still runs may end


@dataclass(frozen=True)
class Options:
    """See ``python -m bench.chaos --help``."""

    device: str
    kinds: tuple[Kind, ...]
    seed: int
    only: tuple[int, ...]
    minutes: float
    jobs: int
    faults: int
    pace: float
    scale: float
    patience: float
    nodes: int
    lease: float
    store_bytes: int
    sessions: int


class Chaos:
    """``missing``: what could not be run here, and why. ``scratch``: the pool's folder; ``logs``: what is kept."""

    def __init__(self, options: Options, scratch: Path, logs: Path, say: Callable[[str], None]) -> None:
        self.options, self.scratch, self.logs, self.say = options, scratch, logs, say
        self.cases: list[Case] = []
        self.missing: dict[str, str] = {}
        self.deaths = 0
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._until = time.monotonic() + 60 * options.minutes
        self._environment = catalog.environment(scratch)
        self._running: list[Running] = []
        self._native = not options.device.startswith("cpu")

    def run(self) -> None:
        options = self.options
        references = self._references() if self._native else {}
        pool = ChaosPool(self.scratch / "p", options.device, options.nodes, options.lease, options.store_bytes)
        with pool:
            try:
                references = references or self._references(pool)
                self._sessions(pool, references, self._disturbances(pool))
            finally:
                self.deaths = pool.deaths

    def _disturbances(self, pool: ChaosPool) -> list[str]:
        """Those that can be done here."""
        reasons = {"full store": pool.no_store, "cut link": sockets.unavailable()}
        self.missing |= {what: reason for what, reason in reasons.items() if reason}
        return [what for what in DECK if what not in self.missing]

    # -- undisturbed ------------------------------------------------------------------------------
    def _references(self, pool: ChaosPool | None = None) -> dict[str, Reference]:
        """Of each kind that runs here; side by side. Natively each twice, at another pace: what differs by itself
        says nothing."""
        wanted = self.options.kinds
        if self.options.only:
            names = [kind.name for kind in wanted]
            mine = {session_plan(self.options.seed, number, names, self.options.faults).kind
                    for number in self.options.only}
            wanted = tuple(kind for kind in wanted if kind.name in mine)
        found = {}
        with ThreadPoolExecutor(min(self.options.jobs, 8)) as threads:
            try:
                for kind, one in zip(wanted, threads.map(lambda kind: self._reference(kind, pool), wanted),
                                     strict=True):
                    if isinstance(one, Reference):
                        found[kind.name] = one
                        self.say(f"undisturbed {kind.name:18s} {one.seconds:6.1f} s {one.digest[:16]}")
                    else:
                        self.missing[kind.name] = one
                        self.say(f"not run: {kind.name}: {one}")
            except BaseException:
                self._end_all()
                raise
        return found

    def _reference(self, kind: Kind, pool: ChaosPool | None) -> Reference | str:
        """The reason, where there is none."""
        steps = kind.steps(self.options.device, self.options.scale)
        found: list[Reference] = []
        for turn, pace in enumerate((0.0, min(10.0, self.options.pace / 4)) if pool is None else (0.0,)):
            began = time.monotonic()
            try:
                command = kind.command(self.options.device, self.scratch / "bin", steps, pace)
            except Missing as missing:
                return str(missing)
            if pool is not None:
                command = [sys.executable, "-m", "rgpu.cli.main", "run", "--name", f"still-{kind.name}", "--memory",
                           kind.memory, "--queue", "--", *command]
            environment = dict(pool.environment if pool else os.environ) | self._environment
            program = self._begin(command, environment, self.logs / f"{kind.name}-undisturbed-{turn}")
            code = program.wait(max(30.0, min(240.0, self._until - time.monotonic())))
            program.end()
            if code == SKIPPED:
                return program.skip
            if code or not program.digest:
                return f"undisturbed it ends with {code}: {program.errors()}"
            found.append(Reference(program.digest, tuple(program.marks), time.monotonic() - began))
        if len({one.digest for one in found}) > 1:
            return "two native runs differ: it says nothing"
        return found[0]

    def _begin(self, command: list[str], environment: dict[str, str], log: Path) -> Running:
        with self._lock:
            if self._over.is_set():
                raise KeyboardInterrupt
            program = Running(command, environment, log)
            self._running.append(program)
        return program

    def _end_all(self) -> None:
        self._over.set()
        with self._lock:
            for program in self._running:
                program.end()

    # -- disturbed ----------------------------------------------------------------------------------
    def _sessions(self, pool: ChaosPool, references: dict[str, Reference], can: list[str]) -> None:
        """A thread for each that runs at a time; each takes the next number."""
        names = [kind.name for kind in self.options.kinds]
        numbers = iter(self.options.only) if self.options.only else itertools.count()
        if self.options.sessions and not self.options.only:
            numbers = iter(range(self.options.sessions))
        threads = [threading.Thread(target=self._work, args=(pool, references, can, names, numbers))
                   for _ in range(self.options.jobs)]
        try:
            for number, thread in enumerate(threads):
                thread.start()
                time.sleep(0.0 if self.options.only else min(0.5, self.options.pace / 40 / (number + 1)))
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.5)
        except BaseException:
            self._over.set()
            for thread in threads:
                if thread.ident is not None:
                    thread.join(60)
            raise

    def _work(self, pool: ChaosPool, references: dict[str, Reference], can: list[str], names: list[str],
              numbers: itertools.count[int]) -> None:
        while not self._over.is_set() and (self.options.sessions or self.options.only
                                           or time.monotonic() + ROOM * self.options.pace < self._until):
            with self._lock:
                number = next(numbers, None)
            if number is None:
                return
            plan = session_plan(self.options.seed, number, names, self.options.faults, can)
            if plan.kind not in references:
                continue  # said already
            self._one(pool, references[plan.kind], plan.number, can, names)

    def _one(self, pool: ChaosPool, reference: Reference, number: int, can: list[str], names: list[str]) -> None:
        options = self.options
        plan = session_plan(options.seed, number, names, options.faults, can)
        kind = catalog.BY_NAME[plan.kind]
        limits = Limits(options.patience, self._until, self._until + AFTER)
        steps = kind.steps(options.device, options.scale)
        run = SessionRun(pool, plan, kind.command(options.device, self.scratch / "bin", steps, options.pace), steps,
                         kind.memory, self._environment, reference, limits, self.logs, self._over)
        try:
            case = run.run()
        except Exception as error:  # noqa: BLE001 - a mistake of the harness is shown as its session's, not lost
            case = run.case
            case.verdict, case.text = "LATE", f"the harness: {type(error).__name__}: {error}"
        with self._lock:
            self.cases.append(case)
        done = sum(deed.done for deed in case.deeds)
        self.say(f"{case.verdict:5s} {plan.kind:18s} session {number:3d} {case.seconds:6.1f} s, {done} of "
                 f"{len(case.deeds)} disturbances, longest gap {case.gap:.1f} s"
                 + (f": {case.text}" if case.verdict != SAME else ""))
