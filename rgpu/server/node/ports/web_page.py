"""The web page of a node: a process beside the daemon, which starts, restarts and ends it.

The daemon listens, so that a port in use is reported at its start, and gives the process the socket, a key of its
own that is in no file, and the address of the control port. The process runs :mod:`rgpu.web` by its name; nothing of
it is imported here. It ends when its standard input is closed, and so also when the daemon is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import structlog

from rgpu.link.keys import KeyPair
from rgpu.server.node.metrics import parse_address
from rgpu.session.errors import LinkError, UsageError

log = structlog.get_logger(__name__)

NEEDS = ("starlette", "uvicorn", "jinja2")  #: of the extra `web`
LONGEST_PAUSE = 30.0  #: s before a process that keeps ending is started again
WELL_SECONDS = 60.0  #: after which the end of a process counts as a first failure again
END_SECONDS = 5.0
#: Variables of the daemon's environment that the process is given: no credentials.
GIVEN = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV")


def check(address: str, url: str) -> None:
    """Check the options before anything is started. Raises :class:`UsageError`."""
    if url and not address:
        raise UsageError("--web-url says where browsers find the web page; --web HOST:PORT serves one")
    if not address:
        return
    parse_address(address, "--web")
    parts = urlsplit(url)
    if url and (parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/")
                or parts.query or parts.fragment or parts.username is not None):
        raise UsageError(f"--web-url {url!r} is no http://HOST[:PORT] or https://HOST[:PORT]")
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"--web needs {', '.join(missing)}: pip install 'rgpu-live[web]'")


@dataclass(frozen=True, slots=True)
class Told:
    """Parameters of the process. ``control``: address of the control port, ``public``: its key in Z85."""

    host: str
    control: str
    public: str
    log_level: str


class WebPage:
    """``address``: HOST:PORT; ``url``: for browsers, if not that address. Make it in the daemon's loop."""

    def __init__(self, address: str, url: str, host: str) -> None:
        """Raises :class:`UsageError`, :class:`LinkError` where the port is taken."""
        check(address, url)
        self.keys = KeyPair.create("web", f"web-{host}"[:63])
        where = parse_address(address, "--web")
        try:
            self._socket = socket.create_server(where, family=socket.AF_INET6 if ":" in where[0] else socket.AF_INET,
                                                backlog=128)
        except OSError as error:
            raise LinkError(f"--web cannot listen on {address}: {error}", address=address) from error
        self._process: asyncio.subprocess.Process | None = None
        self.url = url.rstrip("/") or f"http://{_named(where[0])}:{self._socket.getsockname()[1]}"

    async def run(self, told: Told, stopping: Callable[[], bool]) -> None:
        """Keep the process running until :meth:`close`."""
        pause, loop = 0.5, asyncio.get_running_loop()
        while not stopping():
            began = loop.time()
            process = self._process = await self._start(told)
            code = await process.wait()
            if stopping():
                return
            pause = 0.5 if loop.time() - began > WELL_SECONDS else min(LONGEST_PAUSE, pause * 2)
            log.error("the web page's process ended and is started again", status=code, seconds=pause)
            await asyncio.sleep(pause)

    async def _start(self, told: Told) -> asyncio.subprocess.Process:
        number = self._socket.fileno()
        environment = {name: os.environ[name] for name in GIVEN if name in os.environ}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rgpu.web", stdin=asyncio.subprocess.PIPE, pass_fds=(number,), env=environment)
        assert process.stdin is not None
        process.stdin.write(json.dumps({
            "host": told.host, "control": told.control, "public": told.public, "log_level": told.log_level,
            "url": self.url, "socket": number,
            "key": {"name": self.keys.name, "public": self.keys.public, "secret": self.keys.secret}}).encode() + b"\n")
        with contextlib.suppress(ConnectionError):
            await process.stdin.drain()
        log.info("the web page is served", address=self.url, pid=process.pid)
        return process

    async def close(self) -> None:
        """End the process and stop listening."""
        self._socket.close()
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(END_SECONDS):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


def _named(host: str) -> str:
    """The host name with which browsers reach the address that the page listens on."""
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host
