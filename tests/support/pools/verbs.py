"""Verbs of ``rgpu`` from a process that has imported them: each runs in a fork of it.

A scenario asks ``rgpu ps`` hundreds of times, and starting Python and importing the command takes
ten times what the verb itself does: on two processors that is most of the load. The fork parses
the same command line, in the environment and folder that it is given, and ends with the same exit code.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
#: What modules read when they are imported: a verb with one of these is started anew.
READ_AT_IMPORT = ("RGPU_FAULT_FILE", "RGPU_EFFECTS", "RGPU_ANSWER_AREA")
_lock = threading.Lock()
_address: Path | None = None


def run(verb: tuple[str, ...], environment: dict[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    """``rgpu VERB…`` with its output captured. Raises subprocess.TimeoutExpired; the verb is killed then."""
    if any(name in environment for name in READ_AT_IMPORT):
        return subprocess.run([sys.executable, "-m", "rgpu.cli.main", *verb], env=environment, cwd=ROOT,
                              capture_output=True, text=True, timeout=timeout)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        code = _ask(verb, environment, (out.fileno(), err.fileno()), timeout)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(["rgpu", *verb], code, *texts)


def _ask(verb: tuple[str, ...], environment: dict[str, str], files: tuple[int, int], timeout: float) -> int:
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(timeout)
        link.connect(str(_server()))
        request = json.dumps({"verb": verb, "environment": environment}).encode()
        link.sendmsg([len(request).to_bytes(4, "little")],
                     [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
        link.sendall(request)
        pid = int.from_bytes(_exactly(link, 4), "little")
        try:
            return int.from_bytes(_exactly(link, 4), "little", signed=True)
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(["rgpu", *verb], timeout) from None


def _exactly(link: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        part = link.recv(count - len(got))
        if not part:
            raise AssertionError("the process of a verb ended without an exit code")
        got += part
    return got


def _server() -> Path:
    """The address of this process's server; started at the first use, it ends with this process."""
    global _address
    with _lock:
        if _address is None:
            folder = Path(tempfile.mkdtemp(prefix="rgpu-verbs-"))
            process = subprocess.Popen([sys.executable, "-m", "tests.support.pools.verbs", str(folder / "s")], cwd=ROOT,
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
            assert process.stdin and process.stdout
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            atexit.register(process.stdin.close)
            assert process.stdout.readline() == b"ready\n", "the server of verbs did not start"
            _address = folder / "s"
    return _address


# -- the server --------------------------------------------------------------------------
def serve(address: str) -> None:
    import select

    from rgpu.cli.command_line import VERBS

    for module in sorted(set(VERBS.values()) - {"sessions.top", "helpers.simulate", "helpers.demo"}):
        importlib.import_module(f"rgpu.cli.{module}")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    print("ready", flush=True)
    while True:
        readable, _, _ = select.select([listener, 0], [], [], 1.0)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if 0 in readable:  # whose server this is has ended
            return
        if listener in readable:
            link, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _handle(link)
            link.close()


def _handle(link: socket.socket) -> None:
    """In the fork: one verb, its exit code, the end."""
    code = 70
    try:
        head, files, _, _ = socket.recv_fds(link, 4, 2)
        head += _exactly(link, 4 - len(head)) if len(head) < 4 else b""
        request: dict[str, Any] = json.loads(_exactly(link, int.from_bytes(head, "little")))
        link.sendall(os.getpid().to_bytes(4, "little"))
        null = os.open(os.devnull, os.O_RDONLY)
        for was, now in ((null, 0), (files[0], 1), (files[1], 2)):
            os.dup2(was, now)
            os.close(was)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(ROOT)
        code = _verb(request["verb"])
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        with contextlib.suppress(OSError):
            link.sendall(code.to_bytes(4, "little", signed=True))
        os._exit(code)


def _verb(arguments: list[str]) -> int:
    import traceback

    from rgpu.cli.command_line import cli

    sys.argv = ["rgpu", *arguments]
    try:
        cli(args=arguments, prog_name="rgpu")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    serve(sys.argv[1])
