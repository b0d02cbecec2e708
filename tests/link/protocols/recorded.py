"""Bytes of the links' messages as the product writes them: the golden file is this, of before the tables were made.

    python -m tests.link.protocols.recorded      writes golden.json anew: only for a change of bytes that is meant

Every message is brought about by the code that sends it in a session, with values that do not change from run to run;
what does (clocks, names of sockets) is put in by :func:`settled`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import zmq

from rgpu.checkpoint.device import PAGE, Region
from rgpu.client.data_link import agent_lanes as link_lanes
from rgpu.client.data_link.connection import DataLink, attach
from rgpu.client.data_link.host_link import Area
from rgpu.client.run.pool_desk import Grant
from rgpu.client.session.attachment import Owner
from rgpu.client.session.delivery import Deliveries
from rgpu.client.shim_link import local
from rgpu.client.shim_link.answer_ring import AgentPage, AnswerRing
from rgpu.client.shim_link.returns import Returns
from rgpu.link.control.control_server import Message, encode
from rgpu.link.data import agreement, frames
from rgpu.link.data import opening as opening_of_nodes
from rgpu.link.data.frames import Handover, SealedConnection, client_preamble
from rgpu.link.data.opening import server_preamble
from rgpu.link.data.published import Issued, Ping, pong
from rgpu.link.data.sealing import Sealer
from rgpu.link.data.tickets import issue
from rgpu.link.keys import KeyPair, PoolFiles
from rgpu.link.local import shared
from rgpu.link.messages import data as to_data
from rgpu.link.messages import memory as to_memory
from rgpu.link.messages import pages as to_pages
from rgpu.link.messages.shim import AGENT_PAGE_SIZE
from rgpu.migrate.transfer import peer_plan as plan
from rgpu.migrate.transfer import replay_link as replay
from rgpu.migrate.transfer.receiver import PageReceiver
from rgpu.server.device.cpu import CpuDevice
from rgpu.server.worker.agent import agent_link, answer_sender
from rgpu.server.worker.agent import link_lanes as worker_lanes
from rgpu.server.worker.agent.module_stream import ModuleStream
from rgpu.server.worker.apply.journal_tap import JournalTap
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.server.worker.move.catching_up import CatchUp
from rgpu.session.calls.wire import BY_NAME
from rgpu.session.errors import LinkError, NotFound, RgpuError
from rgpu.session.facts import DeviceInfo, SessionFacts
from rgpu.session.journal.record import AWAITED
from rgpu.session.observed import Observation, Process
from tests.client.shim.conftest import Program
from tests.support.agent.fake_shim import FakeReader
from tests.support.building import libraries
from tests.support.control_node import Node
from tests.support.shim.area import Area as OfferedArea
from tests.support.shim.fake_agent import FakeAgent
from tests.support.worker.links import linked
from tests.support.worker.pages_device import PlainDevice
from tests.support.worker.pages_link import Link, state
from tests.support.worker.pages_peer import SharingDevice

GOLDEN = Path(__file__).parent / "golden.json"
OF_SHARES = agreement.X25519PrivateKey.from_private_bytes(bytes(range(32)))
READ = BY_NAME["memcpy_d2h"].id
BASE = 0x100000000000
SHOWN = 256  #: bytes of a long body that are kept; of the rest there is a digest
#: Keys of maps whose values differ from run to run.
CHANGING = {"boot", "near", "far", "path", "token", "versions", "worker", "ms", "phases_ms", "import_ms", "pull_ms",
            "hash_ms", "key"}
FACTS = SessionFacts("s", 3, 13000, 1 << 30, 1 << 20, True, (
    DeviceInfo("Fake", bytes(range(16)), 1 << 33, (0, 27, 0), attributes={75: 9, 16: 132}),))


def shown(body: bytes) -> str:
    """Hexadecimal; a long body is its beginning, its length and a digest."""
    return body.hex() if len(body) <= SHOWN \
        else f"{body[:SHOWN].hex()}… {len(body)} {hashlib.sha256(body).hexdigest()}"


def settled(body: bytes) -> bytes:
    """A map of msgpack with its keys in their order and its changing values as those of one type."""
    def settle(value: Any, key: str = "") -> Any:
        if key in CHANGING:
            return type(value)()
        if isinstance(value, dict):
            return {name: settle(held, name) for name, held in value.items()}
        return value
    return msgspec.msgpack.encode(settle(msgspec.msgpack.decode(body)))


class Book:
    """What was seen on one link: the bodies of each type, each once, sorted."""

    def __init__(self) -> None:
        self._seen: dict[int, set[str]] = {}
        self._lock = threading.Lock()

    def note(self, kind: int, body: bytes, changing: bool = False) -> None:
        with self._lock:
            self._seen.setdefault(kind, set()).add(shown(settled(body) if changing else body))

    def told(self) -> dict[str, list[str]]:
        return {str(kind): sorted(bodies) for kind, bodies in sorted(self._seen.items())}


def _split(stream: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(stream):
        length, kind = struct.unpack_from("<II", stream, at)
        yield kind, stream[at + 8:at + 8 + length]
        at += 8 + length


def _memfd(size: int) -> int:
    fd = os.memfd_create("recorded", os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, shared.SEALS)
    return fd


# -- shim and agent ---------------------------------------------------------------------------
def to_shim() -> tuple[dict[str, list[str]], str]:
    """What the agent says on the socket, and what stands in its page and ring."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    peer = local.LocalPeer(ours)
    with open(os.devnull) as null:
        peer.send_welcome(FACTS.encode(), null.fileno())
    plain = Returns("s", peer, None, Deliveries())
    plain.watermark(memoryview(struct.pack("<QIIQQ", 9, 700, 1, 16, 8)))
    plain.printed(memoryview(struct.pack("<Q", 0) + b"printed"))
    peer.answer(5, -1, 1, b"reply", b"payload")
    peer.release(7)
    peer.state(1, "the journal is full")
    peer.refuse(100, "no place")
    peer.observed(Observation(FACTS, True, "580.65.06", (5,), (Process(1, 0, 5),)).encode())

    page, reader = AgentPage(1 << 16), FakeReader()
    deliveries = Deliveries()
    ring = AnswerRing(page, *reader.fds)
    returns = Returns("s", peer, ring, deliveries, area=True)

    class Told:
        ready = True

        def send(self, kind: int, body: bytes) -> None:
            assert kind == to_data.AREA_READY and body == struct.pack("<I", 4)

    fd = _memfd(1 << 16)
    returns.areas.attached(Area(4, 1 << 16, fd))
    returns.areas.step(Told())  # type: ignore[arg-type]
    returns.areas.mapped(4)
    returns.areas.step(Told())  # type: ignore[arg-type]

    def into(body: bytes) -> memoryview:
        room = ring.room(len(body) + 1)
        assert room is not None
        room[1:] = body
        return room[1:]

    head = struct.pack("<QiII", 1, 0, 0, 3) + b"abc"
    deliveries.sent(1, READ, AWAITED)
    deliveries.sent(2, READ, AWAITED)
    returns.answer(into(b"\x01" + head))
    returns.answer(into(b"\x00payload"))
    returns.answer_at(into(struct.pack("<BIQQ", 0, 4, 64, 128) + struct.pack("<QiII", 2, 0, 0, 0)))
    returns.watermark(memoryview(struct.pack("<QIIQQ", 3, 0, 1, 17, 2)))
    returns.printed(into(struct.pack("<Q", 0) + b"text"))
    page.set_sleeping(True)
    memory = bytes(page.view[:AGENT_PAGE_SIZE + ring.written])
    theirs.settimeout(5)
    stream = b""
    while peer.wants_write:
        peer.flush()
    ours.shutdown(socket.SHUT_WR)
    while data := theirs.recv(1 << 16):
        stream += data
    theirs.close()
    book = Book()
    for kind, body in _split(stream):
        book.note(kind, body)
    returns.close()
    peer.close()
    page.close()
    return book.told(), memory.rstrip(b"\0").hex()


class _Listening(FakeAgent):
    """An agent that keeps what a shim says."""

    heard: list[tuple[int, bytes]] = []

    @staticmethod
    def _message(sock: socket.socket) -> tuple[int, bytes, list[int]]:
        kind, body, fds = FakeAgent._message(sock)
        _Listening.heard.append((kind, body))
        return kind, body, fds


def from_shim() -> dict[str, Any]:
    """What the library says: pid, parent, start and name of the program are taken out of HELLO."""
    folder, book = libraries(), Book()
    _Listening.heard = []
    with tempfile.TemporaryDirectory() as where:
        with _Listening(Path(where)) as agent:
            program = Program(folder / "libcuda.so.1", agent, """
                context()
                alloc(1 << 20)
                cu.cuCheckpointProcessLock(0, None)
                tell(0)
                hear()
            """)
            program.hear()
            OfferedArea(agent, 1, 1 << 20).wait_mapped(agent)
            program.end()
            program.close()
        for kind, body in _Listening.heard:
            if kind == 1:
                body = body[:4] + bytes(8) + body[12:16] + bytes(8)
            if kind:
                book.note(kind, body)
        return {**book.told(), "observe": _observe(folder, Path(where))}


def _observe(folder: Path, where: Path) -> str:
    """The whole of the question that the monitoring library asks."""
    listener = socket.socket(socket.AF_UNIX)
    path = str(where / "observe.sock")
    listener.bind(path)
    listener.listen(1)
    listener.settimeout(20)
    code = f"import ctypes; ctypes.CDLL({str(folder / 'libnvidia-ml.so.1')!r}).nvmlInit_v2()"
    asking = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "RGPU_AGENT": path})
    sock, _ = listener.accept()
    question = sock.recv(64)
    sock.close()
    listener.close()
    asking.wait(20)
    return question.hex()


# -- the data link ----------------------------------------------------------------------------
def _pair(session: str = "s", epoch: int = 1, purpose: str = "calls") -> tuple[SealedConnection, SealedConnection]:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    keys = bytes(32), bytes(range(32))
    return (Handover(keys[0], keys[1], to_data.TO_NODE, session, epoch, purpose).connection(near),
            Handover(keys[1], keys[0], to_data.FROM_NODE, session, epoch, purpose).connection(far))


def to_worker() -> dict[str, list[str]]:
    """What an agent says to its worker."""
    book = Book()
    near, far = _pair()
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
    found, other = _pair()
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


# -- pages ------------------------------------------------------------------------------------
@contextmanager
def _tapped(book: Book) -> Iterator[None]:
    """Every message on a sealed connection is noted."""
    send, whole = SealedConnection.send, SealedConnection.send_whole

    def note(kind: int, body: bytes) -> None:
        book.note(kind, body, kind not in (34, 36, 39, 40, 44, 46, 49, 50, 60))

    def one(self: SealedConnection, kind: int, *parts: Any) -> None:
        note(kind, b"".join(bytes(part) for part in parts))
        send(self, kind, *parts)

    def several(self: SealedConnection, *messages: Any) -> None:
        for message in messages:
            note(message[0], bytes(message[1:]))
        whole(self, *messages)

    with mock.patch.object(SealedConnection, "send", one), mock.patch.object(SealedConnection, "send_whole", several):
        yield


def _device(kind: type[PlainDevice]) -> Any:
    device = kind()
    random = np.random.default_rng(7)
    device.add(Region(BASE, 4 * PAGE, "mapped"), random.integers(0, 256, 4 * PAGE, np.uint8))
    device.add(Region(BASE + (1 << 40), 100, "global", 3), random.integers(0, 256, 100, np.uint8))
    return device


class _PeerLink(Link):
    def __init__(self, *devices: Any, folder: Path) -> None:
        self.folder = folder
        super().__init__(*devices)

    def receiver_of(self, connection: Any, device: Any) -> PageReceiver:
        receiver = PageReceiver(connection, device, self.folder)
        receiver.make = lambda data: None
        return receiver


def pages() -> dict[str, list[str]]:
    """A move's page stream: over two connections, then with pages pulled, then what fails."""
    book = Book()
    with _tapped(book), tempfile.TemporaryDirectory() as folder:
        link = Link(_device(PlainDevice), PlainDevice(), lanes=2)
        link.sender.begin("s", "m")
        link.sender.round()
        link.finish()
        link.close()
        peer = _PeerLink(_device(SharingDevice), SharingDevice(), folder=Path(folder))
        peer.sender.begin("s", "m")
        peer.sender.round()
        peer.sender.send_objects(b"objects")
        peer.finish()
        peer.close()
        peer.receiver.peer.close()
        broken = Link(_device(PlainDevice), PlainDevice())
        try:
            broken.sender.connection.send(99, msgspec.msgpack.encode({}))
            broken.sender._expect(0)
        except (RgpuError, LinkError):
            pass
        broken.close()
    return book.told()


def replayed() -> dict[str, list[str]]:
    """Bodies of the second half of a move by replay; :mod:`rgpu.migrate.transfer.replay_link` makes all of them."""
    book = Book()
    near, far = _pair(purpose="pages")
    tap = JournalTap()
    tap.stream_begins()
    tap.add(b"records")
    with _tapped(book):
        CatchUp(near, tap, lambda *args, **more: None)._ask(tap.take(1.0))
    near.close()
    far.close()
    book.note(to_pages.REPLAY, msgspec.msgpack.encode({"position": 900}))  # as departure.py and arrival.py do
    book.note(to_pages.WANT, msgspec.msgpack.encode(sorted({BASE: [1, 3]}.items())))
    book.note(to_pages.PING, replay.ping(3))
    book.note(to_pages.PONG, replay.pong(3, 900))
    book.note(to_pages.PROBED, replay.probed(4, 512, 2))
    entries = np.zeros(2, to_pages.PROBE_ENTRY_LAYOUT)
    entries["address"], entries["size"], entries["hash"] = [BASE, BASE + PAGE], [PAGE, 100], [[1, 2], [3, 4]]
    book.note(to_pages.PROBE, replay.probe(4, 900, entries))
    for last, data in replay.pieces(state()):
        book.note(to_pages.LAST, last + bytes(data[:0]))
    runs = np.array([(BASE, PAGE), (BASE + 4 * PAGE, 2 * PAGE)], to_pages.RUN_LAYOUT)
    book.note(to_pages.PULL, plan.pull(runs, True))
    for piece in plan.hashes(np.array([[1, 2], [3, 4]], np.uint64)):
        book.note(to_pages.HASHES, piece)
    rows = {(BASE, 4 * PAGE): (np.array([1, 3]), np.array([[1, 2], [3, 4]], np.uint64))}
    book.note(to_pages.GRANTED, plan.encode(to_pages.Granted("no", 1.5)))
    book.note(to_pages.PULLED, plan.encode(to_pages.Pulled("no", 1.5, 2.5)))
    book.note(to_pages.GRANT, plan.encode(to_pages.Grant([(BASE, PAGE, 1)])))
    book.note(35, msgspec.msgpack.encode({"round": 2, "known": plan.known(rows)}))
    return book.told()


# -- memory on one host -----------------------------------------------------------------------
def memory() -> list[str]:
    """The packets of the socket by which memory is handed over, as they stand on it."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel, found = shared.Channel(near), []
    fd = _memfd(PAGE)
    for kind, number, size, data, given in (
            (to_memory.PROVE, 0, 0, bytes(32), -1), (to_memory.PROVEN, 4, PAGE, bytes(32), fd),
            (to_memory.MEMORY, 7, PAGE, b"", fd), (to_memory.DROP, 7, 0, b"", -1), (to_memory.MAPPED, 7, 0, b"", -1),
            (to_memory.REFUSED, 7, 0, b"why", -1)):
        channel.send(kind, number, size, data, given)
        data, fds, _, _ = socket.recv_fds(far, 1024, 4)
        for other in fds:
            os.close(other)
        found.append(data.hex())
    os.close(fd)
    channel.close()
    far.close()
    return found


# -- control ----------------------------------------------------------------------------------
def control() -> dict[str, list[str]]:
    """A request with all fields, and what a node answers, frame by frame."""
    request = Message("1", "pool.ping", {"a": 1}, 5, 6, "c")
    told = {"request": [encode(request).hex()], "bare": [encode(Message("1", "pool.ping")).hex()]}
    with ExitStack() as stack:
        pool = PoolFiles(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "pool")
        pool.create()
        node = Node(pool)
        stack.callback(node.stop)
        keys = KeyPair.load(pool.key_path("user"))
        context = zmq.Context()
        sock = context.socket(zmq.DEALER)
        sock.setsockopt(zmq.CURVE_SERVERKEY, node.endpoint.public.encode())
        sock.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
        sock.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        sock.setsockopt(zmq.RCVTIMEO, 20000)
        sock.connect(node.endpoint.address)
        for verb, count in (("pool.ping", 1), ("session.kill", 1), ("session.migrate", 5)):
            sock.send(encode(Message("7", verb, {}, 2, 3, "")))
            told[verb] = [sock.recv().hex() for _ in range(count)]
        sock.close(0)
        context.destroy(linger=0)
    return told


def record() -> dict[str, Any]:
    """All of it, as golden.json has it below ``bodies``."""
    to, ring = to_shim()
    return {"to_shim": to, "ring": ring, "from_shim": from_shim(), "to_worker": to_worker(), "to_agent": to_agent(),
            "opening": opening(), "pages": pages(), "replayed": replayed(), "memory": memory(), "control": control()}


def main() -> None:
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    golden["bodies"] = record()
    GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
