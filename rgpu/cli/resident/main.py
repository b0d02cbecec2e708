"""A resident: imports what an agent needs, listens, and forks an agent for each `rgpu run` that connects.

It has one thread, no keys and no state of a pool or run; agents outlive it. It ends when it was idle for long, when
the pool's folder was deleted, when its own socket or a file that it has imported was replaced, and by SIGTERM.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

from rgpu.cli.resident import frames, surroundings
from rgpu.client.run import read_ahead

LOCK_TRIES = 5
LOOK_SECONDS = 5.0  #: between two checks whether it is still needed
MODULES = ("rgpu.cli.sessions.starting", "rgpu.client.run.launcher", "rgpu.link.control.control_client",
           "rgpu.link.data.proofs", "rgpu.cli.resident.serving", *read_ahead.MODULES)
_KEPT_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)  #: as in every interpreter


def main() -> None:
    """Run a resident. Arguments: ``--pool`` of the run that starts it, the pool's folder, seconds it may be idle."""
    option, root, idle = sys.argv[1:]
    _settle()
    text = surroundings.describe(option or None)
    path = Path(surroundings.socket_path(text))
    mark = path.with_suffix(".begun")
    lock = _lock(path.with_suffix(".lock"), root)
    if lock is None:
        mark.unlink(missing_ok=True)
        return
    try:
        for name in MODULES:
            importlib.import_module(name)
        if (threads := len(os.listdir("/proc/self/task"))) > 1:
            raise RuntimeError(f"something that is imported here has started {threads - 1} threads: a process with "
                               "threads cannot fork an agent; set RGPU_RESIDENT=off")
        if _told:
            sys.exit(0)
        resident = Resident(text, path, Path(root), lock, float(idle))
    except SystemExit:  # by SIGTERM
        mark.unlink(missing_ok=True)
        raise
    except BaseException:
        mark.write_text(traceback.format_exc())
        raise
    mark.unlink(missing_ok=True)
    try:
        resident.run()
    finally:
        resident.close()


class Resident:
    """A listener that forks agents: see the module docstring."""

    def __init__(self, text: bytes, path: Path, root: Path, lock: int, idle: float) -> None:
        self._text, self._path, self._root, self._lock, self._idle = text, path, root, lock, idle
        self._files = _stamps()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        path.unlink(missing_ok=True)
        self._listener.bind(os.fspath(path))
        self._own = _stamp(os.fspath(path))
        self._listener.setblocking(False)
        gc.collect()
        gc.freeze()
        self._listener.listen(128)

    def run(self) -> None:
        """Fork agents, until the resident is idle for too long, not needed any more, or stopped."""
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        until = time.monotonic() + self._idle
        while time.monotonic() < until and self._needed() and not _told:
            if poller.poll(1000 * min(LOOK_SECONDS, self._idle)):
                if _stamps() != self._files:
                    return
                self._accept()
                until = time.monotonic() + self._idle

    def close(self) -> None:
        """Delete the files, so that another resident can start."""
        self._listener.close()
        if _stamp(os.fspath(self._path)) == self._own:
            self._path.unlink(missing_ok=True)
        self._path.with_suffix(".lock").unlink(missing_ok=True)
        os.close(self._lock)

    def _needed(self) -> bool:
        return self._root.exists() and _stamp(os.fspath(self._path)) == self._own

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # the client has closed the connection
            return
        with sock:
            if frames.peer(sock)[1] != os.geteuid():
                return
            try:
                child = os.fork()
            except OSError:  # no more processes: `rgpu run` gets no answer
                return
            if child == 0:
                self._be_agent(sock)

    def _be_agent(self, sock: socket.socket) -> None:
        """Serve one run in a forked process; does not return."""
        try:
            from rgpu.cli.resident import serving

            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._listener.close()
            os.close(self._lock)
            sock.setblocking(True)
            serving.serve(sock, self._text)
        except frames.Gone:
            pass
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()
            os._exit(0)


_told: list[int] = []  #: signals by which this process is to end


def _end(number: int, frame: object) -> None:
    """Exit; the signal is recorded too, because an import or a finalizer may swallow the exception."""
    _told.append(number)
    sys.exit(0)


def _settle() -> None:
    """Set signals, umask and name as a run's agent needs them, whatever this process inherited."""
    for number in signal.valid_signals():
        if signal.getsignal(number) is signal.SIG_IGN and number not in _KEPT_IGNORED:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # agents are not waited for
    signal.signal(signal.SIGTERM, _end)
    os.umask(0o077)
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as name:
        name.write("rgpu-resident")


def _lock(path: Path, root: str) -> int | None:
    """The descriptor of a lock that is held as long as this process lives; None where another one holds it."""
    for _ in range(LOCK_TRIES):
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # by another resident, or briefly by a process that looks for one
            os.close(lock)
            time.sleep(0.02)
            continue
        if _stamp(os.fspath(path))[1:2] == (os.fstat(lock).st_ino,):
            os.truncate(lock, 0)
            os.write(lock, json.dumps({"pid": os.getpid(), "pool": root}).encode())
            return lock
        os.close(lock)  # its former holder has deleted the file
    return None


def _stamps() -> dict[str, tuple[int, ...]]:
    """Stamps that reveal another version of the code in use: of all files of rgpu, of each other package's first one.

    They are compared before each fork, so not of hundreds of files.
    """
    own = __name__.partition(".")[0]
    names = [sys.executable]
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and (name.startswith(f"{own}.") or "." not in name and name not in sys.stdlib_module_names):
            names.append(file)
    return {name: _stamp(name) for name in names}


def _stamp(path: str) -> tuple[int, ...]:
    """The stamp of a file; () where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
