"""The page stream between two devices: exactness, elided zeros, credits, hostile bodies, broken links."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import lz4.block
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rgpu.checkpoint.device import PAGE, Region
from rgpu.checkpoint.pages import pagehash
from rgpu.link.messages.pages import CREDIT, LAYOUT, LZ4, PAGES, RAW, ZERO
from rgpu.migrate.transfer import frame_lanes as page_lanes
from rgpu.migrate.transfer import frames as page_frames
from rgpu.session.errors import Corrupt, LinkError, RgpuError
from tests.support.pools.proxy import Proxy
from tests.support.worker.pages import BASE, MAPPED, equal, filled
from tests.support.worker.pages_device import PlainDevice
from tests.support.worker.pages_link import KEY, Link


@pytest.fixture(params=[1, 3], ids=["one lane", "three lanes"])
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    made = Link(filled(), PlainDevice(), lanes=request.param)
    yield made
    made.close()


def test_every_byte_arrives_and_later_rounds_send_what_changed(link: Link) -> None:
    source = link.sender.device
    link.sender.begin("s", "m")
    total = sum(pagehash.page_count(region.size) for region in source.regions())
    assert link.sender.round() == total - 24  # 24 pages of zeros need not be sent: the other side has them
    assert link.sender.round() == 0
    source.memory[BASE][1][5 * PAGE + 3] ^= 1
    source.memory[BASE + MAPPED][1][:MAPPED // 2] = 0  # now zeros, which the other side does not have
    source.memory[BASE + (1 << 40)][1][-1] ^= 1
    before = link.sender.statistics.bytes_sent
    assert link.sender.round() == 1 + 24 + 1
    assert link.sender.statistics.bytes_sent - before < 2 * PAGE, "zeros were sent as bytes"
    equal(source, link.receiver.device, link.finish().pages)


def test_a_region_that_went_is_unmapped_and_one_that_came_is_mapped(link: Link) -> None:
    source = link.sender.device
    link.sender.begin("s", "m")
    link.sender.round()
    source.unmap(BASE, MAPPED)
    source.add(Region(BASE + 4 * MAPPED, PAGE, "mapped"), 7)
    link.sender.round()
    received = link.finish()
    assert set(link.receiver.device.memory) == {BASE + MAPPED, BASE + 4 * MAPPED}
    equal(source, link.receiver.device, received.pages)


def test_compressed_pages_arrive(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    from rgpu.checkpoint.codec.compression import Decision
    for lane in link.sender.lanes:
        lane.decision = Decision(True, "the test wants it")
    monkeypatch.setattr(page_lanes.SendLane, "_probe", lambda lane, sample: None)
    source = link.sender.device
    source.memory[BASE][1][:20 * PAGE] = np.arange(20 * PAGE) // 1000 % 256
    link.sender.begin("s", "m")
    for lane in link.sender.lanes:
        lane.decision = Decision(True, "the test wants it")
    link.sender.round()
    assert link.sender.statistics.bytes_sent < (link.sender.statistics.pages_sent - 10) * PAGE
    equal(source, link.receiver.device, link.finish().pages)


def test_a_slow_receiver_holds_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 MiB no more is under way than credits and socket buffers allow, and nothing is lost."""
    source, destination = PlainDevice(), PlainDevice()
    source.add(Region(BASE, 640 * PAGE, "mapped"), np.random.default_rng(2).integers(0, 256, 640 * PAGE, np.uint8))
    link = Link(source, destination, lanes=2)
    try:
        destination.gate.clear()
        link.sender.begin("s", "m")
        done = threading.Thread(target=link.sender.round, daemon=True)
        done.start()
        time.sleep(1.0)
        most = 2 * page_lanes.CREDITS
        assert done.is_alive() and sum(lane.in_flight for lane in link.sender.lanes) <= most
        assert link.sender.statistics.pages_sent <= most * 32 and destination.writes == 0
        destination.gate.set()
        done.join(20)
        assert not done.is_alive()
        equal(source, destination, link.finish().pages)
    finally:
        link.close()


def test_further_connections_wait_until_the_first_one_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts admit connections side by side: one opened at once could come first, and be taken for the first."""
    link = Link(filled(), PlainDevice(), lanes=3)
    begun: list[bool] = []
    more = link._more

    def opened() -> Any:
        begun.append(link.receiver._begun.is_set())
        return more()

    link.sender._more = opened
    receive = link.receiver.device.page_ring  # the receiver is slow to take what came

    def slow() -> Any:
        time.sleep(0.3)
        return receive()

    monkeypatch.setattr(link.receiver.device, "page_ring", slow)
    try:
        link.sender.begin("s", "m")
        assert begun == [True, True] and len(link.sender.lanes) == 3
    finally:
        link.close()


def test_a_page_with_another_hash_is_refused_by_name(link: Link) -> None:
    """The device lies about what it copied, as faulty memory would: the error names the page's address."""
    source = link.sender.device
    honest = source.copy_and_hash

    def lying(pages: Any, staging: int, key: bytes) -> Any:
        found = honest(pages, staging, key)
        if (BASE + 3 * PAGE, PAGE) in pages:
            found.hashes[[address for address, _ in pages].index(BASE + 3 * PAGE)] ^= np.uint64(1)
        return found

    source.copy_and_hash = lying
    link.sender.begin("s", "m")
    with pytest.raises(Corrupt, match=f"{BASE + 3 * PAGE:#x}"):
        link.sender.round()


# -- hostile bodies -----------------------------------------------------------------------


def body(address: int, size: int, stored: int, codec: int, data: bytes, value: tuple[int, int] = (0, 0)) -> bytes:
    return struct.pack("<IQIIBQQ", 1, address, size, stored, codec, *value) + data


@pytest.mark.parametrize("bad", [
    b"", b"\0" * 4, b"\xff" * 5, struct.pack("<I", 5000) + bytes(5000 * 33), body(BASE, 1 << 20, 0, ZERO, b""),
    body(BASE, PAGE, PAGE, RAW, b"short"), body(BASE, PAGE, 10, LZ4, b"\xff" * 10), body(BASE, 0, 0, ZERO, b""),
    body(BASE, 16, 16, 3, bytes(16)), body(BASE, 16, 16, ZERO, bytes(16)), body(BASE, 16, 16, RAW, bytes(17)),
    body(2**64 - 10, 16, 16, RAW, bytes(16)), body(BASE, 16, 16, RAW, bytes(16)),
])
def test_a_hostile_body_is_refused(bad: bytes) -> None:
    with pytest.raises(Corrupt):
        entries, data = page_frames.parse(bad)
        list(page_frames.verified(entries, data, KEY))


def test_a_page_outside_the_layout_is_refused() -> None:
    device = PlainDevice()
    link = Link(device, PlainDevice())
    try:
        link.sender.begin("s", "m")
        data = bytes(100)
        link.sender.connection.send(PAGES, body(BASE, 100, 100, RAW, data, pagehash.hash_page(data, KEY)))
        link.thread.join(10)
        assert isinstance(link.errors[0], Corrupt) and f"{BASE:#x}" in link.errors[0].message
    finally:
        link.close()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_body_does_more_than_raise_corrupt(data: st.DataObject) -> None:
    """Any bytes, and true bodies with bytes changed: whole and as sent, or Corrupt."""
    page = bytes(range(256)) * 4
    packed = lz4.block.compress(page, store_size=False)
    value = pagehash.hash_page(page, KEY)
    true = (struct.pack("<I", 3) + struct.pack("<QIIBQQ", BASE, 1024, 1024, RAW, *value)
            + struct.pack("<QIIBQQ", BASE + PAGE, 1024, len(packed), LZ4, *value)
            + struct.pack("<QIIBQQ", BASE + 2 * PAGE, PAGE, 0, ZERO, *pagehash.zero_hash(KEY)) + page + packed)
    if data.draw(st.booleans()):
        tried = data.draw(st.binary(max_size=300))
    else:
        changed = bytearray(true)
        for _ in range(data.draw(st.integers(0, 3))):
            changed[data.draw(st.integers(0, len(true) - 1))] = data.draw(st.integers(0, 255))
        tried = bytes(changed[:data.draw(st.integers(0, len(true)))])
    try:
        entries, stored = page_frames.parse(tried)
        runs = list(page_frames.verified(entries, stored, KEY))
    except Corrupt:
        return
    assert [bytes(run.size) if run.data is None else bytes(run.data) for run in runs] in (
        [page, page, bytes(PAGE)], [page, page], [page]) or tried[4:] != true[4:]
    for run in runs:
        assert run.size == (run.size if run.data is None else len(run.data)) <= page_frames.MOST_PAGES * PAGE


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([32, 33, 34, 35, 36, 37, 40, 44, 99]), st.binary(max_size=200)), max_size=6))
def test_any_messages_end_in_an_error_of_ours(messages: list[tuple[int, bytes]]) -> None:
    link = Link(PlainDevice(), PlainDevice())
    try:
        for kind, payload in messages:
            try:
                link.sender.connection.send(kind, payload)
            except LinkError:
                break
        link.sender.connection.close()
        link.thread.join(10)
        assert not link.thread.is_alive()
        assert link.result or isinstance(link.errors[0], RgpuError)
    finally:
        link.close()


# -- broken links ----------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("mode", ["drop", "cut", "flip", "delay", "duplicate"])
def test_a_broken_link_is_a_clear_error_and_the_source_stays_whole(mode: str, lanes: int) -> None:
    proxies: list[Proxy] = []

    def relay(address: tuple[str, int]) -> tuple[str, int]:
        proxies.append(Proxy(address))
        return proxies[0].address

    source = filled()
    link = Link(source, PlainDevice(), lanes=lanes, relay=relay)
    before = {address: data.copy() for address, (_, data) in source.memory.items()}
    try:
        link.sender.begin("s", "m")
        link.sender.fault = lambda point: proxies[0].set(mode) if point == "page" and not proxies[0].hit.is_set() \
            else None
        if mode == "delay":  # late is not lost
            link.sender.round()
            equal(source, link.receiver.device, link.finish().pages)
            return
        with pytest.raises((LinkError, Corrupt)) as caught:
            link.sender.round()
            link.sender.round()  # what was broken behind the last page shows with the next message
        assert proxies[0].hit.is_set() and caught.value.message
        for address, data in before.items():
            assert np.array_equal(source.memory[address][1], data)
        link.thread.join(10)
        assert not link.result, "the destination took a broken stream for a whole one"
    finally:
        proxies[0].close()
        link.close()


def test_a_frozen_destination_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rgpu.migrate.transfer.sender.STALL", 0.5)
    source, destination = filled(), PlainDevice()
    link = Link(source, destination, lanes=2)
    try:
        link.sender.begin("s", "m")
        destination.gate.clear()
        began = time.monotonic()
        with pytest.raises(LinkError, match=r"took no page for|broke"):
            link.sender.round()
        assert time.monotonic() - began < 20
    finally:
        destination.gate.set()
        link.close()


def test_a_limit_on_the_first_connection_holds_for_all_lanes() -> None:
    """As in the last pause: the socket's time limit is the pause's."""
    source, destination = filled(), PlainDevice()
    link = Link(source, destination, lanes=2)
    try:
        link.sender.begin("s", "m")
        link.sender.connection.sock.settimeout(0.3)
        destination.gate.clear()
        with pytest.raises(LinkError):
            link.sender.round()
    finally:
        destination.gate.set()
        link.close()


@pytest.mark.parametrize("reply", [(CREDIT, page_lanes.credit(9)), (CREDIT, page_lanes.credit(0)), (CREDIT, b"x"),
                                   (LAYOUT, b"")])
def test_wrong_credits_are_refused(reply: tuple[int, bytes]) -> None:
    from tests.support.worker.pages_link import sealed
    near, far = sealed(*socket.socketpair())
    lane = page_lanes.SendLane(near, stall=5)
    lane.in_flight = 2
    far.send(*reply)
    with pytest.raises(LinkError):
        lane.settle()
    near.close()
    far.close()


def test_whether_compression_pays() -> None:
    from rgpu.checkpoint.codec.compression import Probe, decide
    assert not decide(None, 1e9).compress and not decide(Probe(0.5, 1e9), None).compress
    assert not decide(Probe(0.99, 1e12), 1e6).compress, "incompressible"
    assert decide(Probe(0.4, 1e9), 1e8).compress and "of the time of raw" in decide(Probe(0.4, 1e9), 1e8).reason
    assert not decide(Probe(0.4, 1e9), 3e9).compress, "the link is faster than the compressor"
    near = Probe(0.5, 1e9)
    assert not decide(near, 4.5e8).compress and decide(near, 4.5e8, compressing=True).compress, "it flickers"


class ReaderBehindAClose(Link):
    """The reader of each lane meets the descriptor that was closed under it, not the end of the stream."""

    def connect(self) -> tuple[Any, Any]:
        near, far = super().connect()
        receive = far.recv

        def recv(*args: Any, **options: Any) -> Any:
            try:
                return receive(*args, **options)
            except LinkError:
                raise LinkError("the connection broke: [Errno 9] Bad file descriptor") from None

        far.recv = recv  # type: ignore[method-assign]
        return near, far


def test_a_lane_that_the_destination_closes_is_no_failure() -> None:
    link = ReaderBehindAClose(filled(), PlainDevice(), lanes=2)
    link.sender.begin("s", "m")
    link.sender.round()
    link.receiver.close_lanes()
    for thread in link.lane_threads:
        thread.join(10)
    link.thread.join(1)  # it would have heard of it by now
    assert link.lane_threads and link.thread.is_alive() and not link.errors
    link.close()
