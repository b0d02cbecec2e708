"""Supervision of the node daemons of ``rgpu up``: a daemon that fails is started again, and the reason is logged.

A daemon that ends with status 0 was stopped on purpose; one that fails is started again after a delay that doubles
while it keeps failing. ``rgpu down`` ends the supervisor first. Its log is ``supervisor.log`` in the pool's folder.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from rgpu.cli.pool import log_size, wait_ready
from rgpu.link.keys import PoolFiles
from rgpu.link.local.processes import process_start
from rgpu.link.loggers import configure_logging
from rgpu.session.errors import PoolUnavailable, RgpuError, from_dict

log = structlog.get_logger(__name__)

FIRST_SECONDS, MOST_SECONDS = 0.5, 60.0  #: between a daemon's end and its next start
STEADY_SECONDS = 60.0  #: after which an earlier failure counts no more
LOOK_SECONDS = 0.2  #: between two checks where the kernel cannot report the daemons' ends
LONGEST_SECONDS = 60.0  #: and where it reports them
STATE = "supervisor.json"  #: in the pool's folder: the supervisor's process


def pause(failures: int) -> float:
    """Return the seconds to wait after so many failures in a row, one at least."""
    return float(min(MOST_SECONDS, FIRST_SECONDS * 2 ** min(failures - 1, 16)))


def reason(status: int) -> str:
    """Return why a process ended, from its exit status; a negative one is a signal's."""
    if status >= 0:
        return f"it ended with status {status}"
    try:
        return f"it was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"it was ended by signal {-status}"


@dataclass
class Daemon:
    """One daemon. ``again``: when to start it next (monotonic); None while it runs."""

    start: Callable[[], subprocess.Popen[bytes]]
    process: subprocess.Popen[bytes]
    since: float
    failures: int = 0
    again: float | None = None


@dataclass
class Supervisor:
    """The daemons of one pool on this host, by the names of their nodes. ``restart``: start failed ones again."""

    restart: bool = True
    daemons: dict[str, Daemon] = field(default_factory=dict)
    now: Callable[[], float] = time.monotonic

    def add(self, host: str, start: Callable[[], subprocess.Popen[bytes]], process: subprocess.Popen[bytes]) -> None:
        """Supervise a running daemon; ``start`` starts it again."""
        self.daemons[host] = Daemon(start, process, self.now())

    def look(self) -> None:
        """Handle the daemons that ended, start those that are due."""
        for host, daemon in list(self.daemons.items()):
            if daemon.again is None:
                self._ended(host, daemon)
            elif self.now() >= daemon.again:
                daemon.process, daemon.since, daemon.again = daemon.start(), self.now(), None
                log.info("a daemon is started again", host=host, pid=daemon.process.pid, failures=daemon.failures)

    def _ended(self, host: str, daemon: Daemon) -> None:
        status = daemon.process.poll()
        if status is None:
            return
        if status == 0 or not self.restart:
            log.info("a daemon ended and is not started again", host=host, pid=daemon.process.pid,
                     reason=reason(status))
            del self.daemons[host]
            return
        daemon.failures = 1 if self.now() - daemon.since > STEADY_SECONDS else daemon.failures + 1
        wait = pause(daemon.failures)
        daemon.again = self.now() + wait
        log.warning("a daemon died", host=host, pid=daemon.process.pid, reason=reason(status), again_in_s=wait,
                    failures=daemon.failures)

    def stop(self) -> None:
        """End every daemon, and wait for it."""
        running = [daemon.process for daemon in self.daemons.values() if daemon.again is None]
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()

    def run(self, stopping: Callable[[], bool], wake: int = -1) -> None:
        """Supervise until ``stopping`` returns True or no daemon is left.

        ``wake``: a descriptor that is readable once ``stopping`` is to be called.
        """
        while self.daemons and not stopping():
            self.look()
            self._wait(wake)

    def _wait(self, wake: int) -> None:
        """Wait until a daemon ends, one is to be started again, or ``wake`` is readable."""
        poll, watched = select.poll(), []
        if wake >= 0:
            poll.register(wake, select.POLLIN)
        seconds = LONGEST_SECONDS
        try:
            for daemon in self.daemons.values():
                if daemon.again is not None:
                    seconds = min(seconds, max(0.0, daemon.again - self.now()))
                elif daemon.process.returncode is None:
                    watched.append(os.pidfd_open(daemon.process.pid))
                    poll.register(watched[-1], select.POLLIN)
            poll.poll(math.ceil(seconds * 1000))
        except OSError as error:  # it has ended, or there are no descriptors
            log.debug("the daemons are looked at again soon", reason=str(error))
            time.sleep(LOOK_SECONDS)
        finally:
            for fd in watched:
                os.close(fd)


def supervisor(files: PoolFiles) -> int:
    """Return the pid of the process that supervises this pool's daemons here; 0 for none."""
    try:
        found = json.loads((files.root / STATE).read_text())
        pid, started = int(found["pid"]), str(found["started"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return pid if started and process_start(pid) == started else 0


def detach(files: PoolFiles, commands: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Start daemons (by node: their arguments) and their supervisor in the background; return the daemons' states.

    Raises what :func:`rgpu.cli.pool.wait_ready` raises: no process is left running then.
    """
    with open(files.root / "supervisor.log", "ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(files.root), json.dumps(commands)], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=output, start_new_session=True)
    assert process.stdout is not None
    with process.stdout as said_by:
        line = said_by.readline()
    process.returncode = 0  # it runs on without this process
    try:
        said = json.loads(line)
    except ValueError:
        raise PoolUnavailable(f"the daemons' supervisor ended; its log is {files.root}/supervisor.log") from None
    if "error" in said:
        raise from_dict(said["error"])
    return list(said["ready"])


def start(root: Path, host: str, command: list[str]) -> subprocess.Popen[bytes]:
    """Start one daemon in a session of its own; its log is in the node's folder."""
    folder = root / "nodes" / host
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(folder / "server.log", "ab") as output:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                start_new_session=True)


def main() -> None:
    """Start the daemons that the arguments name, print when they are ready, and supervise them until SIGTERM."""
    root, commands = Path(sys.argv[1]), dict[str, Any](json.loads(sys.argv[2]))
    configure_logging(level="info")
    stop: list[int] = []
    wake, woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda found, frame: stop.append(found))
    files, found = PoolFiles(root), Supervisor()
    written = {host: log_size(files, host) for host in commands}
    for host, command in commands.items():
        again = partial(start, root, host, command)
        found.add(host, again, again())
    try:
        ready = [wait_ready(files, host, daemon.process, written[host]) for host, daemon in found.daemons.items()]
    except RgpuError as error:
        found.stop()
        print(json.dumps({"error": error.as_dict()}), flush=True)
        sys.exit(1)
    path = root / STATE
    path.write_text(json.dumps({"pid": os.getpid(), "started": process_start(os.getpid())}))
    print(json.dumps({"ready": ready}), flush=True)
    os.dup2(2, 1)  # the reader of that line has ended
    found.run(lambda: bool(stop), wake)
    found.stop()
    path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
