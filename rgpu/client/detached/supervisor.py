"""The supervisor of one detached run: starts `rgpu run` below it, keeps the program's output and the run's record.

A process of its own (``python -c … ORDER``), in a session of its own, without a terminal from the moment that the
program runs. Orphaned processes below it become its children: where the agent is killed, the supervisor keeps the
program's output and receives its exit status.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from rgpu.client.detached.channels import Order, Pipe, Supervised, package_path
from rgpu.client.detached.keeping import Keeper
from rgpu.client.detached.time_limit import Timekeeper, TimeLimit, clock
from rgpu.link.local.processes import boot_id, signal_program
from rgpu.link.runs.folder import LOG, Runs, process, this_host
from rgpu.link.runs.record import RunRecord, shown_command
from rgpu.session.errors import RgpuError

_SUBREAPER = 36  #: PR_SET_CHILD_SUBREAPER, prctl(2)
_COMMAND = "import sys; sys.path.append({path!r}); from rgpu.cli.main import main; main()"
LONGEST = 1 << 20  #: bytes of a line about the run
LOOK_SECONDS = 1.0


class Supervisor:
    """Supervisor of one run; see the module docstring. ``program``: the run's command line."""

    def __init__(self, order: Order, program: list[str]) -> None:
        self._order, self._program = order, program
        self._runs = Runs(Path(order.root))
        self._runs.claim(order.name)  # held until this process ends
        self._output, self._life, self._word = Pipe.make(), Pipe.make(), Pipe.make()
        self._wake = Pipe.make()
        self._report: int | None = order.report
        self._heard = self._line = b""  #: bytes of a line that is not whole yet; the line about the start
        self._keeper: Keeper | None = None
        self._pid = 0  #: of the program, once it runs
        self._status: dict[int, int] = {}  #: by pid, of children that ended, as waitpid(2) returns it
        self._end: tuple[int, str] | None = None  #: exit code and reason, as the agent reported them
        self._reason = ""
        self._timekeeper: Timekeeper | None = None
        self._terminated: list[int] = []
        self._begun = 0.0
        self._agent = self._start_agent()

    def _start_agent(self) -> int:
        """Start `rgpu run` as in the foreground, but with its program's output in a pipe. Return its pid."""
        ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0)
        for one in (self._wake.reader, self._wake.writer):
            os.set_blocking(one, False)
        signal.set_wakeup_fd(self._wake.writer, warn_on_full_buffer=False)
        # Handlers, not SIG_IGN, which the program would inherit.
        signal.signal(signal.SIGCHLD, _ignore)
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, _ignore)
        signal.signal(signal.SIGTERM, lambda number, frame: self._terminated.append(number))
        report = os.dup(self._word.writer)
        given = (self._output.writer, self._output.reader, self._life.reader, self._word.writer, report)
        shared = Supervised(output=given[0], pump=given[1], life=given[2], word=given[3], root=self._order.root,
                            name=self._order.name)
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _COMMAND.format(path=package_path()), "run", "--supervised", shared.as_text(),
             "--report-fd", str(report), *self._order.arguments, "--", *self._program],
            stdin=subprocess.DEVNULL, pass_fds=given)
        process.returncode = 0  # it is waited for with all other children
        for fd in (self._output.writer, self._life.reader, self._word.writer, report):
            os.close(fd)
        return process.pid

    # -- the loop -----------------------------------------------------------------------
    def run(self) -> int:
        """Keep the run until it has ended; return the exit status for the process that waits for the start."""
        poller = select.poll()
        for fd in (self._wake.reader, self._word.reader, self._output.reader):
            poller.register(fd, select.POLLIN)
        if self._report is not None:
            poller.register(self._report, 0)  # ready once its reader has closed
        while True:
            for fd, _ in poller.poll(self._timeout() * 1000):
                if fd == self._report and self._keeper is None:
                    self._give_up()
                    poller.unregister(fd)
                elif fd == self._wake.reader:
                    self._woken()
                elif fd == self._word.reader:
                    if not self._hear():
                        poller.unregister(fd)
                    if self._keeper is not None and self._report is not None:
                        with contextlib.suppress(KeyError):
                            poller.unregister(self._report)
                        self._tell_report()
                elif fd == self._output.reader and self._keeper is not None and not self._keeper.take():
                    poller.unregister(fd)
            if self._timekeeper is not None:
                self._timekeeper.look()
            if self._agent in self._status and self._over():
                return self._finish()

    def _timeout(self) -> float:
        return min(LOOK_SECONDS, max(0.01, self._timekeeper.left())) if self._timekeeper else LOOK_SECONDS

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake.reader, 4096):
                pass
        while self._reap():
            pass
        if self._terminated:
            self._terminated.clear()
            self._give_up()

    def _reap(self) -> bool:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid:
            self._status[pid] = status
        return bool(pid)

    def _give_up(self) -> None:
        """End the program, or the agent that requests its place: the start is not awaited any more, or by SIGTERM."""
        if self._keeper is None:
            if self._agent not in self._status:
                os.kill(self._agent, signal.SIGTERM)
            return
        self._reason = self._reason or "its supervisor was sent SIGTERM"
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        if self._pid and self._pid not in self._status:
            with contextlib.suppress(ProcessLookupError):
                signal_program(self._pid, number)

    # -- the agent's reports -------------------------------------------------------------
    def _hear(self) -> bool:
        """Read the agent's lines; return False after the last one."""
        data = os.read(self._word.reader, 65536)
        self._heard += data
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            self._take(line)
        return bool(data) and len(self._heard) < LONGEST

    def _take(self, line: bytes) -> None:
        word: dict[str, Any] = json.loads(line)
        if "started" in word:
            self._started(int(word["started"]["pid"]))
        elif "ended" in word:
            self._end = int(word["ended"]["exit_code"]), str(word["ended"]["reason"])
            return
        self._line = line

    def _started(self, pid: int) -> None:
        """Put the run on record, and leave the terminal and the folder: the program runs."""
        order, self._pid, self._begun = self._order, pid, clock()
        record = RunRecord(
            name=order.name, command=shown_command(self._program), pool=order.pool, folder=os.getcwd(),
            host=this_host(), boot=boot_id(), how=order.how, begun=time.time(), program=process(pid),
            agent=process(self._agent), supervisor=process(os.getpid()), log_limit=order.log_limit,
            time_limit=order.time_limit[0])
        folder = self._runs.put(record)
        self._keeper = Keeper(self._runs, folder, record, self._output.reader)
        log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.dup2(log, 2)
        os.close(log)
        os.chdir("/")
        self._runs.forget_old(order.keep)

    def _tell_report(self) -> None:
        fd, self._report = self._report, None
        if fd is not None:
            with contextlib.suppress(OSError):  # the process that started it may have ended: the run goes on
                os.write(fd, self._line and self._line + b"\n")
            os.close(fd)

    # -- the end ------------------------------------------------------------------------
    def _over(self) -> bool:
        """Return whether the program has ended, too, after its agent."""
        if self._keeper is None or self._end is not None:
            return True
        if self._pid in self._status:
            return True
        if self._timekeeper is None:
            try:
                os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return True  # the agent had waited for it
            self._agent_died()
        return False

    def _agent_died(self) -> None:
        """Keep the run without its agent: the program is this process's child now."""
        assert self._keeper is not None
        what = f"its agent ended ({_how(self._status[self._agent])}): its calls of the GPU fail from then on"
        self._keeper.trouble(what)
        self._keeper.say(what)
        self._timekeeper = Timekeeper(TimeLimit(*self._order.time_limit), self._pid, self._begun, self._ends_by)

    def _ends_by(self, reason: str) -> None:
        assert self._keeper is not None
        self._reason = reason
        self._keeper.say(reason)

    def _finish(self) -> int:
        agent = self._status[self._agent]
        while self._hear():  # its last lines
            pass
        if self._keeper is None:
            self._tell_report()
            return _code(agent)
        code, reason = self._end or (None, "")
        if code is None:
            status = self._status.get(self._pid, agent)
            code, reason = _code(status), self._reason or _how(status)
        self._keeper.end(code, self._reason or reason)
        return 0


def _ignore(number: int, frame: FrameType | None) -> None:
    pass


def _code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _how(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Supervise the run of the order that is the first argument; the others are its program."""
    order, *program = sys.argv[1:] if arguments is None else arguments
    try:
        supervisor = Supervisor(msgspec.json.decode(order, type=Order), program)
    except RgpuError as error:
        report = msgspec.json.decode(order, type=Order).report
        os.write(report, json.dumps({"refused": error.as_dict()}, default=str).encode() + b"\n")
        sys.exit(error.exit_code)
    sys.exit(supervisor.run())
