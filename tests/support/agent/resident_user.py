"""A user of `rgpu run` with a folder of residents of its own, on a fake pool."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.agent.fake_pool import FakePool
from tests.support.eventually import eventually
from tests.support.processes import state

ROOT = Path(__file__).parents[3]
#: Prints how many threads its parent has: one where that is not the agent, too.
THREADS_ABOVE = ("sh", "-c", "ls /proc/$PPID/task | wc -l")


class ResidentUser:
    """Use as a context manager. ``environment``: of its runs."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.pool = FakePool(folder / "pool")
        self.runtime = Path(tempfile.mkdtemp(prefix="rgpu-user-"))  # short: a socket's path is
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RGPU_")},
            "RGPU_POOL": str(self.pool.files.root), "RGPU_JOURNAL_DIR": str(folder / "journal"), "RGPU_CONFIG": "",
            "RGPU_SHIM_DIR": str(library), "RGPU_QUIET": "1", "XDG_RUNTIME_DIR": str(self.runtime),
            "PYTHONPATH": str(ROOT)}

    @property
    def folder(self) -> Path:
        """Of the residents."""
        return self.runtime / "rgpu-residents"

    def __enter__(self) -> ResidentUser:
        return self

    def __exit__(self, *error: object) -> None:
        found = self.residents()
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        for pid in found:
            eventually(lambda pid=pid: state(pid) in ("", "Z"), f"resident {pid} did not end")  # type: ignore[misc]
        self.pool.stop()
        shutil.rmtree(self.runtime, ignore_errors=True)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "rgpu.cli.main", "run", *arguments]

    def start(self, *arguments: str, resident: bool = True, **more: Any) -> subprocess.Popen[str]:
        """`rgpu run` with those arguments; ``more``: of Popen."""
        environment = {**self.environment, **more.pop("env", {}), **({} if resident else {"RGPU_RESIDENT": "off"})}
        given = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
        return subprocess.Popen(self.command(*arguments), env=environment, text=True, **given)

    def run(self, *arguments: str, resident: bool = True, said: str = "", **more: Any) -> tuple[int, str, str]:
        """The same, to its end: status, output, errors. ``said``: on its stdin."""
        process = self.start(*arguments, resident=resident, **more)
        out, err = process.communicate(said, timeout=60)
        return process.returncode, out, err

    def ready(self) -> int:
        """Have one resident listen; its pid."""
        for _ in range(2):  # the first run may find one that is about to end
            assert self.run("--lazy", "--", "true")[0] == 0
        (pid,) = eventually(lambda: list(self.folder.glob("*.sock")) and not list(self.folder.glob("*.begun"))
                            and self.residents(), lambda: self.files())
        assert self.served(), self.files()
        return pid

    def served(self, *options: str, **more: Any) -> bool:
        """Whether a run with those options has another process for its agent."""
        code, out, err = self.run("--lazy", *options, "--", *THREADS_ABOVE, **more)
        assert code == 0 and int(out) >= 1, (code, out, err)
        return int(out) == 1

    def residents(self) -> list[int]:
        """Living ones."""
        found = []
        for path in self.folder.glob("*.lock"):
            with contextlib.suppress(OSError, ValueError):
                if state(pid := int(json.loads(path.read_text())["pid"])) not in ("", "Z"):
                    found.append(pid)
        return found

    def files(self) -> dict[str, str]:
        """The residents' files, and what stands in them."""
        return {path.name: path.read_text(errors="replace") if path.suffix != ".sock" else ""
                for path in self.folder.glob("*")}


def agents(resident: int) -> list[int]:
    """Agents that it forked and that live."""
    try:
        found = Path(f"/proc/{resident}/task/{resident}/children").read_text().split()
    except OSError:
        return []
    return [int(pid) for pid in found if state(int(pid)) not in ("", "Z")]
