"""Two ends of a data link with lanes."""

from __future__ import annotations

import socket
import threading
import time

from rgpu.link.data.frames import SealedConnection
from rgpu.link.data.sealing import Opener, Sealer
from rgpu.link.messages.data import FROM_NODE, TO_NODE

KEYS = bytes(32), bytes(range(32))


def pair() -> tuple[SealedConnection, SealedConnection]:
    """Both ends of a connection."""
    ends = []
    for sock, here, there in zip(socket.socketpair(), (TO_NODE, FROM_NODE), (FROM_NODE, TO_NODE), strict=True):
        ends.append(SealedConnection(sock, Sealer(KEYS[here], here, 1, "s"), Opener(KEYS[there], there, 1, "s"),
                                     session="s", epoch=1, purpose="lane"))
    return ends[0], ends[1]


def slow_pair(rate: float) -> tuple[SealedConnection, SealedConnection, threading.Event]:
    """Both ends of a TCP connection of ``rate`` bytes a second from the first to the second; the event stops it."""
    socks = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 * 1024)
            near = socket.socket()
            near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 * 1024)
            near.connect(server.getsockname())
            socks.append((near, server.accept()[0]))
    (here, inner), (outer, there) = socks
    stopped = threading.Event()

    def relay() -> None:
        with inner, outer:
            while not stopped.is_set() and (data := inner.recv(8 * 1024)):
                outer.sendall(data)
                time.sleep(len(data) / rate)
            outer.recv(1)  # until the second end is closed: it says nothing

    threading.Thread(target=relay, daemon=True).start()
    found = pair()
    for connection, sock in zip(found, (here, there), strict=True):
        connection.sock.close()
        connection.sock = sock
    return *found, stopped
