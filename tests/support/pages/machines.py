"""Machines as namespaces: a network address, a host name, and an /etc, /opt, /var/lib, /srv and /home of their own.

On each there is a shell that keeps what is exported from one block of a page to the next.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.pages import standin
from tests.support.pages.page import Block
from tests.support.pools.hosts import Network
from tests.support.pools.pool import ROOT

STAND_INS = ("systemctl", "runuser", "useradd", "apt-get")
TOKEN = re.compile(r"rgpu-join-[A-Za-z0-9_-]{40,}")
PLACEHOLDER = "rgpu-join-…"
#: The one thing that pages say and these machines have not.
INSTEAD = (("cuda:0", "cpu"), ("rgpu-live[cuda]", "rgpu-live"))

_SETUP = '''
set -e
hostname {name}
mount --bind {folder}/etc /etc
for place in /opt /var/lib /srv /home /run; do mount -t tmpfs none $place; done
mkdir -p /opt/rgpu /srv/rgpu /home/user /var/lib/etcd
mount --bind {package} /opt/rgpu
mount --bind {shared} /srv/rgpu
echo ready
exec sleep infinity
'''


class Machine:
    """One of them. ``package``: the virtual environment that stands at /opt/rgpu; ``shared``: at /srv/rgpu."""

    def __init__(self, name: str, space: str, folder: Path, hosts: str, package: Path, shared: Path) -> None:
        self.name, self.folder, self.output = name, folder, ""
        folder.mkdir(parents=True)
        shutil.copytree("/etc", folder / "etc", symlinks=True)
        (folder / "etc" / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        (folder / "etc" / "rgpu").mkdir(exist_ok=True)
        tools = folder / "bin"
        tools.mkdir()
        for tool in STAND_INS:
            (tools / tool).write_text(f'#!/bin/sh\nexec {sys.executable} -S {standin.__file__} {tool} "$@"\n')
            (tools / tool).chmod(0o755)
        script = _SETUP.format(name=name, folder=folder, package=package, shared=shared)
        self._holder = subprocess.Popen(
            ["ip", "netns", "exec", space, "unshare", "--mount", "--uts", "sh", "-c", script],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True)
        assert self._holder.stdout is not None
        said = self._holder.stdout.readline()
        assert said == "ready\n", said + self._holder.stdout.read()
        kept = ("LANG", "TERM", "RGPU_SPARES", "RGPU_PAGE_LANES")
        environment = {key: os.environ[key] for key in kept if key in os.environ}
        environment |= {"PATH": f"{tools}:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/home/user", "PYTHONUNBUFFERED": "1"}
        environment.setdefault("RGPU_SPARES", "0")
        self._shell = subprocess.Popen(
            ["nsenter", "-t", str(self._holder.pid), "--mount", "--net", "--uts", f"--wd={ROOT}", "bash"],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True)

    def sh(self, commands: str, seconds: float = 300.0, check: bool = True) -> str:
        """What they print, standard error with it. Fails where one of them does, unless not ``check``."""
        assert self._shell.stdin is not None and self._shell.stdout is not None
        script = self.folder / "block"
        script.write_text(("set -e\n" if check else "set +e\n") + commands)
        mark = f"-- {time.monotonic_ns()}"
        watch = subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -9 {self._shell.pid}"], start_new_session=True)
        try:
            self._shell.stdin.write(f". {script}; printf '\\n{mark} %s\\n' $?\n")
            self._shell.stdin.flush()
            lines: list[str] = []
            for line in self._shell.stdout:
                if line.startswith(mark):
                    return "".join(lines).removesuffix("\n")
                lines.append(line)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(watch.pid, signal.SIGKILL)
            watch.wait()
        raise AssertionError(f"on {self.name}, a command failed or took longer than {seconds:.0f} s:\n{commands}\n"
                             f"{''.join(lines)[-4000:]}\n{self.logs()}")

    def logs(self) -> str:
        """The ends of its services' logs."""
        done = subprocess.run(["nsenter", "-t", str(self._holder.pid), "--mount", "sh", "-c",
                               "tail -n 25 /run/stand-in/*.log"], capture_output=True, text=True)
        return done.stdout[-6000:]

    def processes(self) -> list[int]:
        """All that run on it: those that see its files."""
        own, found = os.readlink(f"/proc/{self._holder.pid}/ns/mnt"), []
        for path in Path("/proc").glob("[0-9]*/ns/mnt"):
            with contextlib.suppress(OSError):
                if os.readlink(path) == own:
                    found.append(int(path.parts[2]))
        return found

    def destroy(self) -> None:
        """kill -9 of everything on it; its files are gone with its namespace."""
        if self._holder.poll() is None:
            for pid in sorted(self.processes(), key=lambda one: one == self._holder.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._holder.wait(10)
        with contextlib.suppress(ProcessLookupError):
            self._shell.kill()
        self._shell.wait(10)


class Machines:
    """Those of one network, by name; use as a context manager."""

    def __init__(self, folder: Path, network: Network, package: Path) -> None:
        self._folder, self._network, self._package = folder, network, package
        self._shared = folder / "shared"
        self._shared.mkdir(parents=True)
        self.machines: dict[str, Machine] = {}
        self.token = ""
        self.done: list[str] = []  #: what was run, for a transcript

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *error: object) -> None:
        for machine in self.machines.values():
            machine.destroy()

    def __getitem__(self, name: str) -> Machine:
        return self.machines[name]

    def boot(self, name: str) -> Machine:
        """A machine of that name, new: also one that takes a destroyed one's place."""
        hosts = "".join(f"{address} {host}\n" for host, address in self._network.hosts.items())
        number = len(list(self._folder.glob(f"{name}.*")))
        self.machines[name] = Machine(name, self._network.space(name), self._folder / f"{name}.{number}", hosts,
                                      self._package, self._shared)
        return self.machines[name]

    def run(self, found: list[Block], where: dict[str, tuple[str, ...]], seconds: float = 300.0) -> str:
        """The blocks, one after the other, on the machines that ``where`` names for their words; what all printed."""
        said = []
        for block in found:
            assert block.where in where, f"{block.page}:{block.line}: nobody is called {block.where!r}"
            for name in where[block.where]:
                commands = block.commands
                for before, instead in INSTEAD:
                    commands = commands.replace(before, instead)
                if PLACEHOLDER in commands:
                    assert self.token, f"{block.page}:{block.line}: nothing printed an invitation before"
                    commands = commands.replace(PLACEHOLDER, self.token)
                commands = "".join(line for line in commands.splitlines(True) if not _brings_the_package(line))
                began = time.monotonic()
                printed = self[name].sh(commands, seconds)
                tokens = TOKEN.findall(printed)
                self.token = tokens[-1] if tokens else self.token
                self.done.append(f"{name}# {commands}{printed}\n({time.monotonic() - began:.1f} s)\n")
                said.append(printed)
        return "\n".join(said)


def _brings_the_package(line: str) -> bool:
    """The package is at /opt/rgpu already: a virtual environment for each machine would be minutes of the same."""
    return "-m venv" in line or "pip install" in line
