"""The process that workers are forked from: it has imported what a worker needs, and done nothing else.

Most of a worker's start is imports. The template imports once for its node, and workers share that memory with it. It
is started by the daemon, outside of any box, as the daemon's user and with a worker's environment, so it holds no
secret. It has one thread, and takes requests from the daemon alone, over a socket that it inherits. A forked worker
goes into its box by itself, with the same steps as an executed one (:mod:`rgpu.server.box.launch`).

It ends when its daemon does, and the workers live on. A worker whose process namespace is its own is the child of a
process that ends at once: the template then becomes its parent (PR_SET_CHILD_SUBREAPER, prctl(2)) and reaps it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

from rgpu.link.local.packets import Channel
from rgpu.server.address_layout import ensure_fixed
from rgpu.server.box import launch, mounts, privileges
from rgpu.server.worker import main as worker
from rgpu.server.worker.warm_worker import set_command_line
from rgpu.session.errors import RgpuError

PR_SET_CHILD_SUBREAPER = 36


def preload(kind: str) -> None:
    """Import what a worker of that kind of device imports later; nothing is begun. Raises :class:`ValueError`."""
    if kind == "cuda":
        import rgpu.server.device.cuda.device
        import rgpu.server.device.cuda.work.printed  # noqa: F401
        return
    if kind != "cpu":
        raise ValueError(f"workers of {kind!r} devices are not forked")
    import rgpu.server.device.cpu.device
    import rgpu.server.device.cpu.ptx.jit  # noqa: F401


def serve(channel: Channel) -> None:
    """Fork a worker for each request, and report the end of each, until the daemon's end is closed.

    Raises :class:`LinkError` then.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    poller = select.poll()
    poller.register(channel.sock, select.POLLIN)
    poller.register(woken, select.POLLIN)
    gc.collect()
    channel.send({"serves": os.getpid()})
    gc.freeze()  # else a worker's first collection would copy all of this memory
    while True:
        for fd, _ in poller.poll():
            if fd == woken:
                with contextlib.suppress(BlockingIOError):
                    os.read(woken, 4096)
                _reap(channel)
            else:
                _answer(channel)


def _reap(channel: Channel) -> None:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            channel.send({"ended": found[0], "status": os.waitstatus_to_exitcode(found[1])})


def _answer(channel: Channel) -> None:
    request, fds = channel.receive()
    try:
        channel.send({"pid": _fork(request, fds[0])})
    except (OSError, LookupError, TypeError) as error:
        channel.send({"refused": f"{type(error).__name__}: {error}"})
    finally:
        for fd in fds:
            os.close(fd)


def _fork(request: dict[str, Any], output: int) -> int:
    """Fork a worker and return its pid, as it is outside of its process namespace. Raises OSError, LookupError."""
    if "processes" not in request["plan"]["walls"]:
        return os.fork() or _become_worker(request, output)
    told, tells = os.pipe2(os.O_CLOEXEC)
    between = os.fork()
    if not between:
        _fork_apart(request, output, tells)
    os.close(tells)
    try:
        text = os.read(told, 32)
    finally:
        os.close(told)
        os.waitpid(between, 0)
    if not text:
        raise OSError("no process namespace could be made; the reason is in the worker's log")
    return int(text)


def _fork_apart(request: dict[str, Any], output: int, tells: int) -> NoReturn:
    """Fork a worker into a process namespace of its own, and write its pid to ``tells``; in a process for that."""
    status = launch.FAILED
    try:
        mounts.leave_processes()
        pid = os.fork() or _become_worker(request, output)
        os.write(tells, str(pid).encode())
        status = 0
    except BaseException:  # noqa: BLE001 - it must not go on as a second template
        os.dup2(output, 2)
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(status)


def _become_worker(request: dict[str, Any], output: int) -> NoReturn:
    """Go into the box, and be the worker; in the forked process."""
    try:
        os.setsid()
        for fd, number in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
            os.dup2(fd, number)
        signal.set_wakeup_fd(-1)
        os.closerange(3, privileges.OPEN_FILES)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        gc.unfreeze()
        os.environ.clear()
        os.environ.update(request["environ"])
        set_command_line([worker.__name__, *request["arguments"]])
        privileges.show_memory()  # a process that may not be read cannot open its own files in /proc; it hides again
        launch.enter(request["plan"])
        launch.tell(request["plan"])
        sys.argv = [worker.__name__, *request["arguments"]]
        worker.main()
    except SystemExit as ended:
        sys.stderr.flush()
        os._exit(ended.code if isinstance(ended.code, int) else 1)
    except BaseException:  # noqa: BLE001 - it must not go on as a second template
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(launch.FAILED)
    os._exit(0)


def main() -> None:
    """Run the template until its daemon ends."""
    parser = argparse.ArgumentParser(description="internal: what workers are forked from; started by `rgpu server`")
    parser.add_argument("--kind", required=True, help="of the workers' devices")
    parser.add_argument("--socket", type=int, required=True, help="descriptor of the connection to the daemon")
    parser.add_argument("--room", help="not read: room for the command lines of workers")
    options = parser.parse_args()
    ensure_fixed("rgpu.server.template.process", sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_command_line(["rgpu.server.template.process", "--kind", options.kind, "--socket", str(options.socket)])
    privileges.hide_memory()
    preload(options.kind)
    with contextlib.suppress(RgpuError):  # the daemon has ended
        serve(Channel(socket.socket(fileno=options.socket)))
    os._exit(0)


if __name__ == "__main__":
    main()
