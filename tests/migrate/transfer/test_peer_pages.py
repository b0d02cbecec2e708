"""Pages pulled out of the source's memory: exact whatever changes meanwhile, and never worse than the connection."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rgpu.checkpoint.device import PAGE, Region
from rgpu.checkpoint.manifest.state import RegionState
from rgpu.checkpoint.pages import pagehash
from rgpu.checkpoint.pages.frozen import look
from rgpu.checkpoint.session import restore
from rgpu.link.local import channel
from rgpu.link.messages.pages import BEGIN, GRANT, GRANTED, LAYOUT, PULL, READY, RUN_LAYOUT, Answer, Grant
from rgpu.migrate.transfer import peer_link, peer_source, peer_target
from rgpu.migrate.transfer import peer_plan as plan
from rgpu.migrate.transfer.receiver import PageReceiver
from rgpu.session.errors import Corrupt, DeviceError, LinkError, MoveFailed, RecoveryFailed
from tests.support.memfds import memfds
from tests.support.pools.proxy import Proxy
from tests.support.worker.pages import BASE, MAPPED, equal, filled
from tests.support.worker.pages_device import PlainDevice
from tests.support.worker.pages_link import KEY, Link, state
from tests.support.worker.pages_peer import SharingDevice


def sharing(seed: int = 1) -> SharingDevice:
    """The page stream's usual device, with memory that can be given away."""
    device = SharingDevice()
    for region, data in filled(seed).memory.values():
        device.add(region, data)
    return device


class PeerLink(Link):
    def __init__(self, source: PlainDevice, destination: PlainDevice, folder: Path, **options: Any) -> None:
        self.folder = folder
        super().__init__(source, destination, **options)

    def receiver_of(self, connection: Any, device: Any) -> PageReceiver:
        return PageReceiver(connection, device, self.folder)


@pytest.fixture
def link(tmp_path: Path) -> Iterator[PeerLink]:
    made = PeerLink(sharing(), SharingDevice(), tmp_path, lanes=2)
    yield made
    made.close()
    made.receiver.peer.close()
    assert not made.receiver.device.imports and not list(tmp_path.iterdir()), "nothing is held or left behind"


def pulled(link: PeerLink) -> int:
    return link.sender.statistics.bytes_pulled


def test_whole_regions_first_then_what_changed_and_nothing_twice(link: PeerLink) -> None:
    source, destination = link.sender.device, link.receiver.device
    link.sender.begin("s", "m")
    link.sender.round()
    assert destination.pulls == [(BASE, MAPPED), (BASE + MAPPED, MAPPED)] and pulled(link) == 2 * MAPPED
    assert link.sender.by_stream == "" and len(link.sender.lanes) == 1, "no further connection was needed"
    assert link.sender.round() == 0
    source.memory[BASE][1][5 * PAGE + 3] ^= 1
    source.memory[BASE][1][30 * PAGE] ^= 1
    source.memory[BASE + (1 << 40)][1][-1] ^= 1  # a module's variable goes over the connection
    assert link.sender.round() == 3
    assert destination.pulls[2:] == [(BASE + 5 * PAGE, PAGE), (BASE + 30 * PAGE, PAGE)]
    equal(source, destination, link.finish().pages)


def test_the_last_pause_pulls_what_differs_from_what_the_destination_holds(link: PeerLink) -> None:
    """What changes while it is copied is not what was hashed anywhere before: only the destination's word counts."""
    source, destination = link.sender.device, link.receiver.device
    honest = destination.pull

    def torn(copies: Any) -> None:
        honest(copies)
        source.memory[BASE][1][7 * PAGE] ^= 1  # behind the copy's back

    destination.pull = torn
    link.sender.begin("s", "m")
    link.sender.round()
    destination.pull = honest
    link.sender.device = look(source, KEY)
    assert link.sender.round() == 1 and destination.pulls[-1] == (BASE + 7 * PAGE, PAGE)
    link.sender.device = source
    equal(source, destination, link.finish().pages)


def test_a_region_that_comes_goes_or_is_made_anew_between_rounds(link: PeerLink) -> None:
    source, destination = link.sender.device, link.receiver.device
    link.sender.begin("s", "m")
    link.sender.round()
    held = len(destination.imports)
    source.unmap(BASE, MAPPED)
    source.unmap(BASE + MAPPED, MAPPED)
    source.add(Region(BASE + MAPPED, MAPPED, "mapped"), 9)  # the same place, other memory behind it
    source.add(Region(BASE + 4 * MAPPED, 3 * PAGE, "mapped"), 7)
    link.sender.round()
    assert held == 2 and len(destination.imports) == 2
    equal(source, destination, link.finish().pages)


def test_memory_that_is_unmapped_while_it_is_pulled_stays_until_it_is_let_go(link: PeerLink) -> None:
    source, destination = link.sender.device, link.receiver.device
    honest = destination.pull

    def late(copies: Any) -> None:
        destination.pull = honest
        source.unmap(BASE, MAPPED)
        honest(copies)

    destination.pull = late
    link.sender.begin("s", "m")
    link.sender.round()
    link.sender.round()
    equal(source, destination, link.finish().pages)
    assert BASE not in destination.memory


@pytest.mark.parametrize("again", [False, True])
def test_a_region_unmapped_before_it_was_exported_is_left_out(again: bool, link: PeerLink) -> None:
    source = link.sender.device
    honest = source.export

    def gone(address: int, size: int) -> tuple[int, int]:
        if address == BASE:
            source.export = honest
            source.unmap(BASE, MAPPED)
            if again:  # and another one takes its place at once
                source.add(Region(BASE, MAPPED, "mapped"), 5)
            raise DeviceError("no such mapping", 1)
        return honest(address, size)

    source.export = gone
    link.sender.begin("s", "m")
    link.sender.round()
    assert pulled(link) == MAPPED and link.sender.by_stream == ""
    link.sender.round()
    equal(source, link.receiver.device, link.finish().pages)


@pytest.mark.parametrize(("break_it", "why"), [
    (lambda link: setattr(link.sender.device, "no_export", "no handles here"), "exported: no handles here"),
    (lambda link: setattr(link.receiver.device, "no_import", "no peer access"), "imported: no peer access"),
    (lambda link: setattr(link.receiver.device, "failing_pulls", 1), "on fire"),
], ids=["export", "import", "pull"])
def test_what_cannot_be_pulled_goes_over_the_connection_by_name(link: PeerLink, break_it: Any, why: str) -> None:
    source = link.sender.device
    break_it(link)
    link.sender.begin("s", "m")
    total = sum(pagehash.page_count(region.size) for region in source.regions())
    assert link.sender.round() in (total - 24, total)  # of a pull that failed nobody knows what it wrote
    assert why in link.sender.by_stream and pulled(link) == 0 and link.sender.peer is None
    source.memory[BASE][1][3] ^= 1
    assert link.sender.round() == 1
    equal(source, link.receiver.device, link.finish().pages)


def test_a_pull_that_fails_later_loses_nothing_that_went_before(link: PeerLink) -> None:
    source = link.sender.device
    link.sender.begin("s", "m")
    link.sender.round()
    source.memory[BASE][1][3] ^= 1
    link.receiver.device.failing_pulls = 1
    assert link.sender.round() == 1 and "on fire" in link.sender.by_stream
    assert link.sender.page_rounds, "what was pulled before is still told"
    equal(source, link.receiver.device, link.finish().pages)


@pytest.mark.parametrize("case", ["boot", "kind", "folder", "asked", "device"])
def test_who_cannot_pull_is_told_why(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, destination = sharing(), SharingDevice()
    folder, why = tmp_path, {"boot": "different hosts", "kind": "a plain device, the destination a other device",
                             "folder": "cannot listen", "asked": "asked for", "device": "cannot be given"}[case]
    if case == "boot":
        monkeypatch.setattr(peer_target, "boot_id", lambda: "another")
    elif case == "kind":
        destination.kind = "other"
    elif case == "folder":
        folder = tmp_path / "missing"
    elif case == "device":
        del source.peer
    link = PeerLink(source, destination, folder)
    try:
        if case == "asked":
            link.sender.by_stream = "stream was asked for"
        link.sender.begin("s", "m")
        link.sender.round()
        assert why in link.sender.by_stream and pulled(link) == 0
        equal(source, destination, link.finish().pages)
    finally:
        link.close()


def test_a_connection_that_leads_through_something_is_used(tmp_path: Path) -> None:
    """A shaper or proxy stands for another host: whoever put it there wants the pages to go through it."""
    proxies: list[Proxy] = []

    def relay(address: tuple[str, int]) -> tuple[str, int]:
        proxies.append(Proxy(address))
        return proxies[0].address

    link = PeerLink(sharing(), SharingDevice(), tmp_path, relay=relay)
    try:
        link.sender.begin("s", "m")
        link.sender.round()
        assert "leads through something" in link.sender.by_stream and pulled(link) == 0
        equal(link.sender.device, link.receiver.device, link.finish().pages)
    finally:
        link.close()
        proxies[0].close()


def test_a_socket_out_of_reach_is_no_end_of_the_move(link: PeerLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another mount namespace: the path that the destination names leads nowhere."""
    honest = channel.connect
    monkeypatch.setattr(channel, "connect", lambda path, timeout: honest(Path("/nonexistent/x.peer"), timeout))
    link.sender.begin("s", "m")
    link.sender.round()
    assert "cannot be reached" in link.sender.by_stream
    equal(link.sender.device, link.receiver.device, link.finish().pages)


# -- whoever else comes to the socket ---------------------------------------------------------


def test_only_who_knows_the_token_hands_descriptors_over(tmp_path: Path) -> None:
    listener = peer_link.Listener(tmp_path)
    stranger = peer_link.Giver(str(listener.path), b"\0" * 32)
    stranger.send([0])
    giver = peer_link.Giver(str(listener.path), listener.token)
    read, write = os.pipe()
    giver.send([read])
    (fd,) = listener.receive(1)
    os.write(write, b"mine")
    assert os.read(fd, 4) == b"mine"
    for one in (fd, read, write):
        os.close(one)
    for end in (stranger, giver, listener):
        end.close()
    assert not list(tmp_path.iterdir())


def test_another_number_of_descriptors_than_was_said_is_refused_and_closed(tmp_path: Path) -> None:
    listener = peer_link.Listener(tmp_path)
    giver = peer_link.Giver(str(listener.path), listener.token)
    given = [os.memfd_create("given") for _ in range(2)]
    inodes = {os.fstat(fd).st_ino for fd in given}
    giver.send(given)
    for fd in given:
        os.close(fd)
    with pytest.raises(LinkError, match="2 descriptors came"):
        listener.receive(3)
    assert not inodes & memfds()
    giver.close()
    listener.close()


def test_a_socket_that_a_killed_worker_left_is_removed(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / f"{gone.pid}.peer").touch()
    (tmp_path / "1.peer").touch()  # that process lives
    listener = peer_link.Listener(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"1.peer", f"{os.getpid()}.peer"}
    listener.close()


def test_nobody_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_link, "PATIENCE", 0.1)
    listener = peer_link.Listener(tmp_path)
    with pytest.raises(LinkError, match="no process connected"):
        listener.receive(1)
    listener.close()


def test_a_process_of_another_user_is_sent_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = peer_link.Listener(tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    with pytest.raises(LinkError, match="of no use"):
        peer_link.Giver(str(listener.path), listener.token)
    monkeypatch.undo()
    listener.close()


# -- what a source may say -----------------------------------------------------------------------


def begun(folder: Path, device: PlainDevice | None = None) -> tuple[PeerLink, Answer]:
    """A link whose source is the test itself, after the first LAYOUT."""
    link = PeerLink(sharing(), device or SharingDevice(), folder)
    connection = link.sender.connection
    asked = peer_source.ask(connection, link.sender.device)
    connection.send(BEGIN, msgspec.msgpack.encode({"session": "s", "move": "m", "hash_key": KEY, "lanes": 0,
                                                   "peer": asked}))
    connection.send(LAYOUT, msgspec.msgpack.encode({"regions": [[BASE, MAPPED, "mapped", 0]]}))
    kind, body = connection.recv(10)
    assert kind == READY
    return link, msgspec.convert(msgspec.msgpack.decode(body)["peer"], Answer)


@pytest.mark.parametrize("runs", [[(BASE, PAGE)], [(BASE - PAGE, PAGE)], [(0, PAGE)], [(BASE + MAPPED, PAGE)]])
def test_a_pull_from_what_was_not_granted_is_refused(runs: list[tuple[int, int]], tmp_path: Path) -> None:
    link, _ = begun(tmp_path)
    link.sender.connection.send(PULL, plan.pull(np.array(runs, RUN_LAYOUT), True))
    link.thread.join(10)
    assert isinstance(link.errors[0], Corrupt) and "no region that was granted" in link.errors[0].message
    link.close()


def test_a_run_that_leaves_its_region_or_one_not_mapped_here_is_refused(tmp_path: Path) -> None:
    for runs, rows in (([(BASE + MAPPED - PAGE, 2 * PAGE)], [(BASE, MAPPED)]),
                       ([(BASE, PAGE)], [(BASE, 2 * MAPPED)]), ([(BASE + MAPPED, PAGE)], [(BASE + MAPPED, MAPPED)])):
        link, answer = begun(tmp_path)
        giver = peer_link.Giver(answer.path, answer.token)
        link.sender.connection.send(GRANT, plan.encode(Grant([(at, size, 1) for at, size in rows])))
        giver.send([link.sender.device._shared[BASE][1]] * len(rows))
        assert link.sender.connection.recv(10)[0] == GRANTED
        link.sender.connection.send(PULL, plan.pull(np.array(runs, RUN_LAYOUT), True))
        link.thread.join(10)
        assert isinstance(link.errors[0], Corrupt), link.errors
        giver.close()
        link.close()
        link.receiver.peer.close()


def test_a_grant_nobody_asked_for_is_refused(tmp_path: Path) -> None:
    link = PeerLink(sharing(), SharingDevice(), tmp_path)
    link.sender.connection.send(GRANT, plan.encode(Grant([(BASE, MAPPED, 1)])))
    link.thread.join(10)
    assert isinstance(link.errors[0], Corrupt) and "unasked" in link.errors[0].message
    link.close()


@pytest.mark.parametrize("rows", [1, 0])
def test_hashes_of_other_pages_than_were_pulled_end_the_move(rows: int, link: PeerLink,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "hashes", lambda values: iter([b"\1" + bytes(16 * rows)]))
    link.sender.begin("s", "m")
    with pytest.raises(Corrupt, match="hashes are due"):
        link.sender.round()


def test_a_destination_that_dies_in_a_pull_ends_the_move(link: PeerLink) -> None:
    def dies(copies: Any) -> None:
        link.receiver.connection.sock.shutdown(socket.SHUT_RDWR)
        raise MoveFailed("killed")

    link.receiver.device.pull = dies
    link.sender.begin("s", "m")
    with pytest.raises(LinkError):
        link.sender.round()


def test_a_destination_that_hangs_in_a_pull_ends_the_move(link: PeerLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_source, "STALL", 0.3)
    hold, honest = threading.Event(), link.receiver.device.pull

    def hangs(copies: Any) -> None:
        hold.wait(20)
        honest(copies)

    link.receiver.device.pull = hangs
    link.sender.begin("s", "m")
    with pytest.raises(LinkError, match="did not answer"):
        link.sender.round()
    hold.set()


# -- wrong bytes --------------------------------------------------------------------------------


class Whole(SharingDevice):
    """With what :func:`restore.finish` asks for."""

    def hash_pages(self, region: Region, key: bytes) -> Any:
        return self.hash_regions([region], key)[0].hashes

    def event_states(self) -> dict[int, int | None]:
        return {}

    def restore_event_states(self, states: Any) -> None:
        pass

    def set_clock(self, now: int) -> None:
        pass


@pytest.mark.parametrize(("bad", "mended"), [(1, True), (2, True), (3, False)])
def test_pages_that_arrived_wrong_are_pulled_again_and_never_taken_for_right(bad: int, mended: bool,
                                                                             tmp_path: Path) -> None:
    source, destination = Whole(), Whole()
    source.add(Region(BASE, MAPPED, "mapped"), np.random.default_rng(3).integers(0, 256, MAPPED, np.uint8))
    link = PeerLink(source, destination, tmp_path)
    try:
        link.sender.begin("s", "m")
        link.sender.round()
        source.memory[BASE][1][:] ^= 255
        destination.pulls.clear()
        link.sender.device = view = look(source, KEY)
        destination.bad_pulls = bad  # in the last pause, when nobody tells hashes any more
        link.sender.round()
        last = state()
        last.regions = [RegionState(r.address, r.size, r.kind, r.owner, r.name, pagehash.pack(view.hash_pages(r, KEY)))
                        for r in view.regions()]
        link.sender.finish(state())
        link.thread.join(10)
        if mended:
            restore.finish(destination, last, link.receiver.peer.mend)
            assert np.array_equal(destination.memory[BASE][1], source.memory[BASE][1])
            assert len(destination.pulls) == 1 + bad and destination.pulls[1][1] == PAGE, "one page, not all of them"
        else:
            with pytest.raises(RecoveryFailed, match=f"{BASE:#x} differ"):
                restore.finish(destination, last, link.receiver.peer.mend)
    finally:
        link.close()
        link.receiver.peer.close()


# -- hashes that a state need not repeat -----------------------------------------------------------


def last_state(link: PeerLink, view: Any) -> Any:
    """As :func:`rgpu.checkpoint.manifest.cut.take` makes it."""
    last = state()
    last.regions = [RegionState(r.address, r.size, r.kind, r.owner, r.name, b"" if r.kind == "mapped" and
                                (r.address, r.size) in link.sender.known else pagehash.pack(view.hash_pages(r, KEY)))
                    for r in view.regions()]
    return last


def test_a_state_leaves_out_what_the_destination_told_and_comes_out_whole(link: PeerLink) -> None:
    source = link.sender.device
    link.sender.begin("s", "m")
    link.sender.round()
    source.memory[BASE][1][5 * PAGE] ^= 1  # a few pages of one region
    source.memory[BASE + MAPPED][1][:] ^= 3  # all of another
    source.add(Region(BASE + 4 * MAPPED, 3 * PAGE, "mapped"), 7)  # and one that was never pulled
    link.sender.device = view = look(source, KEY)
    link.sender.round()
    assert set(link.sender.known) == {(BASE, MAPPED)}
    last = last_state(link, view)
    assert [bool(region.hashes) for region in last.regions if region.kind == "mapped"] == [False, True, True]
    link.sender.finish(last)
    link.thread.join(10)
    received = link.result[0].state
    assert received is not None
    for region in received.regions:
        assert np.array_equal(region.page_hashes(), view.hash_pages(region.region(), KEY)), region
    equal(source, link.receiver.device, link.result[0].pages)


def test_what_a_destination_told_counts_no_more_when_its_pages_came_otherwise(link: PeerLink) -> None:
    source = link.sender.device
    link.sender.begin("s", "m")
    link.sender.round()
    assert link.sender.peer is not None
    link.sender.peer.forget_told()  # as a cut's copies do, which are sent over the connection
    link.sender.device = look(source, KEY)
    link.sender.round()
    assert not link.sender.known
    link.sender.device = source
    link.finish()


def test_a_state_without_hashes_that_nobody_told_is_refused(link: PeerLink) -> None:
    source = link.sender.device
    link.sender.begin("s", "m")
    link.sender.round()
    link.sender.device = view = look(source, KEY)
    link.sender.round()
    last = last_state(link, view)
    assert not any(region.hashes for region in last.regions if region.kind == "mapped")
    link.receiver.peer._told.clear()
    with pytest.raises((Corrupt, LinkError)):
        link.sender.finish(last)
    link.thread.join(10)
    assert isinstance(link.errors[0], Corrupt) and "none are known" in link.errors[0].message


@pytest.mark.parametrize("row", [(BASE, 0, b"", b""), (BASE, PAGE, b"\1\0\0\0", bytes(16)),
                                 (BASE, PAGE, bytes(4), bytes(15)), (BASE, PAGE, bytes(3), bytes(16))])
def test_hashes_of_pages_that_cannot_be_are_refused(row: tuple[int, int, bytes, bytes]) -> None:
    with pytest.raises(Corrupt):
        plan.read_known(msgspec.msgpack.encode({"round": 3, "known": [row]}))


def test_a_page_that_rots_after_it_was_told_is_found(tmp_path: Path) -> None:
    """The state's hashes are those that the destination told, and still what it holds is hashed and compared anew."""
    source, destination = Whole(), Whole()
    source.add(Region(BASE, MAPPED, "mapped"), np.random.default_rng(3).integers(0, 256, MAPPED, np.uint8))
    link = PeerLink(source, destination, tmp_path)
    try:
        link.sender.begin("s", "m")
        link.sender.round()
        destination.memory[BASE][1][9 * PAGE + 1] ^= 4
        link.sender.device = view = look(source, KEY)
        assert link.sender.round() == 0
        link.sender.finish(last_state(link, view))
        link.thread.join(10)
        received = link.result[0].state
        with pytest.raises(RecoveryFailed, match="1 pages of the mapped range"):
            restore.finish(destination, received)
        restore.finish(destination, received, link.receiver.peer.mend)
        assert np.array_equal(destination.memory[BASE][1], source.memory[BASE][1])
    finally:
        link.close()
        link.receiver.peer.close()
