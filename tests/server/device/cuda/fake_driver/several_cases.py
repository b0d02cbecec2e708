"""Two GPUs in one session: each call goes to its own context, waits are of one GPU, module binaries are of both.

The fake driver refuses what is given in another context than the stream's.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rgpu.checkpoint.codec.frames import PITCH
from rgpu.checkpoint.device import GRANULE, PAGE, Region
from rgpu.checkpoint.manifest import cut
from rgpu.checkpoint.pages.pagehash import Ranges, hash_page, hash_pages
from rgpu.server.device.cuda.device import CudaDevice
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.session.addresses import PINNED_FIRST, device_base
from rgpu.session.errors import DeviceError
from rgpu.session.facts import PEER_ATOMICS, PEERS
from rgpu.session.objects.graphs import KernelNode
from tests.support.eventually import eventually
from tests.support.fake_driver.support import Journal, collect, driver

KEY = bytes(range(32))
BASES = [device_base(0), device_base(1)]
CONTEXTS, MODULES, STREAMS, EVENTS = (16, 30), (17, 31), (18, 32), (20, 34)
START = PITCH - PAGE
BINARY = b"add_one 12\nwait_flag 8\n"  #: no variables: the fake driver's do not land alike
ADD_ONE, WAIT_FLAG = range(2)


@pytest.fixture
def two() -> Iterator[CudaDevice]:
    driver().fake_reset()
    device = CudaDevice([0, 1])
    yield device
    device.close()
    driver().fake_reset()


def opened(journal: Journal) -> bytes:
    """A context, 4 MiB, a module, a blocking stream and an event on each."""
    made = [journal("session_open", version=1, pid=1, environment=b"")]
    for n in range(2):
        made += [
            journal("context_create", context=CONTEXTS[n], device=n, flags=0, primary=1),
            journal("memory_map", address=BASES[n], size=2 * GRANULE, device=n),
            journal("memory_allocate", address=BASES[n], size=2 * GRANULE),
            journal("module_load", BINARY, module=MODULES[n], context=CONTEXTS[n], library=0, options=b""),
            journal("stream_create", stream=STREAMS[n], context=CONTEXTS[n], flags=0, priority=0),
            journal("event_create", event=EVENTS[n], context=CONTEXTS[n], flags=0)]
    return b"".join(made)


def started(device: Any, journal: Journal) -> tuple[SessionRuntime, Any]:
    runtime = SessionRuntime("s", 1, device)
    runtime.attach(lambda *answer: None, 0)
    feed = runtime.open_stream()
    feed(opened(journal))
    return runtime, feed


def launch(journal: Journal, n: int, function: int, at: int, count: int = 4, stream: int | None = None) -> bytes:
    return journal.launch(function, struct.pack("<QI", at, count), STREAMS[n] if stream is None else stream,
                          module=MODULES[n])


def test_what_they_are(two: CudaDevice) -> None:
    assert [facts.uuid[0] for facts in two.every_facts] == [7, 8] and two.facts == two.every_facts[0]
    assert [facts.attributes[PEERS] for facts in two.every_facts] == [2, 1]
    assert [facts.attributes[PEER_ATOMICS] for facts in two.every_facts] == [2, 1]
    with pytest.raises(DeviceError, match="2 GPUs"):
        two.create_context(99, 0, True, 2)


def test_each_call_goes_to_its_gpu(two: CudaDevice, journal: Journal) -> None:
    """Launches, copies and legacy streams of both, turn about; each reads what the other wrote."""
    runtime, feed = started(two, journal)
    for n in range(2):
        feed(journal.write(struct.pack("<4I", 1, 2, 3, 4), BASES[n], STREAMS[n]))
        feed(journal.write(bytes(16), BASES[n] + PAGE, n))
    for _ in range(50):
        for n in range(2):  # the fake driver's legacy streams are ordered with no other
            feed(launch(journal, n, ADD_ONE, BASES[n]) + launch(journal, n, ADD_ONE, BASES[n] + PAGE, stream=n))
    for n in range(2):
        feed(journal("context_synchronize", context=CONTEXTS[n]))
    collect(runtime, {journal.seq - 1, journal.seq})  # streams of two GPUs: what comes next is not in order without
    feed(journal("memcpy_d2d", destination=BASES[1] + 64, source=BASES[0], size=16, stream=STREAMS[1])
         + journal.read(80, BASES[1], STREAMS[1]) + journal.read(16, BASES[0] + PAGE, 0)
         + journal.read(16, BASES[1] + PAGE, 1))
    found = collect(runtime, {journal.seq - 2, journal.seq - 1, journal.seq})
    words = struct.pack("<4I", 51, 52, 53, 54)
    assert found[journal.seq - 2][1][:16] == words and found[journal.seq - 2][1][64:] == words
    assert found[journal.seq] == found[journal.seq - 1] == (0, struct.pack("<4I", *[50] * 4))
    assert runtime.executor.bugs == 0 and not two.error


def test_a_wait_is_of_one_gpu(two: CudaDevice, journal: Journal) -> None:
    """GPU 0 stands still; waiting for GPU 1, its legacy stream and a free there do not wait for it."""
    runtime, feed = started(two, journal)
    flag, word = BASES[0] + GRANULE, BASES[1] + 256
    feed(journal.write(bytes(4), flag, STREAMS[0]) + journal("stream_synchronize", stream=STREAMS[0]))
    collect(runtime, {journal.seq})
    feed(launch(journal, 0, WAIT_FLAG, flag))
    stuck = journal.seq
    try:
        goes_on(two, journal, runtime, feed, word)
        assert not two.is_complete(stuck)
        feed(journal("context_synchronize", context=CONTEXTS[0]))
        assert not two.is_complete(journal.seq)
    finally:
        two.write(flag, b"\1\0\0\0")
    assert collect(runtime, {journal.seq})[journal.seq][0] == 0 and two.is_complete(stuck)


def goes_on(two: CudaDevice, journal: Journal, runtime: SessionRuntime, feed: Any, word: int) -> None:
    freed: list[tuple[int, int]] = []  # answers of what Python applies
    runtime.attach(lambda seq, result, *rest: freed.append((seq, result)), 0)
    feed(launch(journal, 1, ADD_ONE, word) + journal("context_synchronize", context=CONTEXTS[1])
         + journal("stream_synchronize", stream=1) + journal("memory_free_wait", address=BASES[1]))
    found = collect(runtime, {journal.seq - 2, journal.seq - 1}, 5)
    assert all(result == 0 for result, _ in found.values()), found
    assert two.wait_complete(journal.seq, 5)
    eventually(lambda: (journal.seq, 0) in freed, "the free has no answer", 5)


def test_events_order_streams_of_both(two: CudaDevice, journal: Journal) -> None:
    runtime, feed = started(two, journal)
    flag = BASES[0] + GRANULE
    feed(journal.write(bytes(4), flag, STREAMS[0]) + journal.write(bytes(16), BASES[1], STREAMS[1])
         + journal("context_synchronize", context=CONTEXTS[0]) + journal("context_synchronize", context=CONTEXTS[1]))
    collect(runtime, {journal.seq - 1, journal.seq})
    feed(journal("event_record", event=EVENTS[1], stream=STREAMS[1], flags=0) + launch(journal, 0, WAIT_FLAG, flag)
         + journal("event_record", event=EVENTS[0], stream=STREAMS[0], flags=0)
         + journal("stream_wait_event", stream=STREAMS[1], event=EVENTS[0], flags=0)
         + launch(journal, 1, ADD_ONE, BASES[1]))
    behind = journal.seq
    assert not two.wait_complete(behind, 0.05)
    two.write(flag, b"\1\0\0\0")
    assert two.wait_complete(behind, 5)
    assert two.drain(5) and two.elapsed(EVENTS[1], EVENTS[0]) > 0  # two clocks' references, one session clock


def test_graphs_of_both(two: CudaDevice, journal: Journal) -> None:
    runtime, feed = started(two, journal)
    assert two.drain(5)
    for n in range(2):
        node = KernelNode(MODULES[n], ADD_ONE, (1, 1, 1), (1, 1, 1), shared=0, cooperative=False,
                          parameters=struct.pack("<QI", BASES[n], 2), attributes=b"")
        two.write(BASES[n], bytes(8))
        two.instantiate_graph(50 + n, CONTEXTS[n], 0, [node])
    for turn in range(3):
        for n in range(2):
            two.launch_graph(1000 + 2 * turn + n, 50 + n, STREAMS[n])
    assert two.drain(5) and not two.error
    assert [struct.unpack("<2I", two.read(base, 8)) for base in BASES] == [(3, 3), (3, 3)]
    two.destroy_context(CONTEXTS[1])
    with pytest.raises(DeviceError):
        two.launch_graph(2000, 51, STREAMS[1])


def test_host_functions_and_pinned_memory(two: CudaDevice, journal: Journal) -> None:
    runtime, feed = started(two, journal)
    two.host_allocate(PINNED_FIRST, PAGE)
    assert two.drain(5)
    reached = threading.Event()
    two.host_function(500, STREAMS[1], lambda result, data: reached.set())
    two.mirror_write(501, STREAMS[1], PINNED_FIRST, b"\5\0\0\0")
    assert reached.wait(5) and not two.is_complete(501)
    two.host_function_done(500)
    assert two.drain(5) and two.read(PINNED_FIRST, 4) == b"\5\0\0\0"
    two.launch(502, _launch(0, PINNED_FIRST))
    two.launch(503, _launch(1, PINNED_FIRST))
    assert two.drain(5) and two.read(PINNED_FIRST, 4) == b"\7\0\0\0"


def _launch(n: int, at: int) -> Any:
    from rgpu.checkpoint.device import Launch

    return Launch(MODULES[n], ADD_ONE, (1, 1, 1), (1, 1, 1), 0, STREAMS[n], struct.pack("<QI", at, 1))


def filled(device: CudaDevice, base: int) -> np.ndarray:
    data = np.random.default_rng(base >> 40).integers(0, 256, 2 * GRANULE, np.uint8)
    device.write(base, data)
    return data.reshape(-1, PAGE)


def test_pages_of_both_in_one_binary(two: CudaDevice, journal: Journal) -> None:
    """Hashes, copies aside, frames and writes: by the first, for both; zeros of both come before."""
    started(two, journal)
    assert two.drain(5)
    pages = [filled(two, base) for base in BASES]
    regions = [region for region in two.regions() if region.kind == "mapped"]
    assert regions == [Region(base, 2 * GRANULE, "mapped") for base in BASES]
    for found, expected in zip(two.hash_regions(regions, KEY), pages, strict=True):
        assert np.array_equal(found.hashes, hash_pages(expected, KEY))
    place = two.stage(4 * PAGE)
    ranges: Ranges = [(base + 3 * PAGE, 2 * PAGE) for base in BASES]
    two.copy_and_hash(ranges, place, KEY)
    assert two.read_staged(place, 4 * PAGE) == b"".join(each[3:5].tobytes() for each in pages)
    frame = two.frames().take()
    assert frame is not None
    frame.gather([(base, 40 * PAGE) for base in BASES], KEY)
    frame.settle()
    assert all(np.array_equal(frame.rows[40 * n:40 * n + 40, START:], pages[n][:40]) for n in range(2))
    frame.deliver([(0, BASES[1] + GRANULE, 20), (40, BASES[0] + GRANULE, 20)])
    frame.settle()
    assert two.read(BASES[1] + GRANULE, 20 * PAGE) == pages[0][:20].tobytes()
    assert two.read(BASES[0] + GRANULE, 20 * PAGE) == pages[1][:20].tobytes()
    two.frames().give(frame)
    two.write_pages([(BASES[1], PAGE, pages[0][0].tobytes()), (BASES[0], PAGE, None)])
    assert two.read(BASES[1], PAGE) == pages[0][0].tobytes() and two.read(BASES[0], PAGE) == bytes(PAGE)


def test_variables_of_modules(two: CudaDevice, journal: Journal) -> None:
    """No GPU reaches those of another: each hashes its own, and they are read and written there."""
    binary = b".global .b8 first[70000];\n.global .b8 second[12];\nadd_one 12\n"
    for n in range(2):
        two.create_context(CONTEXTS[n], 0, True, n)
        two.load(MODULES[n], binary, b"", False, n)
        two.map(BASES[n], GRANULE)
    found = {(region.owner, region.name): region for region in two.regions() if region.kind == "global"}
    assert len(found) == 4
    for (owner, _), region in found.items():
        two.write(region.address, bytes([owner]) * region.size)
        assert two.read(region.address, 4) == bytes([owner]) * 4
    regions = [*found.values(), Region(BASES[1], PAGE, "mapped"), Region(BASES[0], PAGE, "mapped")]
    hashes = two.hash_regions(regions, KEY)
    assert two.drain(5) and not two.error
    for region, pages in zip(regions, hashes, strict=True):
        whole = bytes([region.owner]) * region.size
        assert pages.hashes.tolist() == [list(hash_page(whole[at:at + PAGE], KEY)) for at in range(0, len(whole), PAGE)]
        assert (pages.zero == (region.kind == "mapped")).all()
    place = two.stage(8 * PAGE)
    together = two.copy_and_hash([(region.address, region.size) for region in regions], place, KEY)
    assert np.array_equal(together.hashes, np.concatenate([pages.hashes for pages in hashes])) and not two.error
    staged = two.read_staged(place, 8 * PAGE)
    copied = b"".join(two.read(region.address, region.size).ljust(-(-region.size // PAGE) * PAGE, b"\0")
                      for region in regions)
    assert staged == copied
    two.unload(MODULES[1])
    regions = [region for region in two.regions() if region.kind == "global"]
    assert {region.owner for region in regions} == {MODULES[0]}
    two.hash_regions(regions, KEY)
    assert not two.error


def test_rebuilt_elsewhere(journal: Journal) -> None:
    """The state of a session with both, and its pages: another worker goes on from there."""
    two = CudaDevice([0, 1])
    runtime, feed = started(two, journal)
    for n in range(2):
        feed(journal.write(struct.pack("<4I", n, n, n, n), BASES[n], STREAMS[n]))
        feed(launch(journal, n, ADD_ONE, BASES[n]))
    runtime.quiesce(5)
    state = cut.take(two, session="s", epoch=1, position=runtime.applied, live=runtime.objects(),
                     answers=runtime.answers(), hash_key=runtime.hash_key, printed=runtime.text.state())
    pages = [(region.address, index, two.read(region.address + index * PAGE, PAGE)) for region in two.regions()
             for index in range(region.size // PAGE)]
    runtime.stop()
    two.close()
    other = CudaDevice([0, 1])
    try:
        after = SessionRuntime("s", 2, other)
        after.restore(state, iter(pages))
        after.attach(lambda *answer: None, 0)
        feed = after.open_stream()
        for n in range(2):
            feed(launch(journal, n, ADD_ONE, BASES[n]) + journal.read(16, BASES[n], STREAMS[n]))
            assert collect(after, {journal.seq})[journal.seq] == (0, struct.pack("<4I", *[n + 2] * 4))
            feed(journal("context_synchronize", context=CONTEXTS[n]))
            assert collect(after, {journal.seq})[journal.seq][0] == 0
        assert after.executor.bugs == 0
    finally:
        other.close()
