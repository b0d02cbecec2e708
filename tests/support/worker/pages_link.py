"""Two ends of a page stream in one process: sealed connections over loopback, and a receiver in a thread."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any

from rgpu.checkpoint.device import Device
from rgpu.checkpoint.manifest.state import SessionState
from rgpu.link.data.frames import Handover, SealedConnection
from rgpu.link.messages.data import FROM_NODE, TO_NODE
from rgpu.migrate.transfer.receiver import PageReceiver, Received
from rgpu.migrate.transfer.sender import PageSender
from rgpu.session.errors import RgpuError

KEY = bytes(range(32))


def sealed(near: socket.socket, far: socket.socket) -> tuple[SealedConnection, SealedConnection]:
    keys = secrets.token_bytes(32), secrets.token_bytes(32)
    first = Handover(keys[0], keys[1], TO_NODE, "s", 1, "pages").connection(near)
    return first, Handover(keys[1], keys[0], FROM_NODE, "s", 1, "pages").connection(far)


def state(position: int = 7) -> SessionState:
    return SessionState(session="s", epoch=1, position=position, hash_key=KEY, regions=[])


class Link:
    """``relay``: (host, port) → (host, port) puts something of the test's in the way of every connection."""

    def __init__(self, source: Device, destination: Device, *, lanes: int = 1,
                 relay: Callable[[tuple[str, int]], tuple[str, int]] = lambda address: address) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = relay(self.listener.getsockname()[:2])
        first, far = self.connect()
        self.receiver = self.receiver_of(far, destination)
        self.result: list[Received] = []
        self.errors: list[RgpuError] = []
        self.lane_threads: list[threading.Thread] = []
        self.thread = threading.Thread(target=self._receive, daemon=True)
        self.thread.start()
        self.sender = PageSender(first, source, KEY, more=self._more, lanes=lanes)

    def receiver_of(self, connection: SealedConnection, device: Device) -> PageReceiver:
        return PageReceiver(connection, device)

    def connect(self) -> tuple[SealedConnection, SealedConnection]:
        near = socket.create_connection(self.address, 5)
        return sealed(near, self.listener.accept()[0])

    def _more(self) -> SealedConnection:
        near, far = self.connect()
        thread = threading.Thread(target=self.receiver.join, args=(far,), daemon=True)
        thread.start()
        self.lane_threads.append(thread)
        return near

    def _receive(self) -> None:
        try:
            self.result.append(self.receiver.receive())
            self.receiver.done(1)
        except RgpuError as error:
            self.errors.append(error)
            try:
                self.receiver.failed(error.as_dict())
            except RgpuError:
                pass
            self.receiver.connection.close()

    def finish(self, **values: Any) -> Received:
        self.sender.finish(state(**values))
        self.thread.join(10)
        return self.result[0]

    def close(self) -> None:
        self.sender.close()
        self.sender.connection.close()
        self.receiver.close_lanes()
        self.listener.close()
        self.thread.join(10)
        for thread in self.lane_threads:
            thread.join(10)
        assert not self.thread.is_alive() and not any(thread.is_alive() for thread in self.lane_threads)
