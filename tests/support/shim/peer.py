"""A stand-in for agent and worker, in one thread: enough to run programs against the shim alone.

Memory is a sparse set of pages; nothing is executed, launches are recorded.
Every record stands in ``calls`` as (wire name, arguments, payload).
"""

from __future__ import annotations

import json
import os
import re
import select
import socket
import struct
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rgpu.client.journal.kept import Journal, Policy
from rgpu.client.shim_link import local
from rgpu.client.shim_link.answer_ring import AgentPage
from rgpu.client.shim_link.listening import listen
from rgpu.link.messages.shim import WATERMARK
from rgpu.session import addresses, facts
from rgpu.session.calls import decoders, wire
from rgpu.session.journal.record import AWAITED, Record, RecordReader
from rgpu.session.objects import module_table

MIB = 1 << 20
NATIVE: dict[str, Any] = json.loads((Path(__file__).parents[2] / "client/shim/handshake/native_580.json").read_text())

#: Differences of an sm_75 device to the recorded H200, by CUdevice_attribute.
TURING = {75: 7, 76: 5, 16: 40, 39: 1024, 106: 16, 81: 65536, 97: 65536, 111: 0, 108: 0, 109: 0, 120: 0, 131: 0}


def device(index: int = 0) -> facts.DeviceInfo:
    """The facts of an sm_75 device."""
    attributes = {int(key): row[1] for key, row in NATIVE["devices"]["attributes"].items() if row[0] == 0} | TURING
    return facts.DeviceInfo(
        "rgpu test device", bytes((16 * index + i) % 256 for i in range(16)), 4096 * MIB, (0, 6 + index, 1),
        addresses.device_base(index), addresses.DEVICE_STRIDE, attributes)


class Memory:
    """Bytes at addresses, zero where nothing was written."""

    def __init__(self) -> None:
        self.pages: dict[int, bytearray] = {}

    def _pieces(self, address: int, size: int) -> Any:
        at = address
        while at < address + size:
            offset = at % addresses.PAGE
            count = min(addresses.PAGE - offset, address + size - at)
            yield self.pages.setdefault(at - offset, bytearray(addresses.PAGE)), offset, at - address, count
            at += count

    def write(self, address: int, data: Any) -> None:
        for page, offset, start, count in self._pieces(address, len(data)):
            page[offset:offset + count] = data[start:start + count]

    def read(self, address: int, size: int) -> bytes:
        return b"".join(bytes(page[offset:offset + count]) for page, offset, _, count in self._pieces(address, size))


def table_of(ptx: str, base: int) -> module_table.ModuleTable:
    """Functions and variables that PTX text declares; sizes as its types say."""
    sizes = {"8": 1, "16": 2, "32": 4, "64": 8}
    functions = []
    for name, text in re.findall(r"\.entry\s+(\w+)\s*\(([^)]*)\)", ptx):
        parameters, at = [], 0
        for bits, count in re.findall(r"\.param[^,]*?\.[busf](\d+)\s+\w+(?:\[(\d+)\])?", text):
            unit = sizes[bits]
            size = unit * int(count or 1)
            align = 16 if ".align 16" in text and count else unit
            at = -(-at // align) * align
            parameters.append((at, size))
            at += size
        functions.append(module_table.FunctionInfo(
            name, tuple(parameters), (1024, 0, 0, 0, 16, 75, 75, 0, 49152, -1, 0, 0, 0, 0, 0, 0)))
    variables, at = [], base
    for bits, name, count in re.findall(r"\.(?:global|const)\s[^;]*?\.[busf](\d+)\s+(\w+)(?:\[(\d+)\])?\s*[;=]", ptx):
        size = sizes[bits] * int(count or 1)
        variables.append(module_table.GlobalVariable(name, at, size))
        at += -(-size // 256) * 256
    return module_table.ModuleTable(tuple(functions), tuple(variables))


def _sections(elf: bytes) -> dict[str, tuple[int, bytes]]:
    """name → (type, contents) of an ELF file's sections."""
    (start,) = struct.unpack_from("<Q", elf, 40)
    count, names = struct.unpack_from("<HH", elf, 60)
    headers = [struct.unpack_from("<IIQQQQ", elf, start + 64 * i) for i in range(count)]
    _, _, _, _, at, size = headers[names]
    text = elf[at:at + size]
    return {text[h[0]:text.index(b"\0", h[0])].decode(): (h[1], elf[h[4]:h[4] + h[5]]) for h in headers}


def table_of_cubin(elf: bytes) -> module_table.ModuleTable:
    """Kernels of a cubin, with the parameters that its .nv.info sections list (attribute 0x17)."""
    functions = []
    for name, (_, info) in _sections(elf).items():
        if not name.startswith(".nv.info."):
            continue
        parameters: dict[int, tuple[int, int]] = {}
        at = 0
        while at + 4 <= len(info):
            form, attribute, size = struct.unpack_from("<BBH", info, at)
            at += 4
            if form != 4:
                continue
            if attribute == 0x17:
                _, ordinal, offset, flags = struct.unpack_from("<IHHI", info, at)
                parameters[ordinal] = (offset, flags >> 18 & 0x3FFF)
            at += size
        functions.append(module_table.FunctionInfo(
            name[len(".nv.info."):], tuple(parameters[i] for i in sorted(parameters)),
            (1024, 0, 0, 0, 16, 75, 75, 0, 49152, -1, 0, 0, 0, 0, 0, 0)))
    return module_table.ModuleTable(tuple(functions), ())


class Peer:
    """Listens at ``path``; serves any number of programs, one after another or at once."""

    def __init__(self, devices: tuple[facts.DeviceInfo, ...] | None = None, quota: int = 1024 * MIB,
                 driver_version: int = 13000) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="rgpu-peer-")
        self.socket, self.path = listen(Path(self.directory.name))
        self.facts = facts.SessionFacts("test", 1, driver_version, quota, 1 << 30, False,
                                        devices if devices is not None else (device(),))
        self.calls: list[tuple[str, Any, bytes]] = []
        self.errors: list[str] = []
        self.loads: list[Callable[[bytes], tuple[int, bytes, bytes]]] = []  #: answers for the next module_load calls
        self.hellos = 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def names(self) -> list[str]:
        return [name for name, _, _ in self.calls]

    def close(self) -> None:
        self._stop.set()
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        for thread in self._threads:
            thread.join(5)
        self.directory.cleanup()
        assert not self.errors, self.errors

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        session = Session(self, connection)
        try:
            while not session.peer.eof and not self._stop.is_set():
                session.turn()
        except Exception as error:  # a test must see it, whatever it is
            self.errors.append(f"{type(error).__name__}: {error}")
        finally:
            session.close()


class Session:
    """One connected program."""

    def __init__(self, owner: Peer, connection: socket.socket) -> None:
        self.owner = owner
        self.peer = local.LocalPeer(connection)
        self.page = AgentPage()
        self.page.set_sleeping(True)
        self.journal = Journal(Policy())
        self.reader = RecordReader(next_seq=1)
        self.memory = Memory()
        self.eventfd: int | None = None
        self.position = 1
        self.next_global = addresses.DEVICE_BASE + addresses.GLOBALS_OFFSET

    def turn(self) -> None:
        poll = select.poll()  # select() ends at descriptor 1023
        poll.register(self.peer.fileno(), select.POLLIN | (select.POLLOUT if self.peer.wants_write else 0))
        if self.eventfd is not None:
            poll.register(self.eventfd, select.POLLIN)
        poll.poll(20)
        if self.eventfd is not None:
            try:
                os.read(self.eventfd, 8)
            except BlockingIOError:
                pass
        self.peer.flush()
        for message in self.peer.receive():
            if isinstance(message, local.Hello):
                self.owner.hellos += 1
                self.eventfd = message.eventfd
                os.set_blocking(self.eventfd, False)
                self.peer.send_welcome(self.owner.facts.encode(), self.page.fd)
            elif isinstance(message, local.NewSegment):
                self.journal.offer(message)
            elif isinstance(message, local.UsagePage):
                os.close(message.fd)
        self.journal.advance()
        self._apply_all()

    def _apply_all(self) -> None:
        cursor = self.journal.cursor(self.position)
        done = 0
        while pieces := self.journal.take(cursor, MIB):
            for piece in pieces:
                for record in self.reader.feed(bytes(piece)):
                    self._apply(record)
                    done = record.seq
        if done:
            self.position = done + 1
            self.peer.send(WATERMARK, struct.pack("<QII", done, 0, 0))

    def _apply(self, record: Record) -> None:
        call = wire.BY_ID[record.call_id]
        arguments = decoders.decode(record.call_id, record.args)
        payload = bytes(record.payload)
        self.owner.calls.append((call.name, arguments, payload))
        handler = getattr(self, "_" + call.name, None)
        result, reply, data = handler(arguments, payload) if handler else (0, b"", b"")
        if record.flags & AWAITED:
            self.peer.answer(record.seq, result, 0, reply, data)

    # -- the calls that do something here: (result, reply, reply payload) -------------
    def _memset(self, a: Any, _: bytes) -> tuple[int, bytes, bytes]:
        row = a.value.to_bytes(4, "little")[:a.element] * a.width
        for line in range(a.height):
            self.memory.write(a.destination + line * a.pitch, row)
        return 0, b"", b""

    def _memcpy_h2d(self, a: Any, payload: bytes) -> tuple[int, bytes, bytes]:
        self.memory.write(a.destination, payload)
        return 0, b"", b""

    def _memcpy_d2h(self, a: Any, _: bytes) -> tuple[int, bytes, bytes]:
        return 0, b"", self.memory.read(a.source, a.size)

    def _memcpy_d2d(self, a: Any, _: bytes) -> tuple[int, bytes, bytes]:
        self.memory.write(a.destination, self.memory.read(a.source, a.size))
        return 0, b"", b""

    def _event_elapsed(self, a: Any, _: bytes) -> tuple[int, bytes, bytes]:
        return 0, decoders.encode_reply("event_elapsed", milliseconds=1.5), b""

    def _module_load(self, a: Any, payload: bytes) -> tuple[int, bytes, bytes]:
        if self.owner.loads:
            result, table, log = self.owner.loads.pop(0)(payload)
            return result, decoders.encode_reply("module_load", table=table, log=log), b""
        text = payload.decode("utf-8", "replace") if b".version" in payload else ""
        if "bogus" in text:
            log = b"ptxas application ptx input, line 4; fatal   : Parsing error near 'bogus': syntax error"
            return 218, decoders.encode_reply("module_load", table=b"", log=log), b""
        found = table_of_cubin(payload) if payload[:4] == b"\x7fELF" else table_of(text, self.next_global)
        self.next_global += MIB
        return 0, decoders.encode_reply("module_load", table=module_table.encode(found), log=b"loaded"), b""

    def _link(self, a: Any, payload: bytes) -> tuple[int, bytes, bytes]:
        """The PTX inputs behind one another: a device may return PTX."""
        image, at = b"", 0
        while at < len(payload):
            kind, size = struct.unpack_from("<II", payload, at)
            at += 8 + size
            (size,) = struct.unpack_from("<Q", payload, at)
            image += payload[at + 8:at + 8 + size].rstrip(b"\0") if kind == 1 else b""
            at += 8 + size
        return 0, decoders.encode_reply("link", image=image, log=b"linked"), b""

    def close(self) -> None:
        self.peer.close()
        self.page.close()
        if self.eventfd is not None:
            os.close(self.eventfd)


START = r"""
import ctypes as c, os, struct, sys, threading
d = c.CDLL("libcuda.so.1")

def ok(name, *arguments):
    result = getattr(d, name)(*arguments)
    assert result == 0, (name, result)

def new(name, *arguments, kind=c.c_void_p):
    out = kind(); ok(name, c.byref(out), *arguments); return out

ok("cuInit", 0)
PTX = b'''.version 6.4
.target sm_75
.address_size 64
.global .align 4 .b8 counter[12];
.visible .entry one(.param .u64 a, .param .u32 n) { ret; }
.visible .entry two() { ret; }
\0'''
"""
