"""Keys of data connections: with both secrets and a recording nobody reads it; ends of preamble 2 are spoken to."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from rgpu.link.data import agreement, tickets
from rgpu.link.data.frames import SealedConnection, client_preamble
from rgpu.link.data.opening import server_preamble
from rgpu.link.data.sealing import Opener, Sealer, derive_key
from rgpu.link.messages.data import FROM_NODE, PREAMBLE, SALT, TO_NODE, VERSION
from rgpu.session.errors import AuthenticationFailed, LinkError, RgpuError

POOL, EPOCH, TOLD = bytes(range(32)), 5, b"the program's weights"
HEAD, ANSWER = 12, 8  #: bytes of ClientHead and NodeHead


class Between:
    """Somebody between the two ends, who has all that goes through, and may change it."""

    def __init__(self, change: Callable[[str, bytes], bytes] = lambda way, data: data) -> None:
        self.near, here = socket.socketpair()
        there, self.far = socket.socketpair()
        self.seen = {"to": bytearray(), "back": bytearray()}
        for way, source, sink in (("to", here, there), ("back", there, here)):
            threading.Thread(target=self._pass, args=(way, source, sink, change), daemon=True).start()

    def _pass(self, way: str, source: socket.socket, sink: socket.socket,
              change: Callable[[str, bytes], bytes]) -> None:
        try:
            while data := source.recv(65536):
                data = change(way, data) if not self.seen[way] else data
                self.seen[way] += data
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for end in (source, sink):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()


@contextmanager
def node(sock: socket.socket) -> Iterator[list[RgpuError]]:
    """This version's node: it gives back what it is told."""
    failed: list[RgpuError] = []

    def serve() -> None:
        try:
            with server_preamble(sock, [POOL], lambda ticket: EPOCH).connection(sock) as connection:
                while True:
                    kind, body = connection.recv(20)
                    connection.send(kind, bytes(body))
        except RgpuError as error:
            failed.append(error)
            sock.close()

    thread = threading.Thread(target=serve)
    thread.start()
    yield failed
    thread.join(30)
    assert not thread.is_alive()


def granted() -> tickets.Granted:
    return tickets.issue(POOL, "s", "K", "calls")


def talk(between: Between) -> None:
    """An agent of this version and a node of this version."""
    ticket = granted()
    with node(between.far), client_preamble(between.near, "calls", ticket.ticket, ticket.secret, "s") as connection:
        connection.send(4, TOLD)
        assert connection.recv(20)[1] == TOLD


def older_agent(sock: socket.socket, ticket: tickets.Granted) -> SealedConnection:
    """What an agent of preamble 2 does."""
    salt = bytes(range(32, 64))
    sock.sendall(struct.pack("<4sHHI", b"RGPL", 2, 1, len(ticket.ticket)) + ticket.ticket + salt)
    answer = sock.recv(ANSWER + SALT + 8, socket.MSG_WAITALL)
    assert struct.unpack_from("<4sHH", answer) == (b"RGPL", VERSION, 0)
    theirs = answer[ANSWER:ANSWER + SALT]
    keys = [derive_key(ticket.secret, salt, theirs, way, "s", EPOCH) for way in (TO_NODE, FROM_NODE)]
    return SealedConnection(sock, Sealer(keys[0], TO_NODE, EPOCH, "s"), Opener(keys[1], FROM_NODE, EPOCH, "s"),
                            session="s", epoch=EPOCH, purpose="calls")


def older_node(sock: socket.socket) -> None:
    """What a node of preamble 2 does, for one message."""
    magic, version, purpose, length = struct.unpack("<4sHHI", sock.recv(HEAD, socket.MSG_WAITALL))
    data = sock.recv(length + SALT, socket.MSG_WAITALL)
    ticket, salt = tickets.verify([POOL], data[:length], "calls"), bytes(range(64, 96))
    sock.sendall(struct.pack("<4sHH", b"RGPL", 2, 0) + salt + struct.pack("<Q", EPOCH))
    keys = [derive_key(ticket.secret, data[length:], salt, way, "s", EPOCH) for way in (TO_NODE, FROM_NODE)]
    with SealedConnection(sock, Sealer(keys[1], FROM_NODE, EPOCH, "s"), Opener(keys[0], TO_NODE, EPOCH, "s"),
                          session="s", epoch=EPOCH, purpose="calls") as connection:
        kind, body = connection.recv(20)
        connection.send(kind, bytes(body))


def read_recording(between: Between) -> list[bytes]:
    """What somebody reads of a recording who has the pool's secret, and so the ticket's."""
    to, back = bytes(between.seen["to"]), bytes(between.seen["back"])
    length = struct.unpack_from("<I", to, 8)[0]
    ticket = tickets.verify([POOL], to[HEAD:HEAD + length], "calls")
    client, server = to[HEAD + length:HEAD + length + SALT], back[ANSWER:ANSWER + SALT]
    epoch = struct.unpack_from("<Q", back, ANSWER + SALT)[0]
    found = []
    guesses = [derive_key(ticket.secret, client, server, way, ticket.session, epoch) for way in (TO_NODE, FROM_NODE)]
    mine = agreement.Share()  # a key of one's own is of no use either
    guesses += agreement.keys_of_node(mine, server, client, ticket.secret, ticket.session, epoch)
    guesses += agreement.keys_of_client(mine, server, PREAMBLE, ticket.secret, ticket.session, epoch)
    for key in guesses:
        for way, frames in ((TO_NODE, to[HEAD + length + SALT:]), (FROM_NODE, back[ANSWER + SALT + 8:])):
            opener = Opener(key, way, epoch, ticket.session)
            opener.room()[:len(frames)] = frames
            opener.received(len(frames))
            try:
                if (message := opener.next()) is not None:
                    found.append(bytes(message[1]))
            except LinkError:
                continue
    return found


def test_a_recording_and_the_pools_secret_give_nothing() -> None:
    between = Between()
    talk(between)
    assert TOLD not in between.seen["to"] and len(between.seen["to"]) > len(TOLD) + SALT
    assert read_recording(between) == []


def test_of_an_end_of_preamble_2_they_give_everything() -> None:
    """What is done to the recording works: this is what preamble 3 is for. And such an agent is served."""
    between = Between()
    with node(between.far), older_agent(between.near, granted()) as connection:
        connection.send(4, TOLD)
        assert connection.recv(20)[1] == TOLD
    assert read_recording(between) == [TOLD, TOLD]


def test_a_node_of_preamble_2_is_spoken_to() -> None:
    near, far = socket.socketpair()
    thread = threading.Thread(target=older_node, args=(far,))
    thread.start()
    ticket = granted()
    with client_preamble(near, "calls", ticket.ticket, ticket.secret, "s", timeout=20) as connection:
        connection.send(4, TOLD)
        assert connection.recv(20)[1] == TOLD
    thread.join(20)


def test_each_connection_has_keys_of_its_own() -> None:
    shares = set()
    for _ in range(3):
        between = Between()
        talk(between)
        at = HEAD + struct.unpack_from("<I", between.seen["to"], 8)[0]
        shares |= {bytes(between.seen["to"][at:at + SALT]), bytes(between.seen["back"][ANSWER:ANSWER + SALT])}
    assert len(shares) == 6


def as_preamble_2(*ways: str) -> Callable[[str, bytes], bytes]:
    """Rewrites the version in the first bytes that go these ways."""
    def change(way: str, data: bytes) -> bytes:
        return data[:4] + struct.pack("<H", 2) + data[6:] if way in ways else data

    return change


@pytest.mark.parametrize("ways", [("to", "back"), ("to",)])  # the node answers an old preamble by itself
def test_who_makes_both_ends_speak_preamble_2_is_noticed(ways: tuple[str, ...]) -> None:
    between, ticket = Between(as_preamble_2(*ways)), granted()
    with node(between.far), pytest.raises(AuthenticationFailed, match="made both speak an older preamble") as noticed:
        client_preamble(between.near, "calls", ticket.ticket, ticket.secret, "s", timeout=20)
    assert noticed.value.detail["reason"] == "downgrade"
    between.near.close()


def test_who_makes_one_end_speak_preamble_2_gets_no_connection() -> None:
    between, ticket = Between(as_preamble_2("back")), granted()
    with node(between.far) as failed:
        connection = client_preamble(between.near, "calls", ticket.ticket, ticket.secret, "s", timeout=20)
        connection.send(4, TOLD)
        with pytest.raises(LinkError):
            connection.recv(20)
        connection.close()
    assert failed and failed[0].detail["reason"] == "seal"


@pytest.mark.parametrize("point", [bytes(32), b"\x01" + bytes(31)])
def test_a_share_that_makes_a_key_everybody_knows_is_refused(point: bytes) -> None:
    with pytest.raises(AuthenticationFailed, match="showed no key"):
        agreement.Share().shared(point)
    near, far = socket.socketpair()
    ticket = granted()
    with node(far) as failed:
        near.sendall(struct.pack("<4sHHI", b"RGPL", PREAMBLE, 1, len(ticket.ticket)) + ticket.ticket + point)
        answer = near.recv(ANSWER, socket.MSG_WAITALL)
        near.close()
    assert struct.unpack("<4sHH", answer)[2] == 1 and isinstance(failed[0], AuthenticationFailed)


def test_keys_differ_by_everything() -> None:
    one, other = agreement.Share(), agreement.Share()
    keys = set()
    for secret, session, epoch in ((b"s" * 32, "s", 1), (b"t" * 32, "s", 1), (b"s" * 32, "t", 1), (b"s" * 32, "s", 2)):
        at_node = agreement.keys_of_node(one, one.data, other.data, secret, session, epoch)
        assert at_node == agreement.keys_of_client(other, one.data, PREAMBLE, secret, session, epoch)
        keys.update(at_node)
    assert len(keys) == 8
