"""A control server that answers verbs with what a test gives it, and ``rgpu`` as a process that asks it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path
from typing import Any

from rgpu.link.control import ControlServer, Request
from rgpu.link.keys import Endpoint, PoolFiles
from rgpu.session.errors import NotFound

ROOT = Path(__file__).resolve().parents[2]


class CannedPool:
    """``answers``: verb → what it answers, or an exception. ``asked``: (verb, arguments) as they came."""

    def __init__(self, root: Path, answers: dict[str, Any]) -> None:
        self.files, self.answers, self.asked = PoolFiles(root), answers, []
        self.files.create()
        self._node = self.files.add_node("a")
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._server = ControlServer(self._node, self.files.authorized, "tcp://127.0.0.1:*")
        for verb in answers:
            self._server.register(verb, self._answer)
        asyncio.run_coroutine_threadsafe(self._server.start(), self.loop).result(10)
        description = self.files.read_description()
        description.endpoints = [Endpoint(self._server.address, self._node.public, "a")]
        self.files.write_description(description)

    async def _answer(self, request: Request) -> Any:
        self.asked.append((request.verb, request.args))
        found = self.answers.get(request.verb, NotFound(f"nothing for {request.verb}"))
        if isinstance(found, Exception):
            raise found
        return found(request.args) if callable(found) else found

    def environment(self, **more: str) -> dict[str, str]:
        """For ``rgpu`` as a process."""
        kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "LC_ALL")}
        return {**kept, "RGPU_POOL": str(self.files.root), "RGPU_CONFIG": "", "TZ": "UTC", "TERM": "xterm",
                "PYTHONPATH": str(ROOT), **more}

    def rgpu(self, *verb: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """The verb with pipes."""
        return subprocess.run([sys.executable, "-m", "rgpu.cli.main", *verb], env=self.environment(**environment),
                              cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)

    def on_terminal(self, columns: int, *verb: str, said: str = "", **environment: str) -> tuple[int, str]:
        """The verb on a terminal so wide: (exit status, what stood there). ``said``: what is typed."""
        return on_terminal([sys.executable, "-m", "rgpu.cli.main", *verb], self.environment(**environment), columns,
                           said)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)


def on_terminal(command: list[str], environment: dict[str, str], columns: int, said: str = "") -> tuple[int, str]:
    """A command on a terminal of its own: (exit status, what stood there, with line feeds alone)."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    process = subprocess.Popen(command, env=environment, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs,
                               start_new_session=True)
    os.close(theirs)
    if said:
        os.write(ours, said.encode())
    seen = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # nobody has the other end any more
            break
        if not part:
            break
        seen += part
    os.close(ours)
    return process.wait(60), seen.decode(errors="replace").replace("\r\n", "\n")
