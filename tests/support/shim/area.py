"""The area beside an answer ring, filled by a test."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct

from tests.support.eventually import eventually
from tests.support.shim.fake_agent import FakeAgent

AREA, ANSWER_AT = 41, 40
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Area:
    def __init__(self, agent: FakeAgent, number: int, size: int, seals: int = SEALS, said: int = 0) -> None:
        self.number, self.size = number, size
        fd = os.memfd_create("area", os.MFD_ALLOW_SEALING)
        os.posix_fallocate(fd, 0, size)
        self.bytes = mmap.mmap(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        agent._send(agent.sockets[0], AREA, struct.pack("<IIQ", number, 0, said or size), fd)
        os.close(fd)

    def wait_mapped(self, agent: FakeAgent) -> None:
        eventually(lambda: self.number in agent.areas, "the shim did not map its area", 10)
