"""A device that fails: its errors are not the program's to see, and its sessions go elsewhere (OWNERSHIP 9)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.eventually import eventually
from tests.support.pools.pool import LocalPool, Program, VerbError
from tests.support.pools.staged import line

RIGHT = hashlib.sha256(b"right").hexdigest()
SICK = "its memory does not hold what was written"


class Pool(LocalPool):
    """Two nodes, and devices that can be broken."""

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
        (self.folder / "new").write_text("cpu.launch:ecc")
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


def test_an_error_of_the_hardware_is_recovered_and_the_program_is_not_told(tmp_path: Path) -> None:
    """The device works again when it is looked at: the session goes on where it was."""
    with Pool(tmp_path) as pool:
        program = pool.restless("s")
        pool.ecc()
        row = pool.on("s", 2)
        assert row["host"] == "node-a" and "died of an uncorrectable ECC error of cpu:0" in pool.reasons("s")
        assert pool.of_hosts()["node-a"]["healthy"]
        program.wait_lines(len(program.lines) + 2, seconds=30)
        pool.release(program)


def test_a_device_that_does_not_work_gives_its_sessions_away(tmp_path: Path) -> None:
    """All of them, not only the one whose kernel met it; and it takes no new ones."""
    with Pool(tmp_path) as pool:
        programs = [pool.restless(name) for name in ("s", "t")]
        Path(f"{pool.fault}.broken.cpu:0").write_text(SICK)
        pool.ecc()
        for name in ("s", "t"):
            assert pool.on(name, 2)["host"] == "node-b", pool.reasons(name)
        sick = pool.of_hosts()["node-a"]
        assert not sick["healthy"] and sick["reason"].startswith(SICK) and pool.of_hosts()["node-b"]["healthy"]
        assert "unhealthy" in pool.reasons("s") + pool.reasons("t")
        refused = pool.run(*line("restless", tmp_path / "released"), name="u", options=("--host", "node-a"))
        assert refused.process.wait(60) != 0
        pool.until(lambda: SICK in " ".join(refused.errors), 10)
        with pytest.raises(VerbError, match="unhealthy"):
            pool.rgpu("migrate", "s", "node-a")
        pool.release(*programs)
