"""Answers through a ring that a test fills."""

from __future__ import annotations

import struct
from typing import Any

from tests.support.shim.fake_agent import FakeAgent


def answer(seq: int, payload: bytes = b"", reply: bytes = b"") -> bytes:
    return struct.pack("<QiII", seq, 0, 0, len(reply)) + reply + payload


def waiting(agent: FakeAgent, program: Any, spin: str, size: int = 8) -> Any:
    """A program that waits for a copy of ``size`` bytes, tells result and bytes, and asks once more, in vain.

    It asks for another copy, not for the end of the device's work: the shim itself knows that after the first one.
    """
    run = program(agent, f"""
        context()
        a = alloc(1 << 20)
        tell("ready"); hear()
        out = c.create_string_buffer({size})
        tell(cu.cuMemcpyDtoH_v2(out, U64(a), SIZE({size})))
        tell(out.raw.hex())
        tell(cu.cuMemcpyDtoH_v2(out, U64(a), SIZE({size})))
        """, RGPU_SPIN_US=spin)
    run.hear()
    agent.silent = True
    run.tell()
    agent.wait_for("memcpy_d2h")
    return run


def seq_of(agent: FakeAgent) -> int:
    return next(record.seq for record in reversed(agent.records) if record.flags & 2)
