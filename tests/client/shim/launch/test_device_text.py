"""What kernels print, in the program: by its own stdio, in its place, once, and whole.

Program and "kernels" print JSON here, so that the program's standard output shows the order.
"""

from __future__ import annotations

import json
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.eventually import eventually
from tests.support.shim.fake_agent import FakeAgent

WAYS = pytest.mark.parametrize(("ring", "spin"), [(0, "0"), (8192, "0"), (8192, "100000")],
                               ids=["socket", "ring, sleeping", "ring, looking"])
SAY = """
libc = c.CDLL(None)
def say(text):
    libc.printf(b"%s\\n", json.dumps(text).encode())
"""


def talking(code: str) -> str:
    """A program that prints with the C library."""
    return SAY + textwrap.dedent(code)


def said(text: str) -> bytes:
    return json.dumps(text).encode() + b"\n"


def wait_read(agent: FakeAgent) -> None:
    """Until the shim has read all that was sent."""
    assert agent.ring is not None
    eventually(lambda: agent.ring.read_by_shim() == agent.ring.written, "the shim does not read its ring", 20)
    time.sleep(0.02)  # what was read is put down by then


@pytest.fixture
def text_agent(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    with FakeAgent(tmp_path, ring=getattr(request, "param", 8192)) as running:
        yield running


@WAYS
def test_in_order_with_the_programs_own(tmp_path: Path, program: Any, ring: int, spin: str) -> None:
    """Standard output is a pipe here: it is ordered by the C library's buffer and nothing else."""
    with FakeAgent(tmp_path, ring=ring) as agent:
        agent.quiet = True  # so that each wait asks
        texts = [said(f"kernel {turn} " + "x" * (turn * 97 % 3000)) for turn in range(60)]
        at = 0
        for text in texts:
            half = len(text) // 2
            agent.texts.append([(at, text[:half]), (at + half, text[half:])])
            at += len(text)
        lines = program(agent, talking("""
            context()
            memory, s, e = alloc(4096), stream(), event()
            for turn in range(60):
                say(f"before {turn}")
                h2d(memory, b"x")  # so that there is something to wait for
                if turn % 3 == 0:
                    ok(cu.cuCtxSynchronize())
                elif turn % 3 == 1:
                    ok(cu.cuMemcpyDtoH_v2(c.create_string_buffer(4), U64(memory), SIZE(4)))
                else:
                    ok(cu.cuMemcpyDtoH_v2(c.create_string_buffer(4), U64(memory), SIZE(4)))
                say(f"after {turn}")
            """), RGPU_SPIN_US=spin).end()
        assert lines == [line for turn in range(60)
                         for line in (f"before {turn}", json.loads(texts[turn]), f"after {turn}")]


@WAYS
def test_what_came_twice_is_printed_once(tmp_path: Path, program: Any, ring: int, spin: str) -> None:
    first, second = said("one"), said("two")
    both = first + second
    with FakeAgent(tmp_path, ring=ring) as agent:
        agent.texts = [[(0, first)], [(0, first), (0, both), (len(first), second)], [(3, both[3:])]]
        lines = program(agent, talking("""
            context()
            memory = alloc(64)
            for turn in range(3):
                ok(cu.cuMemcpyDtoH_v2(c.create_string_buffer(4), U64(memory), SIZE(4)))
                say(turn)
            """), RGPU_SPIN_US=spin).end()
        assert lines == ["one", 0, "two", 1, 2]


def test_a_hole_ends_the_session(tmp_path: Path, program: Any) -> None:
    with FakeAgent(tmp_path, ring=8192) as agent:
        agent.texts = [[(1, b"x")]]
        lines = program(agent, """
            context()
            tell(cu.cuMemcpyDtoH_v2(c.create_string_buffer(4), U64(alloc(64)), SIZE(4)))
            """).end()
        assert lines == [802]


def test_a_program_that_never_waits(text_agent: FakeAgent, program: Any) -> None:
    """Much is written by whoever reads the answers; the rest when the process ends."""
    run = program(text_agent, """
        context()
        tell("ready")
        hear()
        """)
    run.hear()
    whole = b"".join(said("z" * 60 + str(number)) for number in range(40_000))

    def print_all() -> None:
        for at in range(0, len(whole), 2000):
            text_agent.print_text(at, whole[at:at + 2000])

    printing = threading.Thread(target=print_all)
    printing.start()
    got = sum(len(run.hear()) + 3 for _ in range(30_700))  # more than 1 MiB, while it waits for nothing of ours
    assert got > 1 << 20
    printing.join(30)
    assert not printing.is_alive()
    wait_read(text_agent)
    run.tell()
    assert len(run.end()) == 9_300


def test_a_launch_prints_what_has_come(text_agent: FakeAgent, program: Any) -> None:
    run = program(text_agent, talking("""
        context()
        memory, function = alloc(4096), kernel()
        tell("ready")
        hear()
        say("before")
        ok(launch(function, memory, 1))
        say("after")
        """))
    run.hear()
    text_agent.print_text(0, said("kernel"))
    wait_read(text_agent)
    run.tell()
    assert run.end() == ["before", "kernel", "after"]


@pytest.mark.parametrize("call", ["cu.cuStreamSynchronize(P(s))", "cu.cuEventSynchronize(P(e))",
                                  "cu.cuCtxSynchronize()"])
def test_a_wait_that_needs_no_answer_prints(text_agent: FakeAgent, program: Any, call: str) -> None:
    """The watermark said that the stream, and the event, are done."""
    run = program(text_agent, talking(f"""
        context()
        memory, s, e = alloc(4096), stream(), event()
        h2d(memory, b"x", s)
        ok(cu.cuEventRecord(P(e), P(s)))
        while cu.cuStreamQuery(P(s)):
            pass
        tell("ready")
        hear()
        say("before")
        ok({call})
        say("after")
        """))
    run.hear()
    before = len(text_agent.records)
    text_agent.print_text(0, said("kernel"))
    wait_read(text_agent)
    run.tell()
    assert run.end() == ["before", "kernel", "after"]
    assert not any(record.flags & 2 for record in text_agent.records[before:]), "it asked the worker"


def test_threads_that_wait_side_by_side(text_agent: FakeAgent, program: Any) -> None:
    """Whoever comes back has its text written, also when another thread is writing it."""
    count, at = 400, 0
    for number in range(count):
        text = said(f"kernel {number}")
        text_agent.texts.append([(at, text)])
        at += len(text)
    lines = program(text_agent, talking(f"""
        import threading
        here, memory = context(), alloc(64)
        def work():
            ok(cu.cuCtxSetCurrent(here))
            for _ in range({count // 4}):
                ok(cu.cuMemcpyDtoH_v2(c.create_string_buffer(4), U64(memory), SIZE(4)))
        threads = [threading.Thread(target=work) for _ in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        say("end")
        """)).end(120)
    assert lines == [f"kernel {number}" for number in range(count)] + ["end"]


def test_a_forked_child_prints_nothing_of_it(text_agent: FakeAgent, program: Any) -> None:
    run = program(text_agent, talking("""
        context()
        tell("ready")
        hear()
        child = os.fork()
        if not child:
            cu.cuCtxSynchronize()
            launch(P(), 0, 0)
            libc.exit(0)
        os.waitpid(child, 0)
        say("parent")
        ok(cu.cuCtxSynchronize())
        """))
    run.hear()
    text_agent.print_text(0, said("kernel"))
    wait_read(text_agent)
    run.tell()
    assert run.end() == ["parent", "kernel"]


def test_hello_says_that_text_is_wanted(text_agent: FakeAgent, program: Any) -> None:
    program(text_agent, "context()").end()
    assert text_agent.hello[3] & 2
