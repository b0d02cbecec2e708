"""Both ends of a worker's link to its agent, over loopback; the agent's end keeps what comes in its order."""

from __future__ import annotations

import os
import socket
import struct
import threading
from typing import Any

import msgspec

from rgpu.client.data_link.host_link import HostAsk, HostLink
from rgpu.link.data.frames import Handover, SealedConnection
from rgpu.link.messages.data import FROM_NODE, LANE, TO_NODE
from rgpu.server.worker.agent.agent_link import AgentLink
from rgpu.server.worker.agent.same_host import HostMemory
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.session.errors import LinkError

ANSWER, WATERMARK, TEXT, PRINTED = 17, 18, 23, 8


def linked(runtime: SessionRuntime, published: int = 0, printed: int | None = None
           ) -> tuple[AgentLink, SealedConnection]:
    """A started link of the runtime over loopback TCP, and the agent's end of it, attached.

    ``printed``: bytes of printed text that the agent has; None: it takes none.
    """
    return _attached(runtime, {"delivered": published} | ({} if printed is None else {"printed": printed}))[:2]


def linked_here(runtime: SessionRuntime, host: HostMemory) -> tuple[AgentLink, SealedConnection, HostLink]:
    """The same, and the memory that both share."""
    ask = HostAsk(runtime.session, True)
    link, agent, answer = _attached(runtime, {"delivered": 0, **ask.attach_fields}, host)
    ask.told(answer)
    return link, agent, ask.found


def linked_with_lanes(runtime: SessionRuntime, count: int, printed: int | None = None
                      ) -> tuple[SealedConnection, list[SealedConnection]]:
    """The agent's end of a link, and of lanes that it has opened and not announced. RGPU_LANES allows them."""
    link, agent, said = _attached(runtime, {"delivered": 0} | ({} if printed is None else {"printed": printed}))
    lanes = []
    for number in range(count):
        near, far = _connected(runtime)
        near.send(LANE, msgspec.msgpack.encode({"key": said["lanes"]["key"], "number": number}))
        link.add_lane(far)
        lanes.append(near)
    return agent, lanes


def _connected(runtime: SessionRuntime) -> tuple[SealedConnection, SealedConnection]:
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    listener.close()
    keys = os.urandom(32), os.urandom(32)
    return (Handover(keys[0], keys[1], TO_NODE, runtime.session, runtime.epoch, "calls").connection(near),
            Handover(keys[1], keys[0], FROM_NODE, runtime.session, runtime.epoch, "calls").connection(far))


def _attached(runtime: SessionRuntime, fields: dict[str, Any], host: HostMemory | None = None
              ) -> tuple[AgentLink, SealedConnection, dict[str, Any]]:
    agent, worker = _connected(runtime)
    link = AgentLink(worker, runtime, lambda event, values: None, host=host)
    link.start()
    agent.send(1, msgspec.msgpack.encode({"session": runtime.session, "epoch": runtime.epoch, "client": "t", **fields}))
    kind, body = agent.recv(10)
    assert kind == 16
    return link, agent, msgspec.msgpack.decode(body)


class End:
    """Sends records; ``text``: what came, without a hole, from position ``given`` on."""

    def __init__(self, connection: SealedConnection, given: int = 0) -> None:
        self.connection = connection
        self.begin, self.text = given, b""
        self.answers: dict[int, tuple[int, bytes]] = {}  #: seq → result, the text that had come before
        self.marks: list[tuple[int, bytes]] = []  #: watermark, the text that had come before
        self._offset = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._receive, daemon=True).start()

    def send(self, data: bytes) -> None:
        self.connection.send(2, struct.pack("<Q", self._offset), data)
        self._offset += len(data)

    def confirm(self, count: int | None = None) -> None:
        self.connection.send(PRINTED, struct.pack("<Q", self.begin + len(self.text) if count is None else count))

    def answer(self, seq: int, seconds: float = 30) -> tuple[int, bytes]:
        """(CUresult, all text that had come before it)."""
        with self._changed:
            assert self._changed.wait_for(lambda: seq in self.answers, seconds), f"no answer to {seq}"
            return self.answers[seq]

    def wait_text(self, size: int, seconds: float = 30) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.text) >= size, seconds), \
                f"{len(self.text)} bytes of {size}"
            return self.text

    def _receive(self) -> None:
        try:
            while True:
                kind, body = self.connection.recv()
                with self._changed:
                    if kind == TEXT:
                        position = int.from_bytes(body[:8], "little")
                        assert position == self.begin + len(self.text), (position, self.begin, len(self.text))
                        self.text += bytes(body[8:])
                    elif kind == ANSWER and not body[0]:
                        seq, result = struct.unpack_from("<Qi", body, 1)
                        self.answers[seq] = result, self.text
                    elif kind == WATERMARK:
                        self.marks.append((int.from_bytes(body[:8], "little"), self.text))
                    self._changed.notify_all()
        except LinkError:
            pass
