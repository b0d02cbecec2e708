"""The process of the web page: configured by the daemon through standard input, and ended when that is closed."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import sys

import uvicorn

from rgpu.link.control.async_client import AsyncControlClient
from rgpu.link.keys import Endpoint, KeyPair
from rgpu.link.loggers import configure_logging
from rgpu.web.app import Web

TOLD_BYTES = 64 * 1024
CONNECTIONS = 256  #: at once; others are refused
HEAD_BYTES = 16 * 1024  #: of a request, before its body


def main() -> None:
    """Serve until standard input is closed, or SIGTERM."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would contain logins
    told = json.loads(sys.stdin.buffer.readline(TOLD_BYTES))
    configure_logging(level=told["log_level"], host=told["host"], part="web")
    asyncio.run(serve(told))


async def serve(told: dict[str, object]) -> None:
    """Serve the pages. ``told``: the daemon's settings, ``{host, control, public, log_level, url, socket, key}``."""
    key = dict(told["key"])  # type: ignore[call-overload]
    keys = KeyPair("web", key["name"], key["public"], key["secret"])
    client = AsyncControlClient(keys, Endpoint(str(told["control"]), str(told["public"]), str(told["host"])))
    web = Web(str(told["host"]), str(told["url"]), client)
    # No forwarded addresses: any client could send them. No log of URLs: they contain login codes.
    server = uvicorn.Server(uvicorn.Config(
        web.app(), log_config=None, access_log=False, proxy_headers=False, server_header=False, http="h11", ws="none",
        lifespan="on", limit_concurrency=CONNECTIONS, timeout_keep_alive=10, timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=HEAD_BYTES))
    loop = asyncio.get_running_loop()

    def closed() -> None:
        if not os.read(0, 1):
            loop.remove_reader(0)
            server.should_exit = True

    loop.add_reader(0, closed)
    await server.serve(sockets=[socket.socket(fileno=int(str(told["socket"])))])


if __name__ == "__main__":
    main()
