"""Carries out the disturbances of one session's plan. What was asked of the pool goes on while the next one comes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from bench.chaos import sockets
from bench.chaos.plan import InjectedFault
from bench.chaos.pool import ChaosPool
from rgpu.session.errors import RgpuError
from tests.support.processes import state

FIND = 8.0  #: seconds to find the worker of a session that is being moved or recovered
UNBEGUN = ("refused", "not_found", "conflict", "pool_unavailable")  #: errors of what was not begun
FIRE = 25.0  #: seconds for a move to come to an armed step


@dataclass
class Deed:
    """What became of a fault, and at which step and second of the program.

    ``done …``; ``broken …``: begun, and broken off or left without an answer by what came on top of it; ``refused …``:
    the pool would not begin it; ``missed …``: there was nothing to disturb.
    """

    fault: InjectedFault
    step: int
    when: float
    outcome: str = "under way"

    @property
    def done(self) -> bool:
        """Whether it did disturb."""
        return self.outcome.startswith(("done", "broken"))

    def __str__(self) -> str:
        return f"{self.when:7.2f} s  step {self.step:5d}  {self.fault}: {self.outcome}"


class Missed(Exception):
    """There was nothing to disturb; the text says why."""


class Disturber:
    """``busy_until``: before then nobody may call the program hung, something of it still stands still."""

    def __init__(self, pool: ChaosPool, session: str, agent: int) -> None:
        self.pool, self.session, self.agent = pool, session, agent
        self.busy_until = time.monotonic()
        self._asking: list[threading.Thread] = []
        self._do: dict[str, Callable[[InjectedFault], str]] = {
            "kill worker": self._kill_worker, "freeze worker": self._freeze_worker, "kill daemon": self._kill_daemon,
            "freeze daemon": self._freeze_daemon, "cut link": self._cut_link, "freeze link": self._freeze_link,
            "move by copy": lambda fault: self._move("copy"), "move by replay": lambda fault: self._move("replay"),
            "checkpoint": lambda fault: self._checkpoint(), "full store": self._full_store,
            "leader dies in a move": self._leader_dies}

    def strike(self, deed: Deed) -> None:
        """Carry it out in a thread of its own; its outcome stands in the deed when that ends."""
        def work() -> None:
            try:
                deed.outcome = self._do[deed.fault.what](deed.fault)
            except (Missed, TimeoutError) as error:
                deed.outcome = f"missed: {error}"
            except RgpuError as error:
                deed.outcome = f"{'refused' if error.code in UNBEGUN else 'broken'}: {error.code}: {error}"
            except (OSError, KeyError) as error:
                deed.outcome = f"missed: {type(error).__name__}: {error}"
            self.busy_until = max(self.busy_until, time.monotonic())

        thread = threading.Thread(target=work, daemon=True)
        self._asking.append(thread)
        thread.start()

    @property
    def busy(self) -> bool:
        return any(thread.is_alive() for thread in self._asking)

    def finish(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        for thread in self._asking:
            thread.join(max(0.0, until - time.monotonic()))

    # -- who is who -------------------------------------------------------------------------
    def _worker(self) -> int:
        until = time.monotonic() + FIND
        while True:
            pid = self.pool.row(self.session).get("worker_pid") or 0
            if pid and state(pid) not in ("", "Z"):
                return int(pid)
            if time.monotonic() > until:
                raise Missed("no worker has the session")
            time.sleep(0.02)

    def _host(self, whom: str) -> str:
        own = str(self.pool.row(self.session).get("host") or self.pool.hosts[0])
        return own if whom == "own" else next(host for host in self.pool.hosts if host != own)

    def _freeze(self, pid: int, seconds: float) -> str:
        os.kill(pid, signal.SIGSTOP)
        self.busy_until = max(self.busy_until, time.monotonic() + seconds)
        try:
            time.sleep(seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        return "done"

    # -- processes and links --------------------------------------------------------------------
    def _kill_worker(self, fault: InjectedFault) -> str:
        os.kill(self._worker(), signal.SIGKILL)
        return "done"

    def _freeze_worker(self, fault: InjectedFault) -> str:
        return self._freeze(self._worker(), fault.seconds)

    def _kill_daemon(self, fault: InjectedFault) -> str:
        host = self._host(fault.whom)
        with self.pool.daemon(host) as pid:
            if fault.elsewhere:
                self.pool.move_ports(host)
            os.kill(pid, signal.SIGKILL)
        return f"done ({host})"

    def _freeze_daemon(self, fault: InjectedFault) -> str:
        host = self._host(fault.whom)
        with self.pool.daemon(host) as pid:
            return f"{self._freeze(pid, fault.seconds)} ({host})"

    def _freeze_link(self, fault: InjectedFault) -> str:
        """Nothing passes: the agent, which is the program's end of it, stands still."""
        return self._freeze(self.agent, fault.seconds)

    def _cut_link(self, fault: InjectedFault) -> str:
        """All of the agent's connections: to the worker, to those that answer for the pool."""
        count = sockets.cut(self.agent)
        if not count:
            raise Missed("the agent has no connection now")
        return f"done ({count} connections)"

    # -- verbs ------------------------------------------------------------------------------------
    def _move(self, mode: str) -> str:
        said = self.pool.ask("session.migrate", {"session": self.session, "host": self._host("other"),
                                                 "options": {"mode": mode}}, timeout=150)
        return f"done: {said['outcome']} by {said['mode']}, stopped {said['downtime_ms']:.0f} ms"

    def _checkpoint(self) -> str:
        said = self.pool.ask("session.checkpoint", {"session": self.session, "wait": True}, timeout=150)
        return f"done: {said.get('bytes', 0)} bytes at {said.get('position')}"

    def _full_store(self, fault: InjectedFault) -> str:
        """A checkpoint meanwhile and one afterwards."""
        with self.pool.full_store():
            until = time.monotonic() + fault.seconds
            meanwhile = self._tried_checkpoint()
            time.sleep(max(0.0, until - time.monotonic()))
        return f"done; a checkpoint meanwhile: {meanwhile}; after it: {self._tried_checkpoint()}"

    def _tried_checkpoint(self) -> str:
        try:
            return self._checkpoint()
        except RgpuError as error:
            return f"refused {error.code}"

    def _leader_dies(self, fault: InjectedFault) -> str:
        step, _, mode = fault.step.partition(", ")
        told: list[str] = []

        def move() -> None:
            try:
                told.append(self._move(mode))
            except RgpuError as error:
                told.append(f"{error.code}: {error}")

        with self.pool.armed(f"mover.{step}:kill") as fired:
            mover = threading.Thread(target=move, daemon=True)
            mover.start()
            until = time.monotonic() + FIRE
            while not fired.exists():
                if time.monotonic() > until or (told and not fired.exists()):
                    raise Missed(f"no move came to {step}: {told}")
                time.sleep(0.02)
        mover.join(60)
        return f"done; the move: {told[0] if told else 'no answer'}"
