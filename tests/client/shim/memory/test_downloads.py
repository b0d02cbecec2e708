"""Copies to pinned memory are awaited by no thread; their bytes are there before the program learns of their end."""

from __future__ import annotations

import struct
import threading
from typing import Any

import pytest

from tests.support.shim.answers import answer
from tests.support.shim.fake_agent import FakeAgent
from tests.support.shim.fake_ring import ANSWER

PINNED = """
        import time
        def pinned(size):
            p = P()
            ok(cu.cuMemHostAlloc(c.byref(p), SIZE(size), 2))
            return p.value
        def download(to, source, size, stream):
            ok(cu.cuMemcpyDtoHAsync_v2(P(to), U64(source), SIZE(size), P(stream)))
        context()
        p, a, s = pinned(4096), alloc(4096), stream()
        h2d(a, bytes(range(256)) * 16, s)
        c.memset(p, 99, 4096)
"""
RIGHT = bytes(range(256)) * 16


def released(agent: FakeAgent, call: str = "memcpy_d2h") -> None:
    """Let the answers go, a while after the copy was published."""
    agent.wait_for(call)
    threading.Timer(0.3, agent.let_go).start()


#: how a program learns that the copy is complete, or uses what it brought
USES = {
    "stream": "ok(cu.cuStreamSynchronize(P(s)))",
    "context": "ok(cu.cuCtxSynchronize())",
    "event": "e = event(); ok(cu.cuEventRecord(P(e), P(s))); ok(cu.cuEventSynchronize(P(e)))",
    "query": """
        while (r := cu.cuStreamQuery(P(s))) == 600:
            time.sleep(0.001)
        ok(r)""",
    "event query": """
        e = event(); ok(cu.cuEventRecord(P(e), P(s)))
        while (r := cu.cuEventQuery(P(e))) == 600:
            time.sleep(0.001)
        ok(r)""",
    "another stream": """
        e, other, f = event(), stream(), kernel()
        ok(cu.cuEventRecord(P(e), P(s)))
        ok(cu.cuStreamWaitEvent(P(other), P(e), 0))
        ok(launch(f, alloc(16), 1, other))
        ok(cu.cuStreamSynchronize(P(other)))""",
    "the legacy stream": """
        s2 = stream(0)
        download(p, a, 4096, s2)
        ok(cu.cuMemsetD8Async(U64(a), 1, SIZE(16), None))
        ok(cu.cuStreamSynchronize(None))""",
    "freed memory": "ok(free(alloc(64)))",
    "a destroyed stream": "ok(cu.cuStreamDestroy_v2(P(s)))",
    "a copy over it": "ok(cu.cuMemcpyDtoH_v2(P(p + 4000), U64(a + 4000), SIZE(16)))",
    "a copy on the host": "q = pinned(4096); ok(cu.cuMemcpyAsync(U64(q), U64(p), SIZE(4096), P(s))); "
                          "ok(cu.cuStreamSynchronize(P(s))); p = q",
    "a copy of it": "b = alloc(4096); ok(cu.cuMemcpyHtoDAsync_v2(U64(b), P(p), SIZE(4096), P(s))); "
                    "c.memmove(p, d2h(b, 4096), 4096)",
}


#: queries know by the watermark alone
QUIET = [use for use in USES if "query" not in use]


@pytest.mark.parametrize("use, quiet", [(use, False) for use in USES] + [(use, True) for use in QUIET],
                         ids=[*USES, *(f"{use}, no watermark" for use in QUIET)])
def test_the_bytes_are_there_before_the_program_learns_of_it(agent: FakeAgent, program: Any, use: str,
                                                             quiet: bool) -> None:
    agent.kept, agent.quiet = {"memcpy_d2h"}, quiet
    run = program(agent, PINNED + f"""
        download(p, a, 4096, s)
        tell(c.string_at(p, 4096).hex())
        {USES[use].strip()}
        tell(c.string_at(p, 4096).hex())
        """)
    assert run.hear() == (b"c" * 4096).hex(), "the program goes on while the copy is under way"
    released(agent)
    assert run.hear() == RIGHT.hex()
    run.end()
    first = agent.seqs("memcpy_d2h")[0]
    assert [args.observed for args in agent.args("completed")].count(first) == 1


def test_a_wait_for_the_stream_asks_nothing_more_than_the_copy(agent: FakeAgent, program: Any) -> None:
    """As many messages as an awaited copy: two for what ``.item()`` does."""
    agent.quiet = True
    program(agent, PINNED + """
        for _ in range(10):
            download(p, a, 8, s)
            ok(cu.cuStreamSynchronize(P(s)))
            assert c.string_at(p, 8) == bytes(range(8))
        """).end()
    names = agent.names()
    assert "stream_synchronize" not in names
    assert (names.count("memcpy_d2h"), names.count("completed")) == (10, 10)


def test_a_kernel_that_is_given_the_memory_reads_what_came(agent: FakeAgent, program: Any) -> None:
    agent.kept = {"memcpy_d2h"}
    run = program(agent, PINNED + """
        f = kernel()
        download(p, a, 4096, s)
        tell(1)
        ok(launch(f, p, 1, s))
        ok(cu.cuStreamSynchronize(P(s)))
        tell(list(c.string_at(p, 18)))
        """)
    run.hear()
    released(agent)
    assert run.hear() == [*range(1, 17), 16, 17]
    run.end()


def test_a_host_function_behind_it_sees_the_bytes(agent: FakeAgent, program: Any) -> None:
    agent.kept = {"memcpy_d2h"}
    run = program(agent, PINNED + """
        seen = []
        function = c.CFUNCTYPE(None, P)(lambda _: seen.append(c.string_at(p, 4096).hex()))
        download(p, a, 4096, s)
        ok(cu.cuLaunchHostFunc(P(s), function, None))
        tell(1)
        while not seen:
            time.sleep(0.01)
        tell(seen)
        """)
    run.hear()
    released(agent)
    assert run.hear() == [RIGHT.hex()]
    run.end()


def test_freed_pinned_memory_is_written_no_more(agent: FakeAgent, program: Any) -> None:
    agent.kept = {"memcpy_d2h"}
    run = program(agent, PINNED + """
        download(p, a, 4096, s)
        tell(1)
        ok(cu.cuMemFreeHost(P(p)))
        tell(2)
        """)
    run.hear()
    released(agent)
    assert run.hear() == 2
    run.end()


def test_many_are_bounded_and_all_come(agent: FakeAgent, program: Any) -> None:
    """More than may be open at a time, of memory and of number: the oldest are waited for."""
    agent.quiet = True
    program(agent, PINNED + """
        big, source = pinned(100 << 20), alloc(1 << 20)
        h2d(source, bytes(range(256)) * 4096, s)
        for i in range(100):
            download(big + (i << 20), source, 1 << 20, s)
        small = pinned(4096)
        for i in range(256):
            download(small + 16 * i, a + i, 8, s)
        ok(cu.cuCtxSynchronize())
        whole = bytes(range(256)) * 4096
        assert all(c.string_at(big + (i << 20), 1 << 20) == whole for i in range(100))
        assert all(c.string_at(small + 16 * i, 8) == (bytes(range(256)) * 2)[i:i + 8] for i in range(256))
        """).end(120)
    copies = agent.seqs("memcpy_d2h")
    assert len(copies) == 356
    assert sorted(args.observed for args in agent.args("completed") if args.observed in copies) == copies


def test_threads_that_learn_of_it_at_once(agent: FakeAgent, program: Any) -> None:
    """None returns before the bytes are there."""
    agent.kept = {"memcpy_d2h"}
    run = program(agent, PINNED + """
        import threading
        here = P(); ok(cu.cuCtxGetCurrent(c.byref(here)))
        seen = []
        def learn():
            ok(cu.cuCtxSetCurrent(here))
            ok(cu.cuStreamSynchronize(P(s)))
            seen.append(c.string_at(p, 4096).hex())
        download(p, a, 4096, s)
        threads = [threading.Thread(target=learn) for _ in range(6)]
        [t.start() for t in threads]
        tell(1)
        [t.join() for t in threads]
        tell(seen)
        """)
    run.hear()
    released(agent)
    assert run.hear() == [RIGHT.hex()] * 6
    run.end()
    assert agent.seqs("memcpy_d2h")[0] in [args.observed for args in agent.args("completed")]


@pytest.mark.parametrize("result, length, seen", [(2, 0, 2), (700, 0, 700), (0, 100, 999)],
                         ids=["no memory", "a fault", "too short"])
def test_an_error_of_a_copy_is_told_by_what_comes_next(agent: FakeAgent, program: Any, result: int, length: int,
                                                       seen: int) -> None:
    run = program(agent, PINNED + """
        ok(cu.cuStreamSynchronize(P(s)))
        tell("ready"); hear()
        download(p, a, 4096, s)
        tell(cu.cuStreamSynchronize(P(s)))
        tell(cu.cuMemsetD8Async(U64(a), 1, SIZE(16), P(s)))
        """)
    run.hear()
    agent.silent = True
    run.tell()
    agent.wait_for("memcpy_d2h")
    assert agent.ring is not None
    seq = agent.seqs("memcpy_d2h")[-1]
    agent.ring.send(ANSWER, struct.pack("<QiII", seq, result, 0, 0) if result else answer(seq, bytes(length)))
    if not result:
        agent.silent = False
    assert run.end() == [seen, seen]


def test_the_agent_is_lost_meanwhile(agent: FakeAgent, program: Any) -> None:
    run = program(agent, PINNED + """
        ok(cu.cuStreamSynchronize(P(s)))
        tell("ready"); hear()
        download(p, a, 4096, s)
        tell(cu.cuStreamSynchronize(P(s)))
        tell(cu.cuMemFreeHost(P(p)))
        """)
    run.hear()
    agent.silent = True
    run.tell()
    agent.wait_for("memcpy_d2h")
    agent.close_connection()
    assert run.end() == [802, 802]
