"""Bodies of the data link between agent and worker, and how a connection of it is opened."""

from __future__ import annotations

import os
import socket
import struct
import threading
from typing import Any
from unittest import mock

import msgspec

from rgpu.client.data_link import agent_lanes as link_lanes
from rgpu.client.data_link.connection import DataLink, attach
from rgpu.client.run.pool_requests import Grant
from rgpu.client.session.attachment import Owner
from rgpu.link.data import agreement, frames
from rgpu.link.data import opening as opening_of_nodes
from rgpu.link.data.frames import SealedConnection, client_preamble
from rgpu.link.data.opening import server_preamble
from rgpu.link.data.published import Issued, Ping, pong
from rgpu.link.data.sealing import Sealer
from rgpu.link.data.tickets import issue
from rgpu.link.messages import data as to_data
from rgpu.server.device.cpu import CpuDevice
from rgpu.server.worker.agent import agent_link, answer_sender
from rgpu.server.worker.agent import link_lanes as worker_lanes
from rgpu.server.worker.agent.module_stream import ModuleStream
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.session.errors import NotFound, RgpuError
from tests.link.protocols.recording.book import Book, pair
from tests.support.worker.links import linked

OF_SHARES = agreement.X25519PrivateKey.from_private_bytes(bytes(range(32)))


def to_worker() -> dict[str, list[str]]:
    """What an agent says to its worker."""
    book = Book()
    near, far = pair()
    link = DataLink(1, near)
    link.send_calls([b"records"])
    link.send_calls_at([b"head"], 3, 128, 4096)
    link.send_reference(70000, bytes(range(32)))
    link.send_have([bytes(32), bytes(range(32))])
    link.send(to_data.PING, Ping(9, 10, 4, 123456789, True).pack())
    link.send(to_data.ISSUED, Issued(123456789, 123450000, 10).pack())
    link.send(to_data.PRINTED, struct.pack("<Q", 77))
    link.send_map(3, {"reason": "", "exit_code": 0, "statistics": {}})
    link.send_map(to_data.STATS, {"calls": 1})
    link.send(to_data.AREA_READY, to_data.AREA_LAYOUT.pack(4))
    found, other = pair()
    lanes = link_lanes.LinkLanes({"key": bytes(16), "most": 1}, 1)
    lanes.claim()
    lanes.opened([found], lambda: None)
    link.lanes = lanes
    link.use_lanes()
    link.send_calls([bytes(1 << 20)])
    for _ in range(12):
        kind, body = far.recv(5)
        book.note(kind, bytes(body))
    kind, body = other.recv(5)
    book.note(kind, bytes(body))
    link.close()
    _attached(book)
    return book.told()


def _attached(book: Book) -> None:
    """ATTACH and LANE, over the preamble, by the agent's own functions."""
    secret = os.urandom(32)
    listener = socket.create_server(("127.0.0.1", 0))
    granted = issue(secret, "s", "agent", "calls")

    def serve() -> None:
        for _ in range(2):
            sock, _ = listener.accept()
            connection = server_preamble(sock, [secret], lambda ticket: 3).connection(sock)
            kind, said = connection.recv(5)
            book.note(kind, bytes(said), changing=True)
            if kind == 1:
                connection.send(16, msgspec.msgpack.encode({"epoch": 3, "next": 1}))
            connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    address = listener.getsockname()[:2]
    attach(address, granted.ticket, granted.secret, "s", 3, 12, "c", printed=5, extra={"usual": 4})[0].close()
    lanes = link_lanes.LinkLanes({"key": bytes(16), "most": 1}, 1)
    grant = Grant(granted.ticket, granted.secret, granted.expires)
    for connection in lanes.open(1, Owner("n", address, 3), 3, grant, "s"):
        connection.close()
    thread.join(10)
    listener.close()


def to_agent() -> dict[str, list[str]]:
    """What a worker says to its agent."""
    book = Book()
    sent = SealedConnection.send

    def tap(self: SealedConnection, kind: int, *parts: Any) -> None:
        if self is worker[0]:
            whole = b"".join(bytes(part) for part in parts)
            book.note(kind, whole, kind in (16, 19))
        sent(self, kind, *parts)

    worker: list[Any] = [None]
    made = agent_link.AgentLink.__init__

    def keep(self: Any, connection: SealedConnection, *args: Any, **more: Any) -> None:
        worker[0] = connection
        made(self, connection, *args, **more)

    runtime = SessionRuntime("s", 1, CpuDevice(1 << 28))
    runtime.watermark = lambda: (9, 0, {16: 8})  # type: ignore[method-assign]
    runtime.text.pieces = lambda who: [(3, b"printed")]  # type: ignore[method-assign,assignment]
    with mock.patch.object(SealedConnection, "send", tap), mock.patch.object(agent_link.AgentLink, "__init__", keep):
        link, agent = linked(runtime, printed=0)
        link._sender._send_answer(5, 0, b"reply", b"payload")
        link._sender._send_answer(6, 719, b"", b"")
        link.notice("cut", position=4, image="i")
        link._pinged(Ping(7, None))
        awaited = {17, 18, 19, 20, 23}
        while awaited:
            awaited.discard(agent.recv(20)[0])
        link.finish()
        agent.close()
    runtime.device.close()  # its address range is the process's: the next one may need it
    stream = ModuleStream(None, lambda kind, body: book.note(kind, body))
    stream.have(bytes(32))
    stream.take(6, struct.pack("<QQ32s", 0, 70000, bytes(32)))
    mark = worker_lanes.mark_back(2, 1 << 20)
    book.note(mark[0], mark[1:])
    at = answer_sender._AT + to_data.PIECE_AT_LAYOUT.pack(1, 4, 64, 128)
    book.note(at[0], at[1:])
    book.note(to_data.PONG, pong(9, 5))
    return book.told()


def opening() -> dict[str, str]:
    """The preamble both ways, a refusal, and one sealed frame."""
    pool, session = bytes(32), "s"
    granted = issue(pool, session, "agent", "pages")

    def talk(lookup: Any) -> tuple[str, str]:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        sent: list[tuple[str, bytes]] = []
        write = frames.send_exact

        def keep(sock: socket.socket, data: bytes, deadline: float) -> None:
            sent.append(("client" if sock is near else "node", data.replace(granted.ticket, b"TICKET")))
            write(sock, data, deadline)

        def serve() -> None:
            try:
                server_preamble(far, [pool], lookup)
            except RgpuError:
                pass

        with mock.patch.object(frames, "send_exact", keep), mock.patch.object(opening_of_nodes, "send_exact", keep), \
                mock.patch.object(agreement.X25519PrivateKey, "generate", lambda: OF_SHARES):
            thread = threading.Thread(target=serve)
            thread.start()
            try:
                client_preamble(near, "pages", granted.ticket, granted.secret, session)
            except RgpuError:
                pass
            thread.join(5)
        near.close()
        far.close()
        told = dict(sent)
        head = bytearray(told["client"])
        struct.pack_into("<I", head, 8, 6)  # the ticket's length, of the word in its place
        return bytes(head).hex(), told["node"].hex()

    def refuse(ticket: Any) -> int:
        raise NotFound("no such session")

    client, node = talk(lambda ticket: 7)
    return {"client": client, "node": node, "refusal": talk(refuse)[1],
            "frame": bytes(Sealer(bytes(range(32)), to_data.TO_NODE, 7, "s").seal(2, (b"body",))).hex()}
