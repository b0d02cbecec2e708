"""A session whose checkpoints are taken while it runs on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rgpu.checkpoint.device import GRANULE
from rgpu.checkpoint.manifest import cut
from rgpu.checkpoint.manifest.state import SessionState
from rgpu.checkpoint.pages.frozen import MomentView
from rgpu.checkpoint.session.checkpointing import Checkpointing
from rgpu.checkpoint.store.checkpoint_store import CheckpointStore
from rgpu.checkpoint.store.pace import Pace
from tests.support.checkpoint.fake_device import FakeDevice
from tests.support.checkpoint.samples import KEY
from tests.support.checkpoint.store_helpers import BASE, PAGE, copy_of, many_pages

PINNED = 0x1800_0000_0000


class Session:
    """A device whose every byte changes whenever it does not stand still."""

    def __init__(self, room: int, pages: int = 40) -> None:
        self.device = many_pages(pages)
        self.device.add(BASE + GRANULE * 16, 3 * PAGE)  # zeros
        self.device.add(BASE + GRANULE * 32, 2 * PAGE + 100, data=random.Random(9).randbytes(2 * PAGE + 100))
        self.device.add(BASE + GRANULE * 64, 70_000, kind="global", owner=3, name="g",
                        data=random.Random(4).randbytes(70_000))
        self.device.add(PINNED, 3 * PAGE, kind="pinned", data=b"mirror" * 9)
        self.device.room = room * PAGE
        self.moment: FakeDevice | None = None  #: what it held in the pause
        self.position = 0

    def churn(self) -> None:
        for _, data in self.device.memory.values():
            data[:] = bytes(byte ^ 0x5A for byte in data[:64]) + b"\xa5" * (len(data) - 64)

    @contextmanager
    def stand_still(self) -> Iterator[None]:
        self.position += 1
        self.moment = copy_of(self.device)
        yield
        assert self.moment.memory == self.device.memory
        self.churn()

    def take(self, view: MomentView) -> SessionState:
        return cut.take(view, session="demo/1", epoch=1, position=self.position, hash_key=KEY,  # type: ignore[arg-type]
                        live={})

    def checkpoint(self, store: CheckpointStore, name: str, base: str | None = None, *, pace: Pace | None = None,
              staging: int = 1 << 20, **wanted: Any) -> tuple[Checkpointing, dict[str, Any]]:
        checkpointing = Checkpointing(self.device, KEY, reserve=0, **wanted)  # type: ignore[arg-type]
        with store.writer(name, base, staging=staging, pace=pace) as writer:
            _, counts = checkpointing.run(writer, self.stand_still, self.take)
        return checkpointing, counts
