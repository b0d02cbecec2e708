"""Both ends of an answer ring."""

from __future__ import annotations

import mmap
import os

from rgpu.client.shim_link.answer_ring import AgentPage, AnswerRing
from tests.support.agent.fake_shim import FakeReader


class Ends:
    """Both ends of a ring of 4096 bytes."""

    def __init__(self, capacity: int = 4096) -> None:
        self.page = AgentPage(capacity)
        self.reader = FakeReader()
        self.ring = AnswerRing(self.page, os.dup(self.reader.fds[0]), os.dup(self.reader.doorbell))
        self.map = mmap.mmap(self.page.fd, 0, prot=mmap.PROT_READ)

    def read(self) -> list[tuple[int, bytes]]:
        return self.reader.read(self.map)
