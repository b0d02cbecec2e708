"""Bodies of the page stream between two workers, in a move by copy and in one by replay."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np

from rgpu.checkpoint.device import PAGE, Region
from rgpu.link.data.frames import SealedConnection
from rgpu.link.messages import pages as to_pages
from rgpu.migrate.transfer import peer_plan as plan
from rgpu.migrate.transfer import replay_link as replay
from rgpu.migrate.transfer.receiver import PageReceiver
from rgpu.server.worker.apply.journal_tap import JournalTap
from rgpu.server.worker.move.catching_up import CatchUp
from rgpu.session.errors import LinkError, RgpuError
from tests.link.protocols.recording.book import Book, pair
from tests.support.worker.pages_device import PlainDevice
from tests.support.worker.pages_link import Link, state
from tests.support.worker.pages_peer import SharingDevice

BASE = 0x100000000000


@contextmanager
def _tapped(book: Book) -> Iterator[None]:
    """Every message on a sealed connection is noted."""
    send, whole = SealedConnection.send, SealedConnection.send_whole

    def note(kind: int, body: bytes) -> None:
        book.note(kind, body, kind not in (34, 36, 39, 40, 44, 46, 49, 50, 60))

    def one(self: SealedConnection, kind: int, *parts: Any) -> None:
        note(kind, b"".join(bytes(part) for part in parts))
        send(self, kind, *parts)

    def several(self: SealedConnection, *messages: Any) -> None:
        for message in messages:
            note(message[0], bytes(message[1:]))
        whole(self, *messages)

    with mock.patch.object(SealedConnection, "send", one), mock.patch.object(SealedConnection, "send_whole", several):
        yield


def _device(kind: type[PlainDevice]) -> Any:
    device = kind()
    random = np.random.default_rng(7)
    device.add(Region(BASE, 4 * PAGE, "mapped"), random.integers(0, 256, 4 * PAGE, np.uint8))
    device.add(Region(BASE + (1 << 40), 100, "global", 3), random.integers(0, 256, 100, np.uint8))
    return device


class _PeerLink(Link):
    def __init__(self, *devices: Any, folder: Path) -> None:
        self.folder = folder
        super().__init__(*devices)

    def receiver_of(self, connection: Any, device: Any) -> PageReceiver:
        receiver = PageReceiver(connection, device, self.folder)
        receiver.make = lambda data: None
        return receiver


def pages() -> dict[str, list[str]]:
    """A move's page stream: over two connections, then with pages pulled, then what fails."""
    book = Book()
    with _tapped(book), tempfile.TemporaryDirectory() as folder:
        link = Link(_device(PlainDevice), PlainDevice(), lanes=2)
        link.sender.begin("s", "m")
        link.sender.round()
        link.finish()
        link.close()
        peer = _PeerLink(_device(SharingDevice), SharingDevice(), folder=Path(folder))
        peer.sender.begin("s", "m")
        peer.sender.round()
        peer.sender.send_objects(b"objects")
        peer.finish()
        peer.close()
        peer.receiver.peer.close()
        broken = Link(_device(PlainDevice), PlainDevice())
        try:
            broken.sender.connection.send(99, msgspec.msgpack.encode({}))
            broken.sender._expect(0)
        except (RgpuError, LinkError):
            pass
        broken.close()
    return book.told()


def replayed() -> dict[str, list[str]]:
    """Bodies of the second half of a move by replay; :mod:`rgpu.migrate.transfer.replay_link` makes all of them."""
    book = Book()
    near, far = pair(purpose="pages")
    tap = JournalTap()
    tap.stream_begins()
    tap.add(b"records")
    with _tapped(book):
        CatchUp(near, tap, lambda *args, **more: None)._ask(tap.take(1.0))
    near.close()
    far.close()
    book.note(to_pages.REPLAY, msgspec.msgpack.encode({"position": 900}))  # as departure.py and arrival.py do
    book.note(to_pages.WANT, msgspec.msgpack.encode(sorted({BASE: [1, 3]}.items())))
    book.note(to_pages.PING, replay.ping(3))
    book.note(to_pages.PONG, replay.pong(3, 900))
    book.note(to_pages.PROBED, replay.probed(4, 512, 2))
    entries = np.zeros(2, to_pages.PROBE_ENTRY_LAYOUT)
    entries["address"], entries["size"], entries["hash"] = [BASE, BASE + PAGE], [PAGE, 100], [[1, 2], [3, 4]]
    book.note(to_pages.PROBE, replay.probe(4, 900, entries))
    for last, data in replay.pieces(state()):
        book.note(to_pages.LAST, last + bytes(data[:0]))
    runs = np.array([(BASE, PAGE), (BASE + 4 * PAGE, 2 * PAGE)], to_pages.RUN_LAYOUT)
    book.note(to_pages.PULL, plan.pull(runs, True))
    for piece in plan.hashes(np.array([[1, 2], [3, 4]], np.uint64)):
        book.note(to_pages.HASHES, piece)
    rows = {(BASE, 4 * PAGE): (np.array([1, 3]), np.array([[1, 2], [3, 4]], np.uint64))}
    book.note(to_pages.GRANTED, plan.encode(to_pages.Granted("no", 1.5)))
    book.note(to_pages.PULLED, plan.encode(to_pages.Pulled("no", 1.5, 2.5)))
    book.note(to_pages.GRANT, plan.encode(to_pages.Grant([(BASE, PAGE, 1)])))
    book.note(35, msgspec.msgpack.encode({"round": 2, "known": plan.known(rows)}))
    return book.told()
