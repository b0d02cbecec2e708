"""Two workers' ends of what they share, over real socket pairs: who gets what, and what the end of one means."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rgpu.server.worker.sharing import sharing as sharing_module
from rgpu.server.worker.sharing.sharing import INVALID_VALUE, MAP_FAILED, Sharing
from rgpu.server.worker.sharing.ties import Tie
from rgpu.session.errors import DeviceError
from rgpu.session.objects import handle_tokens
from rgpu.session.objects.handle_tokens import TokenKind
from tests.support.eventually import eventually

SECRET = bytes(range(16))


class World:
    """``a`` exports, ``b`` imports; between them what the daemon does."""

    def __init__(self) -> None:
        self.still = False
        self.answers = True  #: the daemon does
        self.denied = ""
        self.begun: list[tuple[str, str]] = []
        self.severed: list[tuple[str, str]] = []
        self.a = Sharing("a", lambda number, token: False, lambda: self.still, self._note(self.begun, "a"),
                         self._note(self.severed, "a"))
        self.b = Sharing("b", self.dial, lambda: False, self._note(self.begun, "b"), self._note(self.severed, "b"))

    @staticmethod
    def _note(notes: list[tuple[str, str]], who: str) -> Callable[[str], None]:
        return lambda peer: notes.append((who, peer))

    def dial(self, number: int, token: bytes) -> bool:
        if self.denied:
            self.b.denied(number, self.denied)
        elif self.answers:
            one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            threading.Thread(target=self.a.serve, args=(one.detach(), "b"), daemon=True).start()
            self.b.linked(two.detach(), number, "a")
        return self.answers

    def export(self, path: Path, secret: bytes = SECRET, number: int = 4096) -> bytes:
        path.write_bytes(b"what a shares")
        return self.a.export(TokenKind.MEMORY, number, 13, secret,
                             ((13, lambda: os.open(path, os.O_RDONLY)), (5, lambda: os.open(path, os.O_RDONLY))))


@pytest.fixture
def world() -> World:
    return World()


def refused(world: World, token: bytes) -> DeviceError:
    with pytest.raises(DeviceError) as caught:
        world.b.open(token, TokenKind.MEMORY)
    return caught.value


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_an_importer_gets_descriptors_and_both_are_pinned(world: World, tmp_path: Path) -> None:
    before = descriptors()
    token = world.export(tmp_path / "memory")
    assert world.a.pins() == [] == world.b.pins()
    tie, pieces = world.b.open(token, TokenKind.MEMORY)
    assert [size for _, size in pieces] == [13, 5]
    assert [os.pread(fd, size, 0) for fd, size in pieces] == [b"what a shares", b"what "]
    assert "session b" in world.a.pins()[0] and "session a" in world.b.pins()[0]
    assert world.a.describe() == {"sessions": ["b"], "ties": 1}
    for fd, _ in pieces:
        os.close(fd)
    world.b.close(tie)
    eventually(lambda: world.a.describe()["ties"] == 0, world.a.describe, 10)
    assert world.a.pins() and world.b.pins(), "what was written meanwhile stands in no journal"
    assert sorted(world.begun) == [("a", "b"), ("b", "a")] and world.severed == []
    eventually(lambda: descriptors() == before, descriptors, 10)


def test_wrong_tokens_open_nothing_and_leave_nothing(world: World, tmp_path: Path) -> None:
    before = descriptors()
    good = world.export(tmp_path / "memory")
    read = handle_tokens.decode(good, TokenKind.MEMORY)
    cases: list[dict[str, Any]] = [{"secret": bytes(16)}, {"number": 8192}, {"size": 14},
                                   {"session": handle_tokens.session_digest("c")}]
    for change in cases:
        fields = {"kind": read.kind, "secret": read.secret, "session": read.session, "number": read.number,
                  "size": read.size} | change
        assert refused(world, handle_tokens.encode(handle_tokens.Token(**fields))).result == INVALID_VALUE
    assert refused(world, good[:-1]).result == refused(world, bytes(64)).result == INVALID_VALUE
    world.denied = "another user's"
    assert "another user's" in refused(world, good).message
    world.denied = ""
    world.a.exports.remove(TokenKind.MEMORY, 4096)
    assert refused(world, good).result == INVALID_VALUE
    again = world.export(tmp_path / "memory", secret=bytes(16))
    assert refused(world, good).result == INVALID_VALUE, "another allocation came to its address"
    assert again != good
    assert world.a.pins() == [] == world.b.pins()
    eventually(lambda: descriptors() == before, descriptors, 10)


def test_a_garbled_question_is_refused(world: World) -> None:
    for data in (b"", b"\x81\xa5token\x01", b"\x81\xa5token\xc4\x01\x00", b"\xc1", bytes(200)):
        one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with two:
            two.send(data) if data else two.shutdown(socket.SHUT_WR)
            world.a.serve(one.detach(), "b")
    assert world.a.pins() == [] and world.severed == []


def test_an_exporter_that_stands_still_is_asked_again(world: World, tmp_path: Path) -> None:
    token = world.export(tmp_path / "memory")
    world.still = True
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(world.b.open(token, TokenKind.MEMORY)), daemon=True)
    asking.start()
    asking.join(0.3)
    assert asking.is_alive() and world.a.pins() == [], "who is about to move does not become pinned"
    world.still = False
    asking.join(10)
    assert world.a.pins() and found
    for fd, _ in found[0][1]:
        os.close(fd)


def test_without_an_answer_the_import_fails_in_time(world: World, tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing_module, "OPEN_SECONDS", 0.3)
    world.answers = False
    assert refused(world, world.export(tmp_path / "memory")).result == MAP_FAILED


def test_a_late_tie_is_closed(world: World) -> None:
    before = descriptors()
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    world.b.linked(two.detach(), 77, "a")
    one.close()
    assert descriptors() == before


@pytest.mark.parametrize("who", ["a", "b"])
def test_a_lost_worker_is_told_once_and_one_that_ends_in_order_is_not(world: World, tmp_path: Path, who: str) -> None:
    for number in (4096, 8192):
        _, pieces = world.b.open(world.export(tmp_path / "memory", number=number), TokenKind.MEMORY)
        for fd, _ in pieces:
            os.close(fd)
    gone, left = (world.a, world.b) if who == "a" else (world.b, world.a)
    for tie in list(gone._ties):  # its process is killed: the kernel closes its sockets, without a word
        tie.channel.sock.shutdown(socket.SHUT_RDWR)
    eventually(lambda: (left.session, gone.session) in world.severed, lambda: world.severed, 10)
    assert [one for one in world.severed if one[0] == left.session] == [(left.session, gone.session)]


@pytest.mark.parametrize("who", ["a", "b"])
def test_a_session_that_ends_in_order_takes_nobody_with_it(world: World, tmp_path: Path, who: str) -> None:
    _, pieces = world.b.open(world.export(tmp_path / "memory"), TokenKind.MEMORY)
    gone, left = (world.a, world.b) if who == "a" else (world.b, world.a)
    gone.over()
    eventually(lambda: left.describe()["ties"] == 0, left.describe, 10)
    assert world.severed == []
    assert os.pread(pieces[0][0], 4, 0) == b"what", "what it gave stays"
    for fd, _ in pieces:
        os.close(fd)


def test_a_tie_that_this_end_closed_is_watched_by_nobody() -> None:
    """A session may end while the thread that made its tie is about to watch it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    tie, told = Tie(ours.detach(), "other"), list[bool]()
    tie.over()
    tie.watch(lambda tie, lost: told.append(lost))
    theirs.close()
    assert tie.is_over and not told and not any(one.name == "tie-other" for one in threading.enumerate())
