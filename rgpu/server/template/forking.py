"""The daemon's side of the process that its workers are forked from (:mod:`.process`)."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import structlog

from rgpu.link.local.packets import Channel
from rgpu.server.address_layout import fixed_in_children
from rgpu.session.errors import RgpuError

log = structlog.get_logger(__name__)

KINDS = frozenset({"cpu", "cuda"})  #: of devices whose workers are forked
ANSWER_SECONDS = 60.0  #: that a template may take to start and to fork, as a worker may that is executed
STATUS_SECONDS = 1.0  #: between the end of a worker and the report of its status
ROOM = "." * 2048  #: an argument of the template, for the command lines of workers: a process's arguments cannot grow
UNKNOWN = 255  #: the status of a worker whose template ended before it


class WorkerProcess(Protocol):
    """A worker's process: forked (:class:`Forked`) or executed (``subprocess.Popen``)."""

    @property
    def pid(self) -> int:
        """Its number."""

    @property
    def returncode(self) -> Any:
        """Its exit status, negative for a signal; None before :meth:`poll` or :meth:`wait` saw its end."""

    def poll(self) -> int | None:
        """Return the exit status once it has ended, else None."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit status. Raises :class:`subprocess.TimeoutExpired`."""

    def kill(self) -> None:
        """End it at once."""


class NotForked(Exception):
    """No worker was forked, and none will be for that request: it may be executed instead."""


class Forked:
    """A worker's process that a template forked; a pidfd (pidfd_open(2)) says when it has ended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._told, self._status = threading.Event(), UNKNOWN
        self._pidfd = -1
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended, and was reaped
            pass

    def tell(self, status: int) -> None:
        """Note the exit status that its parent reports."""
        self._status = status
        self._told.set()

    def poll(self) -> int | None:
        """Return the exit status once it has ended, else None."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit status. Raises :class:`subprocess.TimeoutExpired`."""
        found = self._look(timeout)
        if found is None:
            raise subprocess.TimeoutExpired("a worker", timeout or 0.0)
        return found

    def kill(self) -> None:
        """End it at once."""
        if self._pidfd >= 0:
            try:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def _look(self, seconds: float | None) -> int | None:
        if self.returncode is None and (self._pidfd < 0 or self._has_ended(seconds)):
            self._told.wait(STATUS_SECONDS)
            self.returncode = self._status
        return self.returncode

    def _has_ended(self, seconds: float | None) -> bool:
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(None if seconds is None else seconds * 1000))

    def __del__(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)


class _Template:
    """One template process, and the thread that reads what it reports."""

    def __init__(self, kind: str, environ: Mapping[str, str]) -> None:
        """Start it. Raises OSError."""
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel = Channel(near)
        self._changed = threading.Condition()
        self._answers: list[Forked | str] = []
        self._forked: weakref.WeakValueDictionary[int, Forked] = weakref.WeakValueDictionary()
        self.open = True
        self._serves = False
        with far, fixed_in_children():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rgpu.server.template.process", "--kind", kind, "--socket", str(far.fileno()),
                 "--room", ROOM], stdin=subprocess.DEVNULL, pass_fds=(far.fileno(),), env=dict(environ),
                start_new_session=True)
        threading.Thread(target=self._read, name="template", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self, request: dict[str, Any], output: int) -> Forked:
        """Return a worker that was forked. Raises :class:`NotForked`, OSError where it is not known whether one was."""
        try:
            self.channel.send(request, (output,))
        except RgpuError as error:
            self.open = False
            raise NotForked(error.message) from error
        with self._changed:
            if not self._changed.wait_for(lambda: self._answers or not self.open, ANSWER_SECONDS):
                raise OSError(f"the process that workers are forked from did not answer in {ANSWER_SECONDS:.0f} s")
            if not self._answers:
                why = "the process that workers are forked from ended"
                if not self._serves:
                    raise NotForked(f"{why} before it served; its output is in the node's log")
                raise OSError(why)
            answer = self._answers.pop(0)
        if isinstance(answer, str):
            raise NotForked(answer)
        return answer

    def _read(self) -> None:
        try:
            while True:
                self._take(self.channel.receive()[0])
        except (RgpuError, LookupError, TypeError, ValueError, OSError) as error:
            log.debug("the process that workers are forked from has ended", pid=self.pid, reason=str(error))
        with self._changed:
            self.open = False
            self._changed.notify_all()
        self.close()
        self._process.wait()  # so that no zombie is left

    def _take(self, message: dict[str, Any]) -> None:
        if "serves" in message:
            self._serves = True
            return
        if "ended" in message:
            forked = self._forked.get(message["ended"])
            if forked is not None:
                forked.tell(int(message["status"]))
            return
        answer: Forked | str = str(message["refused"]) if "refused" in message else Forked(int(message["pid"]))
        if isinstance(answer, Forked):
            self._forked[answer.pid] = answer
        with self._changed:
            self._answers.append(answer)
            self._changed.notify_all()

    def kill(self) -> None:
        """End it at once, whatever it does; its workers live on."""
        self._process.kill()

    def close(self) -> None:
        """End it when it has done what it was asked for; its workers live on."""
        self.channel.close()


class Templates:
    """A node's template: started with the first worker, and anew when it has ended or the environment has changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kind, self._environ = "", dict[str, str]()
        self._template: _Template | None = None

    def fork(self, kind: str, environ: Mapping[str, str], plan: Mapping[str, Any], arguments: Sequence[str],
             own_environ: Mapping[str, str], output: int) -> Forked:
        """Fork a worker of a device of that kind. ``environ``: of the template; ``own_environ``: of the worker.

        ``plan``: of its box (:mod:`rgpu.server.box.launch`). ``arguments``: of :mod:`rgpu.server.worker.main`.
        ``output``: descriptor that its stdout and stderr go to.

        Raises :class:`NotForked`; OSError where it is not known whether a worker was forked.
        """
        request = {"plan": dict(plan), "arguments": list(arguments), "environ": dict(own_environ)}
        with self._lock:
            if (self._kind, self._environ) != (kind, dict(environ)):
                self._close()
                self._kind, self._environ = kind, dict(environ)
            try:
                return self._running().fork(request, output)
            except NotForked as error:
                raise NotForked(f"the worker cannot be forked: {error}") from error
            except OSError:
                if self._template is not None:
                    self._template.kill()  # else it might fork later, for a worker that was given up
                self._close()
                raise

    @property
    def pid(self) -> int:
        """The number of the template's process; 0: none runs."""
        return self._template.pid if self._template is not None and self._template.open else 0

    def _running(self) -> _Template:
        if self._template is None or not self._template.open:
            self._close()
            try:
                self._template = _Template(self._kind, self._environ)
            except OSError as error:
                raise NotForked(f"the process that workers are forked from cannot be started: {error}") from error
        return self._template

    def _close(self) -> None:
        template, self._template = self._template, None
        if template is not None:
            template.close()

    def __del__(self) -> None:
        self._close()
