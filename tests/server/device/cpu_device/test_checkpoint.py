"""A session of the cpu device becomes a checkpoint and comes back on a fresh device."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from rgpu.checkpoint.device import GRANULE
from rgpu.checkpoint.manifest import cut
from rgpu.checkpoint.pages.pages import PageTable, collect_dirty
from rgpu.checkpoint.session import restore
from rgpu.checkpoint.store.checkpoint_store import DirectoryStore, write_checkpoint
from rgpu.server.device.cpu import CpuDevice
from rgpu.session.addresses import PINNED_BASE
from rgpu.session.errors import RecoveryFailed
from tests.server.device.cpu_device.conftest import WAIT, Client
from tests.support.cpu import stub

Step = Callable[[CpuDevice], object]
KEY = bytes(range(32))
MODULE = stub.text("global counter 8 8 initial", "const table 70000 4")


def structural(base: int) -> list[Step]:
    """What a replay of live objects does, without the client's own objects."""
    return [
        lambda d: d.create_context(16, 0, True), lambda d: d.map(base, GRANULE),
        lambda d: d.allocate(base, 1 << 20), lambda d: d.load(17, stub.text(), b"", False),
        lambda d: d.load(18, MODULE, b"", False), lambda d: d.host_allocate(PINNED_BASE, 5000),
        lambda d: d.create_stream(20, 16, 1, 0), lambda d: d.create_event(30, 16, 0),
        lambda d: d.create_event(31, 16, 0)]


def fresh() -> CpuDevice:
    return CpuDevice(0, 64 << 20, 2, engine=stub)  # type: ignore[arg-type]


def started() -> Client:
    device = fresh()
    client = Client(device)
    for step in structural(client.base)[4:]:
        step(device)
    return client


def apply_to(device: CpuDevice) -> Callable[[Step], None]:
    return lambda step: step(device) and None  # type: ignore[func-returns-value]


def test_a_checkpoint_brings_everything_back(tmp_path: Path) -> None:
    client = started()
    device, base = client.device, client.base
    counter = device.regions()[-2].address
    assert device.regions()[-2].name == "counter"
    payload = os.urandom(300_000)
    client.write(base + 1000, payload)
    client.write(counter, struct.pack("<Q", 41))
    client.write(PINNED_BASE + 4990, b"end")
    device.record_event(next(client.seqs), 30, 20)
    assert device.drain(WAIT)
    state = cut.take(device, session="s", epoch=1, position=9, hash_key=KEY, live=None)
    store = DirectoryStore(tmp_path / "store")
    write_checkpoint(store, "i", device, state)
    times = device.event_states()
    device.close()

    other = fresh()
    try:
        with store.open("i") as checkpoint:
            restore.restore(other, checkpoint.state, structural(base), apply_to(other), checkpoint.pages())
        assert other.read(base + 1000, len(payload)) == payload
        assert other.read(counter, 8) == struct.pack("<Q", 41)
        assert other.read(PINNED_BASE + 4990, 3) == b"end"
        assert other.event_states() == times and times[30] is not None and times[31] is None
        assert abs(other.clock() - state.clock) < 10e9
        again = cut.take(other, session="s", epoch=1, position=9, hash_key=KEY, live=None)
        assert again.regions == state.regions
    finally:
        other.close()


def test_a_history_with_another_module_moves_globals_and_is_refused() -> None:
    client = started()
    assert client.device.drain(WAIT)
    state = cut.take(client.device, session="s", epoch=1, position=9, hash_key=KEY, live=None)
    client.device.close()
    other = fresh()
    try:
        steps = structural(client.base)
        steps.insert(4, lambda d: d.load(40, stub.text("global intruder 4 4"), b"", False))
        steps.insert(5, lambda d: d.unload(40))
        with pytest.raises(RecoveryFailed, match="'counter' of module 18 is at 0x"):
            restore.rebuild(other, state, steps, apply_to(other))
    finally:
        other.close()


def test_pages_collected_while_running_converge_when_drained() -> None:
    client = started()
    device, base = client.device, client.base
    try:
        table = PageTable(KEY)
        pages: dict[int, bytes | None] = {}
        device.create_stream(21, 16, 1, 0)
        for round_number in range(5):
            for i in range(40):
                client.write(base + 65536 * (i % 7), os.urandom(64), 21)
            pages |= {page.address: page.data for page in collect_dirty(device, table)}
            if round_number == 4:
                assert device.drain(WAIT)
                pages |= {page.address: page.data for page in collect_dirty(device, table)}
        for address in range(base, base + 7 * 65536, 65536):
            assert pages[address] == device.read(address, 65536)
        assert list(collect_dirty(device, table)) == []
    finally:
        device.close()
