"""The client of the control link for asyncio: many calls at once to one node."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from rgpu.link.control.control_client import Progress, configure, decode, parse
from rgpu.link.control.framing import encode
from rgpu.link.control.verbs import VERBS
from rgpu.link.keys import Endpoint, KeyPair
from rgpu.link.messages.control import Request as Message
from rgpu.session.errors import PoolUnavailable, RgpuError, UnknownOutcome


class AsyncControlClient:
    """A client for many calls at once to one node; for daemons. Make and use it in one event loop."""

    def __init__(self, keys: KeyPair, endpoint: Endpoint, context: zmq.asyncio.Context | None = None) -> None:
        self.endpoint = endpoint
        self._own = context is None
        self._context = context or zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        configure(self._socket, keys, endpoint)
        self._socket.connect(endpoint.address)
        self._waiting: dict[str, asyncio.Queue[bytes]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def call(self, verb: str, args: dict[str, Any] | None = None, timeout: float = 10.0,
                   on_progress: Progress | None = None, *, leader: int = 0, epoch: int = 0, command: str = "",
                   grant: str = "") -> Any:
        """Call a verb as :meth:`ControlClient.call` does, to this node only. ``grant``: of a web page's login."""
        if self._reader is None:
            self._reader = asyncio.ensure_future(self._read())
        message = Message(secrets.token_hex(8), verb, args or {}, leader, epoch, command or secrets.token_hex(16),
                          grant)
        queue = self._waiting.setdefault(message.id, asyncio.Queue())
        try:
            try:
                async with asyncio.timeout(timeout):
                    await self._socket.send(encode(message))
            except TimeoutError:
                raise PoolUnavailable(f"{self.endpoint.address} does not answer", verb=verb) from None
            while True:
                try:
                    async with asyncio.timeout(timeout):
                        body = await queue.get()
                except TimeoutError:
                    raise self._lost(message) from None
                reply = parse(body, message.id)
                if reply is None:
                    continue
                if reply.progress is not None:
                    if on_progress:
                        on_progress(reply.progress)
                elif reply.error is not None:
                    raise reply.error
                else:
                    return reply.result
        finally:
            self._waiting.pop(message.id, None)

    def _lost(self, message: Message) -> RgpuError:
        if message.verb in VERBS and not VERBS[message.verb].idempotent:
            return UnknownOutcome(f"{self.endpoint.address} did not answer {message.verb} in time", verb=message.verb,
                                  command=message.command)
        return PoolUnavailable(f"{self.endpoint.address} did not answer {message.verb} in time", verb=message.verb)

    async def _read(self) -> None:
        while True:
            body = await self._socket.recv()
            try:
                number = decode(body).get("id")
            except (msgspec.MsgspecError, UnicodeDecodeError, AttributeError):
                continue
            queue = self._waiting.get(number) if isinstance(number, str) else None
            if queue is not None:
                queue.put_nowait(body)

    async def close(self) -> None:
        """Stop reading and close the connection."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self._socket.close(0)
        if self._own:
            self._context.destroy(linger=0)
