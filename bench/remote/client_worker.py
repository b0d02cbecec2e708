"""The other end of bench/remote/client.py: takes sealed calls, answers at once, computes nothing.

Awaited calls are answered with the bytes that they ask for, out of one buffer;
payloads are skipped. What it costs is what a worker cannot avoid: receiving,
opening and walking over the headers.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from rgpu.link.data.frames import SealedConnection
from rgpu.link.data.opening import server_preamble
from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_ID, BY_NAME, Answer
from rgpu.session.journal.record import HEADER, HEADER_SIZE, padded
from rgpu.session.objects import module_table

PIECE = 1 << 20
KERNEL = module_table.FunctionInfo("kernel", ((0, 8), (8, 4), (12, 4)),
                                   (1024, 16, 0, 0, 40, 75, 75, 0, 49136, -1, 0, 0, 0, 0, 0, 0))
TABLE = module_table.encode(module_table.ModuleTable((KERNEL,), ()))
ANSWERED = frozenset(call.id for call in BY_ID.values() if call.answer is not Answer.ASYNC)
LOAD, TO_HOST = BY_NAME["module_load"].id, BY_NAME["memcpy_d2h"].id


class Worker:
    """One connection. ``received``: CLOCK_MONOTONIC ns at which each awaited call was seen, and answered."""

    def __init__(self, connection: SealedConnection) -> None:
        self.connection = connection
        self.applied = 0
        self.skip = 0  #: bytes of a payload still to come
        self.rest = b""  #: of a record that was cut
        self.times: list[tuple[int, int, int]] = []
        self.data = bytes(PIECE)

    def serve(self) -> None:
        connection = self.connection
        connection.recv()
        connection.send(16, msgspec.msgpack.encode({"epoch": 1, "next": 1, "state": "running"}))
        while True:
            kind, body = connection.recv()
            if kind == 2:
                seen = time.monotonic_ns()
                for seq, call, args in self.walk(body[8:]):
                    connection.send(18, struct.pack("<QII", seq - 1, 0, 0))
                    self.answer(seq, call, args)
                    self.times.append((seq, seen, time.monotonic_ns()))
                connection.send(18, struct.pack("<QII", self.applied, 0, 0))
            elif kind == 4:
                connection.send(20, bytes(body))
            elif kind == 3:
                return

    def walk(self, body: memoryview) -> list[tuple[int, int, bytes]]:
        """Awaited calls in the next bytes of the stream."""
        if self.skip:
            count = min(self.skip, len(body))
            self.skip -= count
            body = body[count:]
        if self.rest:
            body, self.rest = memoryview(self.rest + bytes(body)), b""
        found, at, size = [], 0, len(body)
        while at + HEADER_SIZE <= size:
            _, call, _, seq, _, args, payload, _, _ = HEADER.unpack_from(body, at)
            start = at + HEADER_SIZE
            end = start + padded(args)
            if end > size:
                break
            self.applied = seq
            if call in ANSWERED:
                found.append((seq, call, bytes(body[start:start + args])))
            at = end + padded(payload)
        if at > size:
            self.skip = at - size
        else:
            self.rest = bytes(body[at:])
        return found

    def answer(self, seq: int, call: int, args: bytes) -> None:
        reply, size = b"", 0
        if call == LOAD:
            reply = decoders.encode_reply("module_load", table=TABLE, log=b"")
        elif call == TO_HOST:
            size = decoders.decode(call, args).size
        head = struct.pack("<QiII", seq, 0, 0, len(reply)) + reply
        first = True
        while first or size:
            count = min(size, PIECE)
            size -= count
            parts: list[Any] = [bytes([size > 0]), *([head] if first else []), memoryview(self.data)[:count]]
            self.connection.send(17, *parts)
            first = False


def serve_engine(connection: SealedConnection) -> None:
    """The worker's real link and engine, on whatever driver is found (bench/remote/client.py: the tests' fake one)."""
    from rgpu.server.device.cuda.device import CudaDevice
    from rgpu.server.worker.agent.agent_link import AgentLink
    from rgpu.server.worker.agent.same_host import HostMemory
    from rgpu.server.worker.apply.runtime import SessionRuntime

    device = CudaDevice(0)
    load = device.load
    device.load = lambda module, binary, *rest: load(module, b"kernel 16\n", *rest)  # type: ignore[method-assign]
    ended = threading.Event()
    runtime = SessionRuntime(connection.session, 1, device)
    AgentLink(connection, runtime, lambda event, values: ended.set() if event == "detached" else None,
              host=HostMemory(runtime.fast, lambda seq: seq in runtime.retained)).start()
    ended.wait()
    device.close()


def main(secret: Path, port: int, times: Path, engine: bool) -> None:
    listener = socket.create_server(("127.0.0.1", port))
    print(listener.getsockname()[1], flush=True)
    while True:
        sock, _ = listener.accept()
        worker = Worker(server_preamble(sock, [secret.read_bytes()], lambda ticket: 1).connection(sock))
        try:
            serve_engine(worker.connection) if engine else worker.serve()
        except Exception as error:  # noqa: BLE001 - the next program connects anew
            print(f"worker: {error}", file=sys.stderr)
        times.write_bytes(msgspec.msgpack.encode(worker.times))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), "engine" in sys.argv[4:])
