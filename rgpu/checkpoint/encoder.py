"""A process that encodes frames of another one (:mod:`.encoding`); started by :mod:`.encoders`.

    python -m rgpu.checkpoint.encoder FD FD …

One process for each socket. It knows pages, keys and nothing else: no store, no
session, no device. Messages over a socket, all integers little-endian:

======== ==========================================================================
request  op u8, 3 zero bytes, frame u32, pages u32, bytes of the frame u32, then
         for ENCODE the hash key (32), the name key (32), pages × hash (16); the
         frame's descriptor comes with the first request that has its number
answer   status u8, 3 zero bytes, number u32: OK with pages × (name 32, length u64);
         CHANGED with the row; FAILED with so many bytes of text
======== ==========================================================================

FORGET (no answer) unmaps every frame. A socket that ends, ends the process.
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

from rgpu.checkpoint import encoding
from rgpu.checkpoint.frames import PITCH

ENCODE, FORGET = 1, 2
OK, CHANGED, FAILED = 0, 1, 2
REQUEST, ANSWER = struct.Struct("<B3xIII"), struct.Struct("<B3xI")
KEY, HASH = 32, 16
NICE = 5  #: the session's own threads go first


class Ended(Exception):
    """The other side is gone."""


def receive(link: socket.socket, count: int) -> bytearray:
    """Exactly so many bytes. Raises :class:`Ended`."""
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


def serve(link: socket.socket) -> None:
    """Until the socket ends."""
    frames: dict[int, mmap.mmap] = {}
    while True:
        head, files, _, _ = socket.recv_fds(link, REQUEST.size, 1)
        if not head:
            return
        head += receive(link, REQUEST.size - len(head))
        op, frame, pages, size = REQUEST.unpack(head)
        if op == FORGET:
            frames.clear()
            continue
        for fd in files:
            frames[frame] = mmap.mmap(fd, size)
            os.close(fd)
        keys = bytes(receive(link, 2 * KEY))
        hashes = np.frombuffer(receive(link, pages * HASH), np.uint64).reshape(pages, 2)
        link.sendall(_answer(frames[frame], pages, hashes, keys))


def _answer(memory: mmap.mmap, pages: int, hashes: encoding.Array, keys: bytes) -> bytes:
    rows = np.frombuffer(memory, np.uint8, pages * PITCH).reshape(pages, PITCH)
    try:
        found = encoding.encode(rows, hashes, keys[:KEY], keys[KEY:])
    except encoding.PageChanged as changed:
        return ANSWER.pack(CHANGED, changed.row)
    except Exception as error:  # told to who asked: the process goes on
        text = f"{type(error).__name__}: {error}".encode()[:1000]
        return ANSWER.pack(FAILED, len(text)) + text
    return ANSWER.pack(OK, pages) + found.names.tobytes() + found.lengths.astype("<u8").tobytes()


def main(fds: list[int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever asks
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(NICE)
    encoding.prepare()  # once for all of them
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
        serve(link)


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])
