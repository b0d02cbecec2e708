"""A node that serves a control link."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

from rgpu.link.control import ControlServer, Request
from rgpu.link.keys import Endpoint, PoolFiles
from rgpu.session.errors import Fenced


class Node:
    """A control server in an event loop of its own thread."""

    def __init__(self, pool: PoolFiles, host: str = "a") -> None:
        self.keys = pool.add_node(host)
        self.server = ControlServer(self.keys, pool.authorized, "tcp://127.0.0.1:*")
        self.created = 0
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        for verb, handler in {"pool.ping": self.ping, "session.create": self.create, "move.settle": self.ping,
                              "session.kill": self.fail, "session.migrate": self.migrate,
                              "session.list": self.bug}.items():
            self.server.register(verb, handler)
        self.run(self.server.start())
        self.endpoint = Endpoint(self.server.address, self.keys.public, host)

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(10)

    async def ping(self, request: Request) -> Any:
        if request.args.get("sleep"):
            await asyncio.sleep(request.args["sleep"])
        return {"name": request.name, "role": request.role, "epoch": request.epoch, "leader": request.leader}

    async def create(self, request: Request) -> Any:
        self.created += 1
        await asyncio.sleep(request.args.get("sleep", 0.05))
        return {"number": self.created}

    async def fail(self, request: Request) -> Any:
        raise Fenced("too old", epoch=3, path=Path("/x"))

    async def migrate(self, request: Request) -> Any:
        for step in range(4):
            await asyncio.sleep(0.5)
            await request.progress(step=step)
        return {"outcome": "done"}

    async def bug(self, request: Request) -> Any:
        return 1 // 0

    def stop(self) -> None:
        self.run(self.server.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)


