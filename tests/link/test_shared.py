"""The way by which memory is handed over on one host: who is let in, what is refused."""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rgpu.link.local import shared
from rgpu.link.messages.memory import DROP, MAPPED, MEMORY, PACKET_LAYOUT, PROVEN
from rgpu.session.errors import AuthenticationFailed, Corrupt, LinkError, RgpuError
from tests.support.memfds import memfds

SIZE = 1 << 16


def memory(seals: int = shared.SEALS, size: int = SIZE, allocated: bool = True) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if allocated:
        os.posix_fallocate(fd, 0, size)
    else:
        os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def meet(offer: shared.Offer, told: shared.Offer, proven: bytes) -> tuple[Any, Any]:
    """(what the worker's side came to, what the agent's)."""
    listener = shared.listen(offer)
    found: list[Any] = []

    def admit() -> None:
        try:
            channel = shared.admit(listener, offer)
            channel.send(PROVEN, data=proven)
            found.append(channel)
        except RgpuError as error:
            found.append(error)

    thread = threading.Thread(target=admit)
    thread.start()
    try:
        other: Any = shared.connect(told)[0]
    except RgpuError as error:
        other = error
    thread.join()
    listener.close()
    return found[0], other


def close(*ends: Any) -> None:
    for end in ends:
        if isinstance(end, shared.Channel):
            end.close()


def test_both_sides_prove_themselves() -> None:
    offer = shared.Offer.draw()
    worker, agent = meet(offer, shared.Offer.from_dict(offer.as_dict()), offer.proven)
    assert isinstance(worker, shared.Channel) and isinstance(agent, shared.Channel)
    fd = memory()
    assert agent.send(MEMORY, 7, SIZE, fd=fd)
    message = worker.receive()
    assert message is not None and (message.kind, message.number, message.size) == (MEMORY, 7, SIZE)
    assert shared.check_sealed(message.fd, SIZE, SIZE) == shared.check_sealed(fd, SIZE, SIZE)
    assert agent.receive() is None  # it never waits
    worker.close()
    with pytest.raises(LinkError):
        agent.receive()
    os.close(fd)
    os.close(message.fd)
    close(agent)


def test_who_does_not_know_the_token_is_sent_away() -> None:
    offer = shared.Offer.draw()
    worker, agent = meet(offer, shared.Offer(offer.name, secrets.token_bytes(32), offer.proven), offer.proven)
    assert isinstance(worker, AuthenticationFailed) and isinstance(agent, LinkError)


def test_a_worker_that_cannot_prove_itself_gets_no_memory() -> None:
    offer = shared.Offer.draw()
    worker, agent = meet(offer, offer, secrets.token_bytes(32))
    assert isinstance(agent, AuthenticationFailed)
    close(worker)


def test_nobody_listens() -> None:
    with pytest.raises(LinkError, match="network namespace"):
        shared.connect(shared.Offer.draw())


def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel names it: also what another user namespace shows as nobody."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(shared.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(AuthenticationFailed):
        shared.Channel(ours).check_peer()
    ours.close()
    theirs.close()


@pytest.mark.parametrize("values", [
    None, {}, {"name": "rgpu-x", "prove": b"", "proven": b""}, {"name": 5, "prove": bytes(32), "proven": bytes(32)},
    {"name": "x" * 20, "prove": bytes(32), "proven": bytes(32)},
    {"name": "rgpu-" + "x" * 90, "prove": bytes(32), "proven": bytes(32)},
    {"name": "rgpu-x", "prove": "a" * 32, "proven": bytes(32)}])
def test_offers_that_cannot_be(values: Any) -> None:
    with pytest.raises(Corrupt):
        shared.Offer.from_dict(values)


def hostile() -> Iterator[tuple[str, int]]:
    yield "not sealed", memory(0)
    yield "may shrink", memory(fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    yield "may be unsealed later", memory(fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    yield "not allocated", memory(allocated=False)
    yield "longer than said", memory(size=2 * SIZE)
    yield "shorter than said", memory(size=SIZE // 2)
    yield "a socket", socket.socketpair()[0].detach()
    yield "a file", os.open(__file__, os.O_RDONLY)


def test_memory_that_could_kill_its_reader_is_refused() -> None:
    count = 0
    for what, fd in hostile():
        with pytest.raises(Corrupt):
            shared.check_sealed(fd, SIZE, SIZE)
            pytest.fail(what)
        os.close(fd)
        count += 1
    assert count == 8
    fd = memory()
    with pytest.raises(Corrupt):
        shared.check_sealed(fd, SIZE, SIZE - 1)
    os.close(fd)


@pytest.mark.parametrize(("data", "fds"), [
    (b"short", 0), (bytes(16), 2), (PACKET_LAYOUT.pack(DROP, 1, 0), 1),
    (PACKET_LAYOUT.pack(MEMORY, 1, SIZE), 0), (PACKET_LAYOUT.pack(MAPPED, 1, 0) + bytes(2000), 0)])
def test_messages_that_cannot_be(data: bytes, fds: int) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    given = [memory() for _ in range(fds)]
    socket.send_fds(ours, [data], given)
    with pytest.raises(Corrupt):
        shared.Channel(theirs).receive()
    inodes = {os.fstat(fd).st_ino for fd in given}
    for fd in given:
        os.close(fd)
    assert not inodes & memfds()  # what came along was closed
    ours.close()
    theirs.close()


def test_the_host_has_another_name_where_a_test_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(shared.identity()) == 36
    monkeypatch.setenv(shared.HOST_VARIABLE, "elsewhere")
    assert shared.identity() == "elsewhere" and len(shared.identity("node-a")) == 36
    monkeypatch.setenv(shared.HOST_VARIABLE, "node-b=away,node-c=far")
    assert shared.identity("node-b") == "away" and shared.identity("node-c") == "far"
    assert shared.identity("node-a") == shared.identity() and len(shared.identity()) == 36
