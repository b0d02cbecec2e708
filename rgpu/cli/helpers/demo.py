"""``rgpu demo``: a move and a recovery in a minute, on this machine, without a GPU.

Runs the same unmodified program twice: once undisturbed, and once while its
session is moved from node-a to node-b and node-b is then killed with -9. The
digests of the results must be equal.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import click

from rgpu.api.settings import Settings
from rgpu.cli import common
from rgpu.cli.pool import connect
from rgpu.session.errors import MoveFailed, NotFound, RecoveryFailed, RgpuError, TimedOut

SESSION = "demo"


@click.command("demo")
@click.option("--steps", default=1500, show_default=True, help="Time steps of the heat example.")
@click.option("--n", "cells", default=512, show_default=True, help="Cells in each direction.")
@common.output_option
@common.verb
def command(steps: int, cells: int, output: str) -> None:
    """Run a program on node-a, move it to node-b, kill node-b, see it end on node-c."""
    program = [sys.executable, str(_example()), "--n", str(cells), "--steps", str(steps), "--report", "25"]
    folder = tempfile.mkdtemp(prefix="rgpu-demo-")
    demo = Demo(Path(folder), program, quiet=output != "text")
    try:
        result = demo.run()
    finally:
        demo.stop()
    common.emit(result, output, lambda value: None)
    if not result["bit_exact"]:
        raise RecoveryFailed(f"the digests differ: {result['digest']} and {result['undisturbed_digest']}")


def _example() -> Path:
    """Path of the heat example: inside the package in a wheel (CMakeLists.txt), beside it in a checkout.

    Raises NotFound where neither has it, or where the packages that it imports are not installed.
    """
    package = Path(__file__).resolve().parents[2]
    found = [path for folder in (package, package.parent) if (path := folder / "examples" / "heat.py").is_file()]
    if not found:
        raise NotFound(f"examples/heat.py is neither in {package} nor beside it: install the package again")
    missing = [name for name in ("cuda.bindings", "cuda.core") if not _installed(name)] or _no_compiler()
    if missing:
        raise NotFound(f"the demonstration's program needs {' and '.join(missing)}: "
                       "pip install 'rgpu-live[examples]'")
    return found[0]


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def _no_compiler() -> list[str]:
    """The library that compiles the program's kernels, where it is not found."""
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        load_nvidia_dynamic_lib("nvrtc")
    except DynamicLibNotFoundError:
        return ["NVRTC (nvidia-cuda-nvrtc)"]
    return []


class Demo:
    """One demonstration in a folder of its own."""

    def __init__(self, folder: Path, program: list[str], quiet: bool) -> None:
        self.folder = folder
        self.program = program
        self.quiet = quiet
        self.lines: list[str] = []
        self.process: subprocess.Popen[str] | None = None
        self.environment = {**os.environ, "RGPU_POOL": str(folder / "pool"),
                            "RGPU_JOURNAL_DIR": str(folder / "journal"), "PYTHONUNBUFFERED": "1"}

    def say(self, text: str) -> None:
        """Print a line unless the demo is quiet."""
        if not self.quiet:
            common.out.print(text, markup=False)

    def rgpu(self, *arguments: str, timeout: float = 120) -> Any:
        """Run a verb with -o json. Raises the error that it reports."""
        done = subprocess.run([sys.executable, "-m", "rgpu.cli.main", *arguments, "-o", "json"], env=self.environment,
                              capture_output=True, text=True, timeout=timeout)
        if done.returncode:
            raise RgpuError(f"rgpu {' '.join(arguments)}: {done.stderr.strip()}")
        return json.loads(done.stdout)

    def run(self) -> dict[str, Any]:
        """Run the demo; returns its figures. Raises :class:`RgpuError` where a step fails."""
        began = time.monotonic()
        self.say("1. a pool of three nodes, each with a cpu device")
        self.rgpu("up", "--nodes", "3", "--device", "cpu", "--detach", "--no-supervise",
                  "--lease", "3")
        self.say("2. the program, undisturbed")
        undisturbed = self._undisturbed()
        self.say(f"   digest {undisturbed['digest']}  ({undisturbed['seconds']:.1f} s)")
        self.say("3. the program again, on node-a")
        started = time.monotonic()
        self._start("node-a")
        self._wait_lines(4)
        move = self._move()
        self._wait_lines(len(self.lines) + 3)
        kill = self._kill_owner()
        code = self._finish()
        seconds = time.monotonic() - started
        last = next(s for s in self.rgpu("ps", "--all") if s["session"] == SESSION)
        digest = self._digest(self.lines)
        if code or not digest:
            raise RecoveryFailed(f"the program ended with status {code}; its last words: {self.lines[-3:]}")
        exact = digest == undisturbed["digest"]
        self.say(f"   digest {digest}  ({seconds:.1f} s)")
        self.say(f"6. {'equal, bit for bit' if exact else 'DIFFERENT'}: the program never noticed"
                 f"  ({last['calls']} calls, of which {last['awaited_calls']} were awaited)")
        return {"bit_exact": exact, "digest": digest, "undisturbed_digest": undisturbed["digest"],
                "undisturbed_seconds": undisturbed["seconds"], "seconds": seconds, "move": move, "kill": kill,
                "calls": last["calls"], "awaited_calls": last["awaited_calls"],
                "exit_code": code, "total_seconds": time.monotonic() - began}

    def _undisturbed(self) -> dict[str, Any]:
        began = time.monotonic()
        done = subprocess.run(self._command("undisturbed", "node-a"), env=self.environment, capture_output=True,
                              text=True, timeout=280)
        digest = self._digest(done.stdout.splitlines())
        if done.returncode or not digest:
            raise RgpuError(f"the undisturbed run failed with status {done.returncode}: {done.stderr.strip()[-2000:]}")
        return {"digest": digest, "seconds": time.monotonic() - began}

    def _command(self, name: str, host: str) -> list[str]:
        return [sys.executable, "-m", "rgpu.cli.main", "run", "--name", name, "--host", host, "--", *self.program]

    def _start(self, host: str) -> None:
        self.process = subprocess.Popen(self._command(SESSION, host), env=self.environment, stdout=subprocess.PIPE,
                                        text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if len(self.lines) % 10 == 1:
                self.say(textwrap.indent(line.rstrip(), "   | "))

    def _wait_lines(self, count: int) -> None:
        assert self.process is not None
        deadline = time.monotonic() + 60
        while len(self.lines) < count:
            if self.process.poll() is not None:
                raise RgpuError(f"the program ended too early, with status {self.process.returncode}")
            if time.monotonic() > deadline:
                raise TimedOut("the program printed nothing for a minute")
            time.sleep(0.02)

    def _move(self) -> dict[str, Any]:
        # node-a is cordoned, as before maintenance: so the later recovery chooses node-c.
        with connect(Settings({"pool": self.environment["RGPU_POOL"]}), role="operator") as client:
            client.call("node.cordon", {"host": "node-a", "state": "cordoned", "reason": "maintenance"})
        self.say("4. node-a is cordoned; while it computes: rgpu migrate demo node-b")
        move: dict[str, Any] = self.rgpu("migrate", SESSION, "node-b")
        if move["outcome"] != "committed":
            raise MoveFailed(f"the move was not committed: {move['reason']}")
        self.say(f"   downtime {move['downtime_ms']:.1f} ms, {move['pages_sent']} pages sent in {move['rounds']} "
                 f"rounds, {common.size(move['bytes_sent'])}, every page verified: {move['verified']}")
        return move

    def _kill_owner(self) -> dict[str, Any]:
        """kill -9 of node-b whole: its worker and its daemon."""
        before = next(s for s in self.rgpu("ps") if s["session"] == SESSION)
        owner = next(n for n in self.rgpu("nodes") if n["host"] == before["host"])
        self.say(f"5. kill -9 of {before['host']}: its daemon and its worker")
        killed = time.monotonic()
        for pid in (owner["pid"], before["worker_pid"]):
            os.kill(pid, signal.SIGKILL)
        seen = len(self.lines)
        deadline = killed + 60
        after = before
        while time.monotonic() < deadline:
            row = [s for s in self.rgpu("ps", "--all") if s["session"] == SESSION]
            if row and row[0]["host"] != before["host"] and row[0]["state"] == "running":
                after = row[0]
                break
            time.sleep(0.1)
        else:
            raise RecoveryFailed("the session did not come back within a minute")
        while len(self.lines) <= seen and self.process is not None and self.process.poll() is None \
                and time.monotonic() < deadline:
            time.sleep(0.02)
        seconds = time.monotonic() - killed
        self.say(f"   back on {after['host']} at epoch {after['epoch']}, next output after {seconds:.1f} s")
        return {"from": before["host"], "to": after["host"], "epoch": after["epoch"], "seconds": seconds}

    def _finish(self) -> int:
        assert self.process is not None
        code = self.process.wait(240)
        time.sleep(0.1)
        return code

    @staticmethod
    def _digest(lines: list[str]) -> str | None:
        found = [m.group(1) for line in lines if (m := re.fullmatch(r"digest ([0-9a-f]{64})", line.strip()))]
        return found[-1] if found else None

    def stop(self) -> None:
        """End everything that the demonstration started."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
        try:
            self.rgpu("down")
        except (RgpuError, subprocess.TimeoutExpired) as error:
            common.err.print(f"while stopping: {error}", markup=False)
        shutil.rmtree(self.folder, ignore_errors=True)
