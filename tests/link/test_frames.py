"""Sealed frames and the preamble: what is forged, repeated, cut or moved ends the connection."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rgpu.link.data import frames, tickets
from rgpu.link.data.frames import Handover, SealedConnection, client_preamble
from rgpu.link.data.opening import server_preamble
from rgpu.link.data.sealing import FRAME_LIMIT, LONG, MESSAGE_LIMIT, Opener, Sealer, derive_key
from rgpu.link.messages.data import FROM_NODE, TO_NODE
from rgpu.session.errors import AuthenticationFailed, Corrupt, LinkError, NotFound, RgpuError, TimedOut, VersionMismatch

POOL = bytes(range(32))
KEY = bytes(32)


def pair() -> tuple[Sealer, Opener]:
    return Sealer(KEY, TO_NODE, 3, "s"), Opener(KEY, TO_NODE, 3, "s", size=512)


def put(opener: Opener, data: bytes) -> None:
    while data:
        room = opener.room()
        count = min(len(room), len(data))
        room[:count] = data[:count]
        opener.received(count)
        data = data[count:]


def take_all(opener: Opener) -> list[tuple[int, bytes]]:
    found = []
    while (message := opener.next()) is not None:
        found.append((message[0], bytes(message[1])))
    return found


def test_other_code_may_leave_more_than_the_buffer_holds() -> None:
    """Compiled code has received several long frames and opened one of them."""
    sealer, opener = pair()
    frames = [bytes(sealer.seal(7, (bytes([number]) * 900,))) for number in range(4)]
    put(opener, frames[0][:100])
    opener.continue_at(1, sum(map(len, frames)) - 110, b"".join(frames[1:])[:-10])
    assert [body[0] for _, body in take_all(opener)] == [1, 2]
    put(opener, frames[3][-10:])
    assert [body[0] for _, body in take_all(opener)] == [3] and opener.came == sum(map(len, frames))


@given(st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=3000)), max_size=12), st.data())
def test_frames_survive_any_cut(messages: list[tuple[int, bytes]], data: st.DataObject) -> None:
    sealer, opener = pair()
    stream = b"".join(bytes(sealer.seal(kind, (body[:1], body[1:]))) for kind, body in messages)
    got: list[tuple[int, bytes]] = []
    while stream:
        count = data.draw(st.integers(1, max(1, min(len(stream), 4000))))
        put_some, stream = stream[:count], stream[count:]
        while put_some:
            room = opener.room()
            part = put_some[:len(room)]
            room[:len(part)] = part
            opener.received(len(part))
            put_some = put_some[len(part):]
            got += take_all(opener)
    assert got == messages


@given(st.integers(0, 200), st.integers(0, 7), st.integers(1, 80))
def test_a_changed_bit_ends_it(at: int, bit: int, size: int) -> None:
    sealer, opener = pair()
    frame = bytearray(sealer.seal(7, (b"x" * size,)))
    frame[at % len(frame)] ^= 1 << bit
    put(opener, bytes(frame))
    try:
        assert opener.next() is None  # a longer length: it still waits, and what follows will not open
        put(opener, bytes(200))
        for _ in range(400):
            if opener.pending and opener.next() is None:
                put(opener, bytes(1 << 16))
        pytest.fail("a forged frame was waited for for ever")
    except LinkError:
        with pytest.raises(LinkError):
            opener.next()


def test_repeated_reordered_lost_and_foreign_frames() -> None:
    sealer, _ = pair()
    one, two = bytes(sealer.seal(1, (b"a",))), bytes(sealer.seal(1, (b"b",)))
    for stream in (one + one, two + one, two):
        _, opener = pair()
        put(opener, stream)
        with pytest.raises(LinkError):
            take_all(opener)
    for other in (Opener(KEY, FROM_NODE, 3, "s"), Opener(KEY, TO_NODE, 4, "s"), Opener(KEY, TO_NODE, 3, "t"),
                  Opener(bytes([1]) * 32, TO_NODE, 3, "s")):
        put(other, one)
        with pytest.raises(LinkError):
            other.next()


@pytest.mark.parametrize("length", [0, 16, FRAME_LIMIT + 1, 0xFFFFFFFF])
def test_impossible_lengths_allocate_nothing(length: int) -> None:
    _, opener = pair()
    put(opener, struct.pack("<I", length))
    with pytest.raises(LinkError):
        opener.next()
    assert len(opener.room()) < 1024


def test_the_largest_message_passes_and_a_larger_one_is_not_sent() -> None:
    sealer, opener = pair()
    body = bytes(MESSAGE_LIMIT - 1)
    put(opener, b"")
    frame = memoryview(bytes(sealer.seal(2, (body,))))
    while frame:
        room = opener.room()
        room[:len(frame[:len(room)])] = frame[:len(room)]
        opener.received(len(frame[:len(room)]))
        frame = frame[len(room):]
        message = opener.next()
    assert message is not None and message[1] == body
    with pytest.raises(LinkError):
        sealer.seal(2, (body, b"x"))


def test_keys_differ_by_everything() -> None:
    base = (b"s" * 32, b"c" * 32, b"n" * 32, 0, "s", 1)
    others = [(b"t" * 32, *base[1:]), (base[0], b"d" * 32, *base[2:]), (*base[:2], b"o" * 32, *base[3:]),
              (*base[:3], 1, "s", 1), (*base[:4], "t", 1), (*base[:5], 2)]
    keys = {derive_key(*values) for values in [base, *others]}  # type: ignore[arg-type]
    assert len(keys) == 7


# -- over sockets --------------------------------------------------------------------


class Node:
    """Answers one preamble on a thread; echoes what comes until the connection ends."""

    def __init__(self, sock: socket.socket, error: RgpuError | None = None, pool: bytes = POOL,
                 timeout: float = 20.0) -> None:
        self.sock, self.error, self.pool, self.timeout = sock, error, pool, timeout
        self.outcome: BaseException | None = None
        self.handover: Handover | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _lookup(self, ticket: tickets.Ticket) -> int:
        if self.error:
            raise self.error
        return 5

    def _run(self) -> None:
        try:
            self.handover = server_preamble(self.sock, [self.pool], self._lookup, timeout=self.timeout)
            connection = Handover.unpack(self.handover.pack()).connection(self.sock)
            while True:
                connection.send(*connection.recv())
        except BaseException as error:  # noqa: BLE001
            self.outcome = error
            self.sock.close()

    def ended(self) -> BaseException | None:
        self.thread.join(20)
        return self.outcome


@pytest.fixture(params=["tcp", "unix"])
def sockets(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    if request.param == "unix":
        yield socket.socketpair()
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = frames.connect(listener.getsockname()[:2])
        yield client, listener.accept()[0]


def opened(sockets: tuple[socket.socket, socket.socket]) -> tuple[SealedConnection, Node]:
    granted = tickets.issue(POOL, "s", "K", "calls")
    node = Node(sockets[1])
    return client_preamble(sockets[0], "calls", granted.ticket, granted.secret, "s", timeout=20), node


def test_messages_both_ways(sockets: tuple[socket.socket, socket.socket]) -> None:
    connection, node = opened(sockets)
    connection.send(4, b"hello")
    assert connection.recv(timeout=20)[1] == b"hello"
    assert connection.epoch == 5 and node.handover is not None
    assert node.handover.agent == "K" and node.handover.purpose == "calls"
    assert node.handover.send_key.hex() not in repr(node.handover)
    for size in (0, 1, 70_000, 3_000_000):
        connection.send(9, b"ab", bytes(size))
        kind, body = connection.recv()
        assert kind == 9 and body == b"ab" + bytes(size)
    with pytest.raises(TimedOut):
        connection.recv(timeout=0.05)
    connection.send(4, b"still there")
    assert connection.recv(timeout=20)[1] == b"still there"
    connection.close()
    assert isinstance(node.ended(), LinkError)
    with pytest.raises(LinkError):
        connection.send(1)


def test_a_frame_injected_into_the_socket_ends_the_connection(sockets: tuple[socket.socket, socket.socket]) -> None:
    connection, node = opened(sockets)
    sealed = bytes(connection.sealer.seal(4, (b"hello",)))
    connection.sock.sendall(sealed)
    assert connection.recv()[1] == b"hello"
    connection.sock.sendall(sealed)  # a replay
    outcome = node.ended()
    assert isinstance(outcome, LinkError) and outcome.detail["reason"] == "seal"
    with pytest.raises(LinkError):
        connection.recv()


def test_a_wrong_secret_opens_nothing(sockets: tuple[socket.socket, socket.socket]) -> None:
    granted = tickets.issue(POOL, "s", "K", "calls")
    node = Node(sockets[1])
    connection = client_preamble(sockets[0], "calls", granted.ticket, bytes(32), "s", timeout=20)
    connection.send(1, b"x")
    assert isinstance(node.ended(), LinkError)


@pytest.mark.parametrize(("error", "seen"), [(NotFound("no such session"), NotFound)])
def test_the_node_says_why_it_refuses(sockets: tuple[socket.socket, socket.socket], error: RgpuError,
                                      seen: type[RgpuError]) -> None:
    granted = tickets.issue(POOL, "s", "K", "calls")
    node = Node(sockets[1], error)
    with pytest.raises(seen, match="no such session"):
        client_preamble(sockets[0], "calls", granted.ticket, granted.secret, "s", timeout=20)
    assert node.ended() is error


def test_forged_expired_and_misused_tickets(sockets: tuple[socket.socket, socket.socket]) -> None:
    granted = tickets.issue(bytes(32), "s", "K", "calls")
    Node(sockets[1])
    with pytest.raises(AuthenticationFailed):
        client_preamble(sockets[0], "calls", granted.ticket, granted.secret, "s", timeout=20)
    for ticket, purpose in ((tickets.issue(POOL, "s", "K", "calls", lifetime=-1000), "calls"),
                            (tickets.issue(POOL, "s", "K", "calls"), "pages")):
        ours, theirs = socket.socketpair()
        Node(theirs)
        with pytest.raises(AuthenticationFailed):
            client_preamble(ours, purpose, ticket.ticket, ticket.secret, "s", timeout=20)


@pytest.mark.parametrize("sent", [b"", b"RGPL", b"RGPL" + struct.pack("<HHI", 1, 1, 50) + bytes(20)])
def test_a_peer_that_stalls_is_left(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    node = Node(theirs, timeout=1)
    started = time.monotonic()
    ours.sendall(sent)
    assert isinstance(node.ended(), TimedOut)
    assert time.monotonic() - started < 10


def test_a_peer_that_trickles_is_left() -> None:
    ours, theirs = socket.socketpair()
    node = Node(theirs, timeout=1)
    data = b"RGPL" + struct.pack("<HHI", 1, 1, 1000) + bytes(1000)
    with pytest.raises(OSError):
        for byte in data:
            ours.send(bytes([byte]))
            time.sleep(0.02)
    assert isinstance(node.ended(), TimedOut)


def test_versions_are_named() -> None:
    ours, theirs = socket.socketpair()
    node = Node(theirs)
    ours.sendall(b"RGPL" + struct.pack("<HHI", 9, 1, 4) + bytes(36))
    assert ours.recv(4) == b"RGPL"
    assert isinstance(node.ended(), VersionMismatch)


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_rubbish_at_the_data_port(data: bytes, magic: bool) -> None:
    ours, theirs = socket.socketpair()
    ours.sendall((b"RGPL" if magic else b"") + data)
    ours.shutdown(socket.SHUT_WR)
    with pytest.raises(RgpuError):
        server_preamble(theirs, [POOL], lambda ticket: 1, timeout=1)
    ours.close()
    theirs.close()


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=300), st.sampled_from([b"", b"RGPL", b"RGPL\x01\x00\x01\x00", b"RGPL\x01\x00\x00\x00"]))
def test_rubbish_from_a_node(data: bytes, head: bytes) -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(head + data)
    theirs.shutdown(socket.SHUT_WR)
    granted = tickets.issue(POOL, "s", "K", "calls")
    with pytest.raises(RgpuError):
        connection = client_preamble(ours, "calls", granted.ticket, granted.secret, "s", timeout=20)
        connection.recv(timeout=1)
    ours.close()
    theirs.close()


@given(st.binary(max_size=200))
def test_a_handover_is_checked(data: bytes) -> None:
    with pytest.raises(Corrupt):
        Handover.unpack(data)


def test_a_long_message_keeps_its_bytes_while_a_view_of_it_lives():
    """Memory is used again, but only when nobody holds a view of it."""
    from rgpu.link.data.sealing import Buffers

    buffers = Buffers()
    first = buffers.take(100_000)
    first[:] = b"a" * 100_000
    held = first.toreadonly()[1:10]
    del first
    second = buffers.take(100_000)
    second[:] = b"b" * 100_000
    assert bytes(held) == b"a" * 9
    kept = {id(second.obj)}
    del second
    assert {id(buffers.take(90_000).obj)} == kept  # the second one's memory: only the first is held
    assert len(buffers.take(1000)) == 1000


@pytest.mark.parametrize("size", [LONG - 100, LONG - 9, LONG, LONG + 1, 1 << 20, MESSAGE_LIMIT - 9])
def test_long_frames_are_the_same_bytes_as_short_ones(size: int) -> None:
    """Sealed from where the parts are, or gathered first: the frame is that of the message in one run."""
    data = random.Random(size).randbytes(size)
    one, other = Sealer(KEY, TO_NODE, 3, "s"), Sealer(KEY, TO_NODE, 3, "s")
    for _ in range(2):  # the counter goes on
        frame = one.seal(7, (b"12345678", memoryview(data)[:11], b"", memoryview(data)[11:]))
        whole = bytearray(len(frame))
        assert other.seal_run(b"\x0712345678" + data, memoryview(whole)) == len(frame) and whole == frame
