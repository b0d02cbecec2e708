"""A real local pool for scenario tests: real daemons, real workers, real programs, real kills."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tests.support.pools import verbs

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
HELD = ROOT / "tests" / "scenarios" / "programs" / "held.py"
#: `make sweep-etcd` sets it to ``etcd``: the truth of every pool is then in an etcd of three members of its own.
TEST_REGISTRY = os.environ.get("RGPU_TEST_REGISTRY", "")
DIGEST = re.compile(r"^digest ([0-9a-f]{64})$")


class VerbError(AssertionError):
    """A verb exited with an error: ``code`` is its exit status, ``text`` what it said."""

    def __init__(self, verb: tuple[str, ...], code: int, text: str) -> None:
        super().__init__(f"rgpu {' '.join(verb)} exited with {code}: {text}")
        self.code, self.text = code, text


class LocalPool:
    """``rgpu up`` in a folder of its own; use as a context manager.

    ``registry``: an address ``etcd://…``: then the daemons are started one by one, as on several hosts. ``up``: more
    options of `rgpu up`.
    """

    def __init__(self, folder: Path, nodes: int = 3, lease: float = 2.0, device: str = "cpu",
                 registry: str = "", devices: tuple[str, ...] = (), up: tuple[str, ...] = ()) -> None:
        self.registry = registry
        self.servers: dict[str, subprocess.Popen[bytes]] = {}  #: those started one by one
        self.folder = folder
        self.up = up
        self.nodes = nodes
        self.lease = lease
        self.device = device
        self.devices = devices or (device,)  #: of node-a, node-b … in turn
        self.programs: list[Program] = []
        self._cluster: Any = None
        self.environment = {
            **os.environ, "RGPU_POOL": str(folder / "pool"), "RGPU_JOURNAL_DIR": str(folder / "journal"),
            "RGPU_RUNS_DIR": str(folder / "runs"),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTHONUNBUFFERED": "1", "RGPU_CONFIG": "",
            "RGPU_QUIET": "1",  # programs' own stderr is compared
            "RGPU_PAGE_LANES": os.environ.get("RGPU_PAGE_LANES", "2"),  # one, by itself, where there are few processors
        }
        if "RGPU_SPARES" not in os.environ and ((os.cpu_count() or 1) < 8 or "PYTEST_XDIST_WORKER" in os.environ):
            self.environment["RGPU_SPARES"] = "0"  # in many pools, or on two cores, they cost too much

    def begin_registry(self) -> None:
        """Start the etcd that a sweep asked for; daemons find it in their environment."""
        if TEST_REGISTRY == "etcd" and not self.registry:
            from tests.support.registry.etcd_cluster import EtcdCluster

            self._cluster = EtcdCluster(Path(tempfile.mkdtemp(prefix="rgpu-etcd-")), size=3)
            self._cluster.__enter__()
            self.registry = self.environment["RGPU_REGISTRY"] = self._cluster.address("sweep")

    def end_registry(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.__exit__()
            shutil.rmtree(cluster.folder, ignore_errors=True)

    def __enter__(self) -> LocalPool:
        self.begin_registry()
        if self.registry:
            self._start_daemons()
        else:
            each = [part for device in self.devices for part in ("--device", device)]
            self.rgpu("up", "--nodes", str(self.nodes), *each, "--lease", str(self.lease), "--detach",
                      "--no-supervise", *self.up)
        return self

    def _start_daemons(self) -> None:
        self.rgpu("keys", "init")
        for index in range(self.nodes):
            self.start_daemon(f"node-{chr(97 + index)}")
        deadline = time.monotonic() + 90
        while len(self._ready()) < self.nodes:
            assert time.monotonic() < deadline, f"only {self._ready()} are ready:\n{self.logs()}"
            for host, process in self.servers.items():
                assert process.poll() is None, \
                    f"the daemon of {host} ended with {process.returncode}:\n{self.log_end(host)}"
            time.sleep(0.2)

    def _ready(self) -> list[str]:
        states = (self.folder / "pool" / "nodes" / host / "server.json" for host in self.servers)
        return [path.parent.name for path in states if path.exists() and json.loads(path.read_bytes()).get("ready")]

    def start_daemon(self, host: str) -> None:
        """One `rgpu server` with this pool's registry."""
        with open(self.folder / f"{host}.log", "ab") as log:
            self.servers[host] = subprocess.Popen(
                [sys.executable, "-m", "rgpu.cli.main", "server", "--host", host, "--device", self.device,
                 "--lease", str(self.lease), "--registry", self.registry],
                env=self.environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True)

    def __exit__(self, *error: object) -> None:
        for program in self.programs:
            program.stop()
        try:
            self.rgpu("down")
        finally:
            self._kill_strays()
            for server in self.servers.values():
                server.kill()
                server.wait()
            self.end_registry()

    def _kill_strays(self) -> None:
        """Frozen or orphaned workers of this pool: named by its folder on their command line."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if str(self.folder).encode() in path.read_bytes() and b"rgpu" in path.read_bytes():
                    os.kill(int(path.parent.name), signal.SIGKILL)
            except (OSError, ValueError):
                continue

    def rgpu(self, *verb: str, timeout: float = 90) -> Any:
        """Run a verb with ``-o json`` and return what it printed. Raises :class:`VerbError`."""
        done = verbs.run((*verb, "-o", "json"), self.environment, timeout)
        if done.returncode:
            raise VerbError(verb, done.returncode, done.stderr)
        return json.loads(done.stdout)

    def run(self, *command: str, name: str, options: tuple[str, ...] = ()) -> Program:
        if any(device.startswith("cuda") for device in self.devices) and not {"--memory", "--gpus"} & set(options):
            options = ("--memory", "1GiB", *options)  # several side by side on one GPU, not a whole one each
        program = Program(self, [str(part) for part in command], name, options)
        self.programs.append(program)
        return program

    def heat(self, name: str, n: int = 96, steps: int = 12000, report: int = 50, rest: float = 0.02,
             options: tuple[str, ...] = ()) -> Program:
        """The heat example; ``rest``: seconds that it rests after each line, so that it lasts but computes little."""
        command = [str(EXAMPLES / "heat.py"), "--n", str(n), "--steps", str(steps), "--report", str(report)]
        if rest:
            never = str(self.folder / "never released")
            command = ["-W", "ignore", str(HELD), never, "0", str(rest), *command]
        return self.run(sys.executable, *command, name=name, options=options)

    def session(self, name: str) -> dict[str, Any]:
        """The row of ``rgpu ps`` for a session."""
        rows = [row for row in self.rgpu("ps", "--all") if row["session"] == name]
        assert rows, f"no session {name}"
        return rows[0]

    def living(self) -> list[dict[str, Any]]:
        """The rows of ``rgpu nodes`` of hosts that are there."""
        return [row for row in self.rgpu("nodes") if row["state"] != "lost"]

    def node(self, host: str) -> dict[str, Any]:
        """The row of ``rgpu nodes``; one that registers anew is not among them for a moment."""
        deadline = time.monotonic() + 30
        while not (rows := [row for row in self.living() if row["host"] == host]):
            assert time.monotonic() < deadline, f"no node {host}"
            time.sleep(0.1)
        return dict(rows[0])

    def ends(self, name: str, seconds: float = 10) -> bool:
        """Whether the session has ended; a move that its end broke off is told a moment before that is on record."""
        deadline = time.monotonic() + seconds
        while self.session(name)["state"] != "ended":
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def wait_state(self, name: str, state: str, seconds: float = 30, not_on: str | None = None,
                   epoch: int = 0) -> dict[str, Any]:
        """The session's row once it is in ``state``, by ``epoch`` or a later one, on another host than ``not_on``."""
        deadline = time.monotonic() + seconds
        while True:
            row: dict[str, Any] = next((r for r in self.rgpu("ps", "--all") if r["session"] == name), {})
            if row.get("state") == state and row["host"] != not_on and row["epoch"] >= epoch \
                    and (state != "running" or row["worker_pid"]):
                return row
            assert time.monotonic() < deadline, f"{name} is not {state} after {seconds} s: {row}"
            time.sleep(0.1)

    def log_end(self, host: str) -> str:
        """The end of that daemon's own log."""
        return (self.folder / f"{host}.log").read_text(errors="replace")[-6000:]

    def logs(self, most: int = 3000) -> str:
        """The end of every log of the pool, ``most`` characters of each: for a failing test's message."""
        return "\n".join(f"== {path}\n{path.read_text(errors='replace')[-most:]}"
                         for path in sorted(self.folder.rglob("*.log")))


class Program:
    """A program under ``rgpu run``."""

    def __init__(self, pool: LocalPool, command: list[str], name: str, options: tuple[str, ...]) -> None:
        self.name = name
        self.lines: list[str] = []
        self.errors: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rgpu.cli.main", "run", "--name", name, *options, "--", *command],
            env=pool.environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True)
        self._threads = [threading.Thread(target=self._read, args=(stream, lines), daemon=True)
                         for stream, lines in ((self.process.stdout, self.lines), (self.process.stderr, self.errors))]
        for thread in self._threads:
            thread.start()

    def _read(self, stream: Any, lines: list[str]) -> None:
        for line in stream:
            lines.append(line.rstrip())

    def wait_lines(self, count: int, seconds: float = 150) -> None:
        deadline = time.monotonic() + seconds
        while len(self.lines) < count:
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.errors[-20:]}"
            assert time.monotonic() < deadline, f"only {len(self.lines)} lines after {seconds} s: {self.errors[-20:]}"
            time.sleep(0.01)

    def finish_reading(self, seconds: float = 5) -> None:
        """Let what was printed come in; all of it, where the program has ended."""
        for thread in self._threads:
            thread.join(seconds)

    def finish(self, seconds: float = 120) -> str:
        """Wait for the end; the digest that the program printed."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            seen = f"{self.lines[-5:]} {self.errors[-20:]}"
            raise AssertionError(f"{self.name} did not end in {seconds} s: {seen}") from None
        self.finish_reading()
        assert code == 0, f"exit {code}: {self.errors[-30:]}"
        found = [match.group(1) for line in self.lines if (match := DIGEST.match(line))]
        assert found, f"no digest in {self.lines[-5:]}"
        return found[-1]

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
