"""A process that encodes and fills the frames of another process (:mod:`.encoding`, :mod:`.filling`).

:mod:`.encoders` starts it.

    python -m rgpu.checkpoint.codec.encoder NICE FD FD …

One process for each socket. It receives pages, keys and the packs that it is
handed, and nothing else: no store, no session, no device. Messages over a
socket, all integers little-endian:

======== ==========================================================================
request  op u8, 3 zero bytes, frame u32, pages u32, bytes of the frame u32, then
         for ENCODE the hash key (32), the name key (32), pages × hash (16); for
         FILL the name key (32), pages × filling.WANTED (48), whose packs are slots;
         the first ENCODE or FILL with a frame's number carries its descriptor.
         OPEN: frame is a slot, the descriptor is the pack in that slot from now on
answer   status u8, 3 zero bytes, number u32: OK to ENCODE with pages × (name 32,
         length u64), to FILL with pages × (1: the row holds its page, 0);
         CHANGED with the row; FAILED with so many bytes of text
======== ==========================================================================

OPEN and FORGET (unmap every frame, close every pack) have no answer. The
process ends when its socket is closed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import struct
import sys

import numpy as np

from rgpu.checkpoint.blobs.base import read_from
from rgpu.checkpoint.codec import encoding, filling
from rgpu.checkpoint.codec.frames import PITCH

ENCODE, FORGET, FILL, OPEN = 1, 2, 3, 4
OK, CHANGED, FAILED = 0, 1, 2
REQUEST, ANSWER = struct.Struct("<B3xIII"), struct.Struct("<B3xI")
KEY, HASH = 32, 16


class Ended(Exception):
    """The other side closed the connection."""


def receive(link: socket.socket, count: int) -> bytearray:
    """Receive exactly ``count`` bytes. Raises :class:`Ended`."""
    data = bytearray(count)
    view, at = memoryview(data), 0
    while at < count:
        try:
            got = link.recv_into(view[at:])
        except ConnectionError:
            got = 0
        if not got:
            raise Ended
        at += got
    return data


class Server:
    """State of one process: the frames that it has mapped, the packs that it has open."""

    def __init__(self) -> None:
        self._frames: dict[int, mmap.mmap] = {}
        self._packs: dict[int, int] = {}

    def serve(self, link: socket.socket) -> None:
        """Serve requests until the socket is closed."""
        while True:
            head, files, _, _ = socket.recv_fds(link, REQUEST.size, 1)
            if not head:
                return
            head += receive(link, REQUEST.size - len(head))
            op, number, pages, size = REQUEST.unpack(head)
            if op == FORGET:
                self._forget()
            elif op == OPEN:
                if number in self._packs:
                    os.close(self._packs[number])
                (self._packs[number],) = files
            else:
                for fd in files:
                    self._frames[number] = mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
                    os.close(fd)
                do = self._encode if op == ENCODE else self._fill
                link.sendall(do(link, np.frombuffer(self._frames[number], np.uint8, pages * PITCH).reshape(-1, PITCH)))

    def _forget(self) -> None:
        self._frames.clear()
        for fd in self._packs.values():
            os.close(fd)
        self._packs.clear()

    def _encode(self, link: socket.socket, rows: encoding.Array) -> bytes:
        keys = bytes(receive(link, 2 * KEY))
        hashes = np.frombuffer(receive(link, len(rows) * HASH), np.uint64).reshape(-1, 2)
        try:
            found = encoding.encode(rows, hashes, keys[:KEY], keys[KEY:])
        except encoding.PageChanged as changed:
            return ANSWER.pack(CHANGED, changed.row)
        except Exception as error:  # reported to the caller: the process goes on
            return _failed(error)
        return ANSWER.pack(OK, len(rows)) + found.names.tobytes() + found.lengths.astype("<u8").tobytes()

    def _fill(self, link: socket.socket, rows: filling.Array) -> bytes:
        key = bytes(receive(link, KEY))
        wanted = np.frombuffer(receive(link, len(rows) * filling.WANTED.itemsize), filling.WANTED)
        try:
            right = filling.fill(rows, wanted, key, self._read)
        except Exception as error:
            return _failed(error)
        return ANSWER.pack(OK, len(rows)) + right.astype(np.uint8).tobytes()

    def _read(self, pack: int, offset: int, buffers: list[memoryview]) -> None:
        """Read from a pack; errors are ignored here, since the caller will meet and report the same error."""
        with contextlib.suppress(OSError):
            read_from(self._packs[pack], offset, buffers)


def _failed(error: Exception) -> bytes:
    text = f"{type(error).__name__}: {error}".encode()[:1000]
    return ANSWER.pack(FAILED, len(text)) + text


def main(nice: int, fds: list[int]) -> None:
    """Run an encoding process: serve requests on the sockets ``fds`` at niceness ``nice`` until they close."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the process that sends the requests
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(nice)
    encoding.prepare()  # once, before the forks
    mine = fds[0]
    for fd in fds[1:]:
        if os.fork() == 0:
            mine = fd
            break
    for fd in fds:
        if fd != mine:
            with contextlib.suppress(OSError):
                os.close(fd)
    with socket.socket(fileno=mine) as link, contextlib.suppress(Ended, OSError):
        Server().serve(link)


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(argument) for argument in sys.argv[2:]])
