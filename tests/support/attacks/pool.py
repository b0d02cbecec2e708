"""A pool whose daemons may open few descriptors, and processes that attack one."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.support.attacks.measuring import server_state
from tests.support.pools.pool import ROOT, LocalPool


class NarrowPool(LocalPool):
    """A :class:`LocalPool` whose daemons may have ``descriptors`` open, and no more."""

    descriptors = 1024

    def rgpu(self, *verb: str, timeout: float = 90) -> Any:
        if verb[0] != "up":
            return super().rgpu(*verb, timeout=timeout)
        done = subprocess.run(["bash", "-c", f"ulimit -n {self.descriptors}; exec \"$@\"", "-", sys.executable, "-m",
                               "rgpu.cli.main", *verb, "-o", "json"], env=self.environment, cwd=ROOT, text=True,
                              capture_output=True, timeout=timeout)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def ports(self, host: str) -> list[int]:
        """The data and the control port of a node."""
        state = server_state(self, host)
        return [int(str(state[name]).rpartition(":")[2]) for name in ("data", "control")]


class Attack:
    """A module of :mod:`tests.support.attacks` as a process; its input's end stops it."""

    def __init__(self, pool: LocalPool, module: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"tests.support.attacks.{module}", *map(str, arguments)], env=pool.environment,
            cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def line(self) -> str:
        """The next line that it prints; empty once it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def stop(self) -> str:
        """End it; the rest of what it printed."""
        out, _ = self.process.communicate(timeout=60)
        return str(out).strip()
