"""A user's systemd, where the machine was not booted with one: in a mount namespace with a /run of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tests.support.eventually import eventually

_RUNTIME = "/run/user/0"
#: systemd looks for /run/systemd/system to know whether the machine runs it; the groups are its part of each hierarchy.
_START = """mount -t tmpfs none /run && mkdir -p /run/systemd/system /run/lock {runtime} && chmod 700 {runtime} &&
for group in {groups}; do mkdir $group && echo $$ > $group/cgroup.procs || exit; done &&
XDG_RUNTIME_DIR={runtime} exec systemd --user"""


def hierarchies() -> list[Path]:
    """The control groups in which systemd keeps its units: version 2's alone, or beside the named one of version 1."""
    top = Path("/sys/fs/cgroup")
    return [path for path in (top, top / "unified", top / "systemd") if (path / "cgroup.procs").exists()]


def unavailable() -> str:
    """Say why there can be no such systemd here; "" where it can."""
    missing = [name for name in ("systemd", "systemd-run", "systemctl", "unshare", "nsenter") if not shutil.which(name)]
    if missing:
        return f"there is no {missing[0]} here (Debian: systemd, util-linux)"
    if os.geteuid():
        return "this is not root"
    found = hierarchies()
    return "" if found and all(os.access(path, os.W_OK) for path in found) else \
        "no writable hierarchy of control groups for systemd"


class UserManager:
    """systemd --user of root, its units in a control group of its own; ended with all its units on exit."""

    def __init__(self) -> None:
        self.groups = [path / f"rgpu-test-{os.getpid()}" for path in hierarchies()]
        self.process: subprocess.Popen[bytes] | None = None

    def members(self, unit: str) -> set[int]:
        """The processes of a unit, as the kernel counts them."""
        found = {path for group in self.groups for path in group.rglob(unit)}
        return {int(pid) for path in found for pid in (path / "cgroup.procs").read_text().split()}

    def __enter__(self) -> UserManager:
        start = _START.format(runtime=_RUNTIME, groups=" ".join(map(str, self.groups)))
        self.process = subprocess.Popen(["unshare", "--mount", "sh", "-c", start], stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL, start_new_session=True)
        asked = ("systemctl", "--user", "is-system-running")
        eventually(lambda: self.run(*asked).stdout.strip() in ("running", "degraded"),
                   "the user's systemd does not run", 30)
        return self

    def inside(self, *command: str) -> list[str]:
        """The command as it is run with that systemd in reach."""
        assert self.process is not None
        return ["nsenter", "--mount", f"--target={self.process.pid}", f"--wd={os.getcwd()}",
                "env", f"XDG_RUNTIME_DIR={_RUNTIME}", *command]

    def run(self, *command: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.inside(*command), env=environment, capture_output=True, text=True, timeout=60)

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self.inside(*command), env=environment, stdin=subprocess.DEVNULL)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGRTMIN + 4)  # systemd(1): ends its units, then itself
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        # What it was given in one hierarchy it makes in those of the controllers, too.
        for group in {*self.groups, *Path("/sys/fs/cgroup").glob(f"*/{self.groups[0].name}")}:
            for folder in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
                folder.rmdir()
            group.rmdir()
