"""An agent and a worker in one thread of the test, over the real socket and the real shared memory.

Everything the shim publishes is put together as it would go on the data link
and read with the worker's own reader, so a wrong sum, length or order fails
the test. Memory is modelled far enough that copies return what was written.
Nothing is complete while ``hold`` is set, nothing of the streams in ``held``.
"""

from __future__ import annotations

import array
import fcntl
import hashlib
import mmap
import os
import select
import socket
import struct
import threading
from pathlib import Path
from typing import Any

from rgpu.session import facts
from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_ID, Answer
from rgpu.session.journal.record import AWAITED, EXTERNAL, HEADER, Record, RecordReader, padded
from rgpu.session.objects import graphs, handle_tokens, module_table
from tests.support.shim.fake_ring import FakeRing

HELLO, SEGMENT, GOODBYE, WELCOME, ANSWER, WATERMARK, RELEASE, REFUSED, TEXT = 1, 2, 3, 32, 33, 34, 35, 36, 39
AREA_MAPPED, LIST, CHOOSE, LISTED = 7, 9, 10, 43
LOG, BULK = 0, 1
MIB = 1 << 20

#: CUdevice_attribute → value: what the shim's own checks look at
ATTRIBUTES = {1: 1024, 2: 1024, 3: 1024, 4: 64, 5: 2147483647, 6: 65535, 7: 65535, 8: 49152, 10: 32, 12: 65536, 16: 4,
              19: 1, 39: 1024, 41: 1, 75: 7, 76: 5, 78: 1, 81: 65536, 82: 65536, 95: 1, 97: 65536, 106: 16, 115: 1,
              120: 1}
#: one kernel: (pointer, int, float), 40 registers, 16 bytes of static shared memory
KERNEL = module_table.FunctionInfo("kernel", ((0, 8), (8, 4), (12, 4)),
                                   (1024, 16, 0, 0, 40, 75, 75, 0, 49136, -1, 0, 0, 0, 0, 0, 0))
TABLE = module_table.ModuleTable((KERNEL,), (module_table.GlobalVariable("variable", 0x2700_0000_0000, 64),))


class Segment:
    def __init__(self, fd: int, index: int, kind: int, size: int) -> None:
        self.index, self.kind, self.at = index, kind, 64
        self.map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
        os.close(fd)
        assert struct.unpack_from("<8sIIQ", self.map) == (b"RGPUSEG1", index, kind, size)

    def word(self, offset: int) -> int:
        return struct.unpack_from("<Q", self.map, offset)[0]


class FakeAgent:
    """Listens in ``directory``; serves one program. Use as a context manager."""

    def __init__(self, directory: Path, quota: int = 256 * MIB, journal_limit: int = 1 << 30, devices: int = 1,
                 ring: int = 256 * 1024, attributes: dict[int, int] | None = None) -> None:
        """``ring``: bytes of the answer ring; 0: answers go over the socket. ``attributes``: further ones."""
        self.path = str(directory / "agent.sock")
        device = [facts.DeviceInfo(f"Fake {i}", bytes([i]) * 16, 1 << 33, (0, i, 0), 0x2000_0000_0000 + (i << 43),
                                   attributes=ATTRIBUTES | (attributes or {})) for i in range(devices)]
        self.facts = facts.SessionFacts("test", 1, 13000, quota, journal_limit, True, tuple(device))
        self.records: list[Record] = []
        self.errors: list[str] = []
        self.inline = self.external = 0
        self.hold = False  #: nothing completes: waits are not answered, no watermark
        self.held: set[int] = set()  #: streams that do nothing
        self.quiet = False  #: no watermark comes, only answers
        self.kept: set[str] = set()  #: calls that are not answered yet, by name
        self.stall = False  #: nothing is read
        self.silent = False  #: nothing is answered; the test does it
        self.error = 0  #: the sticky error that the watermark carries
        self.ring_size = ring
        self.ring: FakeRing | None = None
        self.listed: facts.SessionFacts | None = None  #: of a gang's run: the program asks for it first
        self.chosen: int | None = None  #: the device of it that the program made its first context on
        self.refusal = 0  #: REFUSED instead of WELCOME, with this code
        self.recycle = True  #: closed segments are released
        self.areas: list[int] = []  #: that the shim has mapped
        self.goodbye = threading.Event()
        self.ended = threading.Event()
        self.hello: tuple[Any, ...] = ()
        self.host_functions: list[int] = []
        self.texts: list[list[tuple[int, bytes]]] = []  #: printed (position, text) ahead of each next awaited answer
        self.sockets: list[socket.socket] = []
        self._held: list[Record] = []
        self._undone: list[tuple[int, int]] = []  #: (seq, stream) of calls on held streams
        self._given: dict[int, int] = {}  #: the last call of each other stream
        self._marked = 0
        self._handled = 0  #: records of walks that are over: answered or held, and marked
        self._passed: list[int] = []
        self._graphs: dict[int, list[graphs.Node]] = {}
        self._dead_graphs: dict[int, list[graphs.Node]] = {}
        self._segments: dict[int, Segment] = {}
        self._log: Segment | None = None
        self._memory: dict[int, bytearray] = {}
        self._reader = RecordReader()
        self._changed = threading.Condition()
        self._stop = os.eventfd(0)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(4)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> FakeAgent:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        os.eventfd_write(self._stop, 1)
        self._thread.join(10)
        for sock in self.sockets:
            sock.close()
        self._listener.close()
        assert not self.errors, self.errors

    # -- what tests look at ---------------------------------------------------
    def names(self) -> list[str]:
        return [BY_ID[record.call_id].name for record in self.records]

    def awaited(self) -> list[str]:
        return [BY_ID[record.call_id].name for record in self.records if record.flags & AWAITED]

    def args(self, name: str) -> list[Any]:
        return [decoders.decode(r.call_id, r.args) for r in self.records if BY_ID[r.call_id].name == name]

    def graph_nodes(self, number: int) -> list[graphs.Node]:
        """Of an executable graph, destroyed or not, as the last update left them."""
        return self._graphs.get(number) or self._dead_graphs[number]

    def wait_for(self, name: str, count: int = 1, timeout: float = 20) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.names()[:self._handled].count(name) >= count, timeout), \
                self.names()[-20:]

    def let_go(self) -> None:
        """End ``hold`` and ``kept``: everything completes."""
        self.hold = False
        self.kept = set()
        os.eventfd_write(self._wake, 1)

    def seqs(self, name: str) -> list[int]:
        return [record.seq for record in self.records if BY_ID[record.call_id].name == name]

    def observed_before(self, seq: int) -> list[int]:
        """What stood in the journal as observed when call ``seq`` was published."""
        told = zip(self.seqs("completed"), self.args("completed"), strict=True)
        return [args.observed for at, args in told if at < seq]

    def close_connection(self) -> None:
        self.sockets[0].shutdown(socket.SHUT_RDWR)

    # -- the thread -----------------------------------------------------------
    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - shown by __exit__
            self.errors.append(repr(error))
            for sock in self.sockets:
                sock.close()
        finally:
            self.ended.set()

    def _serve(self) -> None:
        first = select.poll()  # not select(): a process of many tests has descriptors above 1023
        for either in (self._listener, self._stop):
            first.register(either, select.POLLIN)
        if self.listed is not None:
            if self._stop in {fd for fd, _ in first.poll()}:
                return
            asking, _ = self._listener.accept()
            with asking:
                assert self._message(asking)[:2] == (LIST, struct.pack("<I", 1))
                self._send(asking, LISTED, self.listed.encode())
        if self._stop in {fd for fd, _ in first.poll()}:
            return
        sock, _ = self._listener.accept()
        self.sockets.append(sock)
        kind, body, fds = self._message(sock)
        if self.listed is not None:
            assert kind == CHOOSE and len(body) == 4
            self.chosen = int.from_bytes(body, "little")
            kind, body, fds = self._message(sock)
        assert kind == HELLO and len(fds) == 3
        self.hello = struct.unpack_from("<IIIIQ", body)
        self._wake = fds[0]
        page = os.memfd_create("agent", os.MFD_ALLOW_SEALING)
        os.ftruncate(page, 4096 + self.ring_size)
        fcntl.fcntl(page, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        memory = mmap.mmap(page, 4096 + self.ring_size)
        memory[:8] = b"RGPUAGT1"
        memory[64:68] = struct.pack("<I", 1)  # always asleep: every publication must wake us
        if self.refusal:
            self._send(sock, REFUSED, struct.pack("<iH", self.refusal, 2) + b"no")
            return
        if self.ring_size:
            self.ring = FakeRing(memory, self.ring_size, *fds[1:])
        else:
            for fd in fds[1:]:
                os.close(fd)
        self._send(sock, WELCOME, self.facts.encode(), page)
        poll = select.poll()
        for fd in (sock, self._wake, self._stop):
            poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(5000)}
            if self._stop in ready:
                return
            if sock.fileno() in ready:
                kind, body, fds = self._message(sock)
                if kind == 0:
                    return
                if kind == SEGMENT:
                    index, segment_kind, size = struct.unpack("<IIQ", body)
                    self._segments[index] = Segment(fds[0], index, segment_kind, size)
                    if self._log is None and segment_kind == LOG:
                        self._log = self._segments[index]
                elif kind == GOODBYE:
                    self.goodbye.set()
                elif kind == AREA_MAPPED:
                    self.areas.append(int.from_bytes(body, "little"))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if not self.stall:
                self._walk(sock)

    @staticmethod
    def _message(sock: socket.socket) -> tuple[int, bytes, list[int]]:
        fds = array.array("i")
        try:
            head, ancillary, _, _ = sock.recvmsg(8, socket.CMSG_SPACE(16))
            for _, _, data in ancillary:
                fds.frombytes(data)
            if not head:
                return 0, b"", []
            head += sock.recv(8 - len(head), socket.MSG_WAITALL) if len(head) < 8 else b""
            length, kind = struct.unpack("<II", head)
            return kind, sock.recv(length, socket.MSG_WAITALL) if length else b"", list(fds)
        except OSError:
            return 0, b"", []

    def _send(self, sock: socket.socket, kind: int, body: bytes, fd: int | None = None) -> None:
        if self.ring is not None and kind in (ANSWER, WATERMARK, TEXT):
            self.ring.send(kind, body)
            return
        data = struct.pack("<II", len(body), kind) + body
        try:
            if fd is not None:
                sent = sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
                data = data[sent:]
            sock.sendall(data)
        except OSError:
            pass

    def _walk(self, sock: socket.socket) -> None:
        new = False
        # Read before the records: what is closed now is not referred to by any record published later.
        closed = [i for i, s in self._segments.items() if s.kind == BULK and s.word(32) == 1]
        while self._log is not None:
            log = self._log
            following = log.word(32)
            committed = log.word(24)
            while log.at < committed and (record := self._record(log)) is not None:
                self._apply(sock, record)
                new = True
            if log.at < committed or not following or following - 1 not in self._segments:
                if log.at < committed or following:
                    closed = []  # records are there that have not been read: any of it may be theirs
                break
            assert log.word(24) == committed
            self._log = self._segments[following - 1]
            assert self._log.word(40) == len(self.records) + 1
            self._passed.append(log.index)
        if self.recycle:
            for index in [*self._passed, *closed]:
                self._release(sock, index)
            self._passed.clear()
        if not self.hold and not self.silent:
            held, self._held = self._held, []
            for record in held:
                if BY_ID[record.call_id].name in self.kept:
                    self._held.append(record)
                else:
                    self._answer(sock, record)
            if self._marked < len(self.records):
                self._mark(sock, len(self.records))
        if new:
            with self._changed:
                self._handled = len(self.records)
                self._changed.notify_all()

    def _release(self, sock: socket.socket, index: int) -> None:
        self._segments.pop(index).map.close()
        self._send(sock, RELEASE, struct.pack("<I", index))

    def _record(self, log: Segment) -> Record | None:
        """The next record; None while the segment of its payload is not announced yet."""
        fields = list(HEADER.unpack_from(log.map, log.at))
        flags, args, payload = fields[2], fields[5], fields[6]
        start = log.at + HEADER.size
        head_end = start + padded(args)
        if flags & EXTERNAL:
            fields[2] = flags & ~EXTERNAL
            index, zero, offset = struct.unpack_from("<IIQ", log.map, head_end)
            if index not in self._segments:
                return None
            assert zero == 0 and offset % 64 == 0 and self._segments[index].kind == BULK
            data = self._segments[index].map[offset:offset + padded(payload)]
            self.external += 1
            log.at = head_end + 16
        else:
            assert payload <= 64 * 1024
            data = log.map[head_end:head_end + padded(payload)]
            self.inline += 1
            log.at = head_end + padded(payload)
        whole = HEADER.pack(*fields) + log.map[start:head_end] + data
        (record,) = self._reader.feed(whole)
        assert record.seq == len(self.records) + 1, "a gap"
        self.records.append(record)
        return record

    # -- the worker -----------------------------------------------------------
    def _bytes(self, address: int, size: int) -> tuple[bytearray, int]:
        for base, memory in self._memory.items():
            if base <= address and address + size <= base + len(memory):
                return memory, address - base
        raise AssertionError(f"0x{address:x} is not mapped")

    def _apply(self, sock: socket.socket, record: Record) -> None:
        call = BY_ID[record.call_id]
        args = decoders.decode(record.call_id, record.args)
        stream = getattr(args, "stream", None)
        if stream in self.held and call.name != "stream_destroy":
            self._undone.append((record.seq, stream))
            return
        if stream is not None:
            self._given[stream] = record.seq
        if call.name in ("memory_map", "memory_import", "host_allocate"):
            self._memory[args.address] = bytearray(args.size)
        elif call.name == "memory_unmap":
            assert len(self._memory.pop(args.address)) == args.size
        elif call.name == "memory_unimport":
            del self._memory[args.address]
        elif call.name == "memory_alias":
            self._memory[args.address] = self._memory[args.source]
        elif call.name == "memory_unalias":
            assert len(self._memory.pop(args.address)) >= args.size
        elif call.name == "memory_move":
            self._memory[args.to] = self._memory.pop(args.address)
        elif call.name in ("memcpy_h2d", "host_mirror_write", "host_word_write"):
            address = args.destination if call.name == "memcpy_h2d" else args.address
            memory, at = self._bytes(address, len(record.payload))
            memory[at:at + len(record.payload)] = record.payload
        elif call.name == "memcpy2d_h2d":
            for row in range(args.height):
                memory, at = self._bytes(args.destination + row * args.pitch, args.width)
                memory[at:at + args.width] = record.payload[row * args.width:(row + 1) * args.width]
        elif call.name == "memcpy_d2d":
            source, start = self._bytes(args.source, args.size)
            memory, at = self._bytes(args.destination, args.size)
            memory[at:at + args.size] = source[start:start + args.size]
        elif call.name == "memset":
            for row in range(args.height):
                size = args.width * args.element
                memory, at = self._bytes(args.destination + row * args.pitch, size)
                memory[at:at + size] = args.value.to_bytes(4, "little")[:args.element] * args.width
        elif call.name == "launch":
            self._launch(bytes(args.parameters))
        elif call.name.startswith("graph_"):
            self._graph(call.name, args, record.payload)
        elif call.name == "host_free":
            self._memory.pop(args.address)
        if call.name in self.kept or call.answer is Answer.WAIT and self.hold:
            self._held.append(record)
        elif call.answer is not Answer.ASYNC and not self.silent:
            self._answer(sock, record)

    def _graph(self, name: str, args: Any, payload: bytes) -> None:
        if name == "graph_instantiate":
            assert args.exec not in self._graphs
            self._graphs[args.exec] = graphs.decode(payload)
        elif name == "graph_exec_update":
            self._graphs[args.exec] = graphs.apply_changes(self._graphs[args.exec], graphs.decode_changes(payload))
        elif name == "graph_exec_destroy":
            self._dead_graphs[args.exec] = self._graphs.pop(args.exec)
        else:
            for node in self._graphs[args.exec]:
                self._run_node(node)

    def _run_node(self, node: graphs.Node) -> None:
        if node.disabled:
            return
        if isinstance(node, graphs.KernelNode):
            self._launch(node.parameters)
        elif isinstance(node, graphs.MemsetNode):
            for row in range(node.height):
                memory, at = self._bytes(node.destination + row * node.pitch, node.width * node.element)
                memory[at:at + node.width * node.element] = node.value.to_bytes(4, "little")[:node.element] * node.width
        elif isinstance(node, graphs.CopyNode):
            for destination, source in node.layers():
                for row in range(node.height):
                    memory, at = self._bytes(source + row * node.source_pitch, node.width)
                    data = bytes(memory[at:at + node.width])
                    memory, at = self._bytes(destination + row * node.destination_pitch, node.width)
                    memory[at:at + node.width] = data

    def _launch(self, parameters: bytes) -> None:
        """The kernel adds the int to each of the 16 bytes at the pointer."""
        pointer, value = struct.unpack_from("<Qi", parameters)
        memory, at = self._bytes(pointer, 16)
        memory[at:at + 16] = bytes((byte + value) % 256 for byte in memory[at:at + 16])

    def _answer(self, sock: socket.socket, record: Record) -> None:
        call = BY_ID[record.call_id]
        args = decoders.decode(record.call_id, record.args)
        reply, payload = b"", b""
        if call.name in ("memcpy_d2h", "host_mirror_read"):
            address = args.source if call.name == "memcpy_d2h" else args.address
            memory, at = self._bytes(address, args.size)
            payload = bytes(memory[at:at + args.size])
        elif call.name == "tensor_map":
            reply = decoders.encode_reply("tensor_map", map=hashlib.sha512(args.arguments).digest() * 2)
        elif call.name == "memcpy2d_d2h":
            for row in range(args.height):
                memory, at = self._bytes(args.source + row * args.pitch, args.width)
                payload += memory[at:at + args.width]
        elif call.name == "module_load":
            reply = decoders.encode_reply("module_load", table=module_table.encode(TABLE), log=b"")
        elif call.name == "function_load":
            attributes = struct.pack("<16i", *TABLE.functions[0].attributes)
            reply = decoders.encode_reply("function_load", attributes=attributes)
        elif call.name == "cluster_occupancy":
            reply = decoders.encode_reply("cluster_occupancy", value=100 + args.form + 10 * args.cluster_x)
        elif call.name == "texture_create":
            reply = decoders.encode_reply("texture_create", handle=args.texture << 20 | 7)
        elif call.name in ("memory_export", "event_export"):
            kind, number, size = (handle_tokens.TokenKind.MEMORY, args.address, args.size) \
                if call.name == "memory_export" else (handle_tokens.TokenKind.EVENT, args.event, 0)
            reply = decoders.encode_reply(call.name, token=handle_tokens.encode(handle_tokens.Token(
                kind, bytes(args.secret), bytes(8), number, size)))
        elif call.name == "imported_event_query":
            reply = decoders.encode_reply(call.name, complete=0)
        elif call.name == "event_elapsed":
            reply = decoders.encode_reply("event_elapsed", milliseconds=1.5)
        if call.answer is Answer.WAIT and self.texts:
            for position, text in self.texts.pop(0):
                self.print_text(position, text)
        if call.answer is Answer.WAIT and self._marked < record.seq - 1:  # first the watermark, as the worker does
            self._mark(sock, record.seq - 1)
        self._send(sock, ANSWER, struct.pack("<QiII", record.seq, 0, 0, len(reply)) + reply + payload)

    def _mark(self, sock: socket.socket, position: int) -> None:
        self._marked = position
        if self.quiet:
            return
        done = min((seq - 1 for seq, _ in self._undone), default=position)
        streams = b"".join(struct.pack("<QQ", *each) for each in self._given.items()) if self._undone else b""
        self._send(sock, WATERMARK, struct.pack("<QII", min(done, position), self.error, len(streams) // 16) + streams)

    def print_text(self, position: int, text: bytes) -> None:
        """Kernels printed ``text``, which begins at that byte of all they printed."""
        self._send(self.sockets[0], TEXT, struct.pack("<Q", position) + text)
