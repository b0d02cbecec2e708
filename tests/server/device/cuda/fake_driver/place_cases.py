"""What was begun last stands in the worker's page before it is applied: the engine stores it without Python."""

from __future__ import annotations

import struct
from pathlib import Path

from rgpu.server import position_page
from rgpu.server.device.cuda.device import CudaDevice
from rgpu.server.position_page import PositionPage
from tests.server.device.cuda.fake_driver.stream_cases import started
from tests.support.fake_driver.support import Journal


def test_the_page_of_a_worker(device: CudaDevice, journal: Journal, tmp_path: Path) -> None:
    runtime, feed = started(device, journal)
    path = tmp_path / "1.position"
    runtime.keep_place(PositionPage(path))
    feed(journal.write(struct.pack("<4I", 1, 2, 3, 4)) + journal.add_one() + journal.add_one())
    reached = position_page.read(path)
    assert reached is not None and (reached.applied, reached.begun) == (journal.seq, journal.seq)
    again = journal.add_one()
    runtime.place.applied(journal.seq - 3)  # what the message before this one left there
    feed(again[:-1])  # not whole: not begun
    assert position_page.read(path) == (journal.seq - 1, journal.seq - 1, 0)
    feed(again[-1:])
    assert position_page.read(path) == (journal.seq, journal.seq, 0)
