"""Payloads in pinned frames: what a copy still reads is not written over by the next message."""

from __future__ import annotations

import random
import struct
from typing import Any

from rgpu.server.device.cuda.engine import RING
from rgpu.server.worker.apply.runtime import SessionRuntime
from tests.support.fake_driver.support import BASE, WAIT_FLAG, Journal, collect


def test_a_piece_of_a_frame_that_finds_no_slot_holds_its_frame(device: Any, journal: Journal) -> None:
    """Every slot is stuck behind a kernel that waits for a later call: the piece goes to the copy where it stands."""
    runtime = SessionRuntime("s", 1, device)
    runtime.attach(lambda *answer: None, 0)
    feed = runtime.open_stream()
    feed(journal.opened() + journal.write(bytes(64)))
    assert device.drain(10)
    feed(journal.launch(WAIT_FLAG, struct.pack("<Q", BASE)))
    slots = random.Random(1).randbytes(RING // 4)  # all slots of 1 MiB, a quarter of the ring
    feed(journal.write(slots, BASE + 64))
    payload = random.Random(2).randbytes(2 << 20)
    record = journal.write(payload, BASE + 4096)
    begin = len(record) - len(payload) + 100
    fast = device.fast_path
    frame = fast.room(begin)
    assert frame is not None
    frame[:] = record[:begin]
    feed(frame)  # after a second its 100 bytes of the payload are given to the copy as they stand
    fast.give(frame)
    taken = []
    while (other := fast.room(begin)) is not None:  # the next messages; the one that is read is not among them
        other[:] = b"\xee" * begin
        taken.append(other)
    for other in taken:
        fast.give(other)
    device.write(BASE, b"\1\0\0\0")
    feed(record[begin:] + journal.read(len(payload), BASE + 4096))
    assert collect(runtime, {journal.seq})[journal.seq] == (0, payload)
    assert device.drain(10) and fast.room(begin) is not None
