"""A host that lost its power closes no connection: its silence shows in what TCP was acknowledged last."""

from __future__ import annotations

import ctypes
import socket
import struct
import time

import pytest

from rgpu.link.data.frames import SealedConnection

SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
DROP = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  #: BPF: return 0, take no packet


def deaf(sock: socket.socket) -> None:
    """Whatever comes for the socket is dropped before TCP sees it: nothing is acknowledged any more."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(DROP)))
    except PermissionError:
        pytest.skip("this system lets only root put a filter on a socket")


@pytest.fixture
def ends() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    return here, there


def unheard(sock: socket.socket) -> float:
    found = SealedConnection.__new__(SealedConnection)
    found.sock = sock
    return found.unheard()


def test_a_host_that_is_gone_and_one_that_only_does_not_read(ends: tuple[socket.socket, socket.socket]) -> None:
    here, there = ends
    for _ in range(5):  # its program stands still: nothing is read, and all is acknowledged
        time.sleep(0.1)
        here.sendall(b"sign of life")
    assert unheard(here) < 0.1
    deaf(there)
    before = unheard(here)
    for _ in range(5):
        time.sleep(0.1)
        here.sendall(b"sign of life")
    assert unheard(here) >= before + 0.4, "signs of life go out, and nobody answers"
    here.close()
    there.close()
    assert unheard(here) == 0.0, "no socket, no word"
