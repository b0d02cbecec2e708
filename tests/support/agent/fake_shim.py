"""A shim in Python: the client's side of the Unix socket and of the shared memory."""

from __future__ import annotations

import array
import contextlib
import fcntl
import mmap
import os
import select
import socket
import struct
import time
import zlib

from rgpu.link.messages.shim import (
    ANSWER,
    ANSWER_AT,
    AREA,
    AREA_MAPPED,
    RELEASE,
    STATE,
    TEXT,
    WANTS_AREA,
    WANTS_TEXT,
    WATERMARK,
    WELCOME,
)
from rgpu.session.calls.wire import BY_NAME
from rgpu.session.journal.record import AWAITED, EXTERNAL, HEADER, pack

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class FakeSegment:
    def __init__(self, index: int, kind: int, size: int, first_seq: int = 0, seals: int = SEALS) -> None:
        self.index, self.kind, self.size = index, kind, size
        self.fd = os.memfd_create("log", os.MFD_ALLOW_SEALING)
        os.posix_fallocate(self.fd, 0, size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        self.map = mmap.mmap(self.fd, size)
        struct.pack_into("<8sIIQQQQ", self.map, 0, b"RGPUSEG1", index, kind, size, 64, 0, first_seq)
        self.used = 64

    def __del__(self) -> None:
        os.close(self.fd)  # many tests of one process make many segments

    def set(self, offset: int, value: int) -> None:
        struct.pack_into("<Q", self.map, offset, value)

    def commit(self) -> None:
        self.set(24, self.used)


class Journal:
    """Writes records into segments, as the shim does; ``offer`` announces a segment."""

    def __init__(self, offer: object, log_size: int = 1 << 16, bulk_size: int = 1 << 18) -> None:
        self.offer = offer
        self.log_size, self.bulk_size = log_size, bulk_size
        self.seq = 0
        self.index = 0
        self.log: FakeSegment | None = None
        self.bulk: FakeSegment | None = None
        self.wire: list[bytes] = []  #: every record as it must arrive

    def _segment(self, kind: int, size: int) -> FakeSegment:
        segment = FakeSegment(self.index, kind, size, self.seq + 1)
        self.index += 1
        self.offer(segment)  # type: ignore[operator]
        return segment

    def append(self, call: str, args: bytes = b"", payload: bytes = b"", awaited: bool = False,
               external: bool = False) -> int:
        number = BY_NAME[call].id
        record = pack(self.seq + 1, number, args, payload, 0, AWAITED if awaited else 0)
        data = record
        if external:
            data = self._external(record, args, payload)
        if self.log is None or self.log.used + len(data) > self.log.size:
            new = self._segment(0, self.log_size)
            if self.log is not None:
                self.log.set(32, new.index + 1)
            self.log = new
        self.log.map[self.log.used:self.log.used + len(data)] = data
        self.log.used += len(data)
        self.seq += 1
        self.wire.append(record)
        self.log.commit()
        return self.seq

    def _external(self, record: bytes, args: bytes, payload: bytes) -> bytes:
        if self.bulk is None or self.bulk.used + len(payload) > self.bulk.size:
            if self.bulk is not None:
                self.bulk.set(32, 1)
            self.bulk = self._segment(1, max(self.bulk_size, (len(payload) + 64 + 4095) & ~4095))
        at = self.bulk.used
        self.bulk.map[at:at + len(payload)] = payload
        self.bulk.used = (at + len(payload) + 63) & ~63
        head = bytearray(record[:HEADER.size + (len(args) + 7 & ~7)])
        head[6] |= EXTERNAL
        return bytes(head) + struct.pack("<IIQ", self.bulk.index, 0, at)


class FakeReader:
    """Reads the answer ring (docs/developers/links/shim-link.md); never attends, so each message rings the bell."""

    def __init__(self) -> None:
        page = os.memfd_create("shim", os.MFD_ALLOW_SEALING)
        os.posix_fallocate(page, 0, 4096)
        fcntl.fcntl(page, fcntl.F_ADD_SEALS, SEALS)
        self.words = memoryview(mmap.mmap(page, 4096)).cast("Q")
        self.doorbell = os.eventfd(0, os.EFD_NONBLOCK)
        self.fds = (page, self.doorbell)
        self.at = 0
        self.pieces: bytearray | None = None
        self.wraps = self.restarts = self.longest = 0
        self.idle = False  #: read nothing
        self.areas: dict[int, mmap.mmap] = {}  #: the workers', by number

    def stamp(self, seq: int, ns: int) -> None:
        """Say that call ``seq`` is published now."""
        at = 1024 // 8 + self.words[192 // 8] % 64 * 2
        self.words[at], self.words[at + 1] = seq, ns
        self.words[192 // 8] += 1

    def read(self, page: mmap.mmap) -> list[tuple[int, bytes]]:
        """Whole messages that have come since."""
        found: list[tuple[int, bytes]] = []
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.doorbell)
        words = memoryview(page).cast("Q")
        offset, capacity = words[1], words[2]
        while not self.idle and (pending := words[128 // 8] - self.at):
            assert pending <= capacity
            here = offset + self.at % capacity
            length, kind, first, _ = struct.unpack_from("<IIII", page, here)
            block = 16 + length + 63 & ~63
            if kind == 0:
                block = capacity - self.at % capacity
                self.wraps += 1
            elif kind in (WATERMARK, TEXT):
                found.append((kind, page[here + 16:here + 16 + length]))
            elif kind == ANSWER_AT and self.areas:
                more, number, at, size = struct.unpack_from("<BIQQ", page, here + 16)
                self._piece(bytes([more]) + page[here + 16 + 21:here + 16 + length] + self.areas[number][at:at + size],
                            first, found)
            else:
                self._piece(page[here + 16:here + 16 + length], first, found)
            assert block <= pending and here + block <= offset + capacity
            self.at += block
            self.words[64 // 8] = self.at
        return found

    def _piece(self, body: bytes, first: int, found: list[tuple[int, bytes]]) -> None:
        assert (self.pieces is None) <= first, "a piece that continues nothing"
        self.restarts += first and self.pieces is not None
        self.longest = max(self.longest, len(body))
        if first or self.pieces is None:
            self.pieces = bytearray()
        self.pieces += body[1:]
        if not body[0]:
            found.append((ANSWER, bytes(self.pieces)))
            self.pieces = None


class FakeShim:
    """Connects to an agent, says HELLO, journals calls, and reads what comes back."""

    def __init__(self, path: str, ring: bool = False, text: bool = False, area: bool = False, **sizes: int) -> None:
        self.takes_text, self.takes_area = text, area
        self.text = b""  #: what kernels printed, each byte once
        self.ring = FakeReader() if ring else None
        self.eventfd = os.eventfd(0, os.EFD_NONBLOCK)
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(path)
        self.journal = Journal(self._offer, **sizes)
        self.answers: list[tuple[int, int, bytes, bytes]] = []
        self.watermarks: list[int] = []
        self.released: list[int] = []
        self.states: list[int] = []
        self.welcome = b""
        self.refused = ""
        self.page: mmap.mmap | None = None
        self.eof = False
        self._in = bytearray()
        self._area: mmap.mmap

    def hello(self) -> None:
        name = b"/usr/bin/fake"
        body = struct.pack("<IIIIQH", 1, os.getpid(), os.getppid(),
                           (self.ring is not None) | self.takes_text * WANTS_TEXT | self.takes_area * WANTS_AREA, 0,
                           len(name)) + name
        self._send(1, body, self.eventfd, *(self.ring.fds if self.ring else ()))
        self.wait(lambda: self.welcome or self.refused or self.eof)

    def _offer(self, segment: FakeSegment) -> None:
        self._send(2, struct.pack("<IIQ", segment.index, segment.kind, segment.size), segment.fd)

    def _send(self, kind: int, body: bytes, *fds: int) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.sock.sendmsg([struct.pack("<II", len(body), kind) + body], rights)

    def call(self, name: str, args: bytes = b"", payload: bytes = b"", awaited: bool = False,
             external: bool = False) -> int:
        seq = self.journal.append(name, args, payload, awaited, external)
        self.wake()
        return seq

    def wake(self) -> None:
        if self.page is not None and struct.unpack_from("<I", self.page, 64)[0]:
            os.eventfd_write(self.eventfd, 1)

    def wait(self, until: object, timeout: float = 60.0) -> None:
        """Read messages until the condition holds."""
        deadline = time.monotonic() + timeout
        while not until():  # type: ignore[operator]
            left = deadline - time.monotonic()
            assert left > 0, "the agent did not do it in time"
            bell = [self.ring.doorbell] if self.ring else []
            poll = select.poll()  # select() has no room for the descriptors of a long test run
            for source in (*bell, *([] if self.eof else [self.sock])):
                poll.register(source, select.POLLIN)
            ready = {fd for fd, _ in poll.poll(1000 * min(left, 0.05))}
            if not self.eof and self.sock.fileno() in ready:
                self._receive()
            if self.ring is not None and self.page is not None:
                for kind, body in self.ring.read(self.page):
                    self._message(kind, body)

    def _receive(self) -> None:
        try:
            data, ancillary, _, _ = self.sock.recvmsg(1 << 20, socket.CMSG_SPACE(16))
        except OSError:
            data, ancillary = b"", []
        for _, _, raw in ancillary:
            fds = array.array("i", raw)
            if self.page is None:
                self.page = mmap.mmap(fds[0], 0, prot=mmap.PROT_READ)
            else:
                self._area = mmap.mmap(fds[0], 0, prot=mmap.PROT_READ)
                os.close(fds[0])
        if not data:
            self.eof = True
        self._in += data
        while len(self._in) >= 8:
            length, kind = struct.unpack_from("<II", self._in)
            if len(self._in) < 8 + length:
                break
            body = bytes(self._in[8:8 + length])
            del self._in[:8 + length]
            self._message(kind, body)

    def _message(self, kind: int, body: bytes) -> None:
        if kind == WELCOME:
            self.welcome = body
        elif kind == ANSWER:
            seq, result, _, size = struct.unpack_from("<QiII", body)
            self.answers.append((seq, result, body[20:20 + size], body[20 + size:]))
        elif kind == WATERMARK:
            self.watermarks.append(struct.unpack_from("<Q", body)[0])
        elif kind == TEXT:
            position = int.from_bytes(body[:8], "little")
            assert self.takes_text and position <= len(self.text), "a hole"
            self.text += body[8 + len(self.text) - position:]
        elif kind == AREA:
            assert self.ring is not None
            number, _, _ = struct.unpack("<IIQ", body)
            self.ring.areas[number] = self._area
            self._send(AREA_MAPPED, struct.pack("<I", number))
        elif kind == RELEASE:
            self.released.append(struct.unpack("<I", body)[0])
        elif kind == STATE:
            self.states.append(struct.unpack_from("<I", body)[0])
        else:
            self.refused = body[6:].decode() or "refused"

    def goodbye(self) -> None:
        self._send(3, struct.pack("<I", 0))
        self.close()

    def close(self) -> None:
        self.sock.close()


def checksum(data: bytes) -> int:
    return zlib.crc32(data)
