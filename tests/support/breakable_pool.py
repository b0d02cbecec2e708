"""A pool whose devices can be made to fail."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.eventually import eventually
from tests.support.pools.pool import LocalPool, Program
from tests.support.pools.staged import line

RIGHT = hashlib.sha256(b"right").hexdigest()


class BreakablePool(LocalPool):
    """Two nodes, and devices whose next kernel can be made to fail."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, nodes=2, lease=4.0)
        self.fault = folder / "fault"
        self.environment["RGPU_FAULT_FILE"] = str(self.fault)

    def restless(self, name: str, host: str = "node-a") -> Program:
        program = self.run(*line("restless", self.folder / "released"), name=name, options=("--host", host))
        program.wait_lines(3)
        return program

    def ecc(self) -> None:
        """The next kernel of any session ends with an uncorrectable ECC error."""
        self.fail("ecc")

    def fail(self, how: str) -> None:
        """Have the next kernel of any session fail: ``ecc``, or ``neighbour`` (as by another session under MPS)."""
        (self.folder / "new").write_text(f"cpu.launch:{how}")
        os.rename(self.folder / "new", self.fault)
        self.until(lambda: Path(f"{self.fault}.cpu.launch.fired").exists())

    def until(self, condition: Callable[[], Any], seconds: float = 60) -> Any:
        return eventually(condition, self.logs, seconds, every=0.05)

    def on(self, name: str, epoch: int) -> dict[str, Any]:
        """The session's row once it runs at that epoch, or a later one."""
        def row() -> dict[str, Any] | None:
            found = self.session(name)
            return found if found["epoch"] >= epoch and found["state"] == "running" else None

        return dict(self.until(row))

    def reasons(self, name: str) -> str:
        return " ".join(entry["reason"] for entry in self.rgpu("history", name))

    def of_hosts(self) -> dict[str, dict[str, Any]]:
        return {node["host"]: node["devices"][0] for node in self.living()}

    def release(self, *programs: Program) -> None:
        (self.folder / "released").touch()
        for program in programs:
            assert program.finish() == RIGHT
