"""What kernels print, from the driver's standard output to the agent's end of the link.

Each case runs in an interpreter of its own: it gives its standard output away.
"""

from __future__ import annotations

import os
import struct
import time
from types import SimpleNamespace
from typing import Any

import pytest

from rgpu.server.device.cuda.work import printed
from rgpu.server.worker.agent.agent_link import AgentLink
from tests.support.cuda import fresh
from tests.support.eventually import eventually
from tests.support.fake_driver.support import BASE, Journal, driver
from tests.support.worker.links import End, linked

STREAM = 18
BINARY = b"add_one 12\nvprintf 12\n"
PLAIN = b"add_one 12\n"


def lines(number: int, count: int) -> bytes:
    return b"".join(b"%d: %d of %d\n" % (number, line, count) for line in range(count))


class Printing:
    """A session on the fake driver whose kernels print, in a process that has given its standard output away."""

    def __init__(self, binary: bytes = BINARY) -> None:
        from rgpu.server.device.cuda.device import CudaDevice
        from rgpu.server.device.cuda.work.printed import CapturedStdout
        from rgpu.server.worker.apply.runtime import SessionRuntime

        self.device = CudaDevice(0, CapturedStdout())
        self.runtime = SessionRuntime("s", 1, self.device)
        self.journal = make = Journal()
        self.link: AgentLink | None = None
        self.begin = b"".join([
            make("session_open", version=1, pid=1, environment=b""),
            make("context_create", context=16, device=0, flags=0, primary=1),
            make("memory_map", address=BASE, size=16 << 20, device=0),
            make("memory_allocate", address=BASE, size=16 << 20),
            make("module_load", binary, module=17, context=16, library=0, options=b""),
            make("stream_create", stream=STREAM, context=16, flags=1, priority=0)])

    def attach(self, printed: int | None = 0) -> End:
        """As the worker does it: the connection before ends."""
        if self.link is not None:
            self.link.close()
        self.link, connection = linked(self.runtime, printed=printed)
        return End(connection, printed or 0)

    def says(self, number: int, count: int = 1) -> bytes:
        return self.journal.launch(1, struct.pack("<QI", number, count), STREAM)

    def sync(self) -> bytes:
        return self.journal("stream_synchronize", stream=STREAM)


def ahead_of_the_answer(how: int) -> None:
    printed.PATIENCE = 10.0  # the driver's printing thread may wait for a processor
    session = Printing()
    driver().fake_print_at(how)
    end, whole = session.attach(), b""
    end.send(session.begin)
    for turn in range(30):
        end.send(session.says(turn) + session.says(1000 + turn, 3) + session.sync())
        whole += lines(turn, 1) + lines(1000 + turn, 3)
        assert end.answer(session.journal.seq) == (0, whole)
        end.send(session.says(7) + session.journal.read(16))
        whole += lines(7, 1)
        assert end.answer(session.journal.seq) == (0, whole), "a blocking copy says that the work before it is done"
    for done, text in end.marks:  # the launch of a turn that a watermark covers has its text before it
        turns = max(0, (done - 8) // 5 + 1)
        assert text.count(b" of 3\n") >= 3 * min(turns, 30), (done, len(text))


@pytest.mark.parametrize("how", [0, 1], ids=["any call that waits", "only cuCtxSynchronize"])
def test_text_comes_ahead_of_what_tells_that_its_kernel_ran(how: int) -> None:
    fresh.run(ahead_of_the_answer, how)


def taken_by_another_thread_meanwhile() -> None:
    text, synchronised = Printing().device.text, []
    assert text is not None
    os.write(1, b"of an earlier kernel\n")
    text._libcuda = SimpleNamespace(cuCtxSetCurrent=lambda context: 0, cuStreamSynchronize=lambda stream: text.take(64),
                                    cuCtxSynchronize=lambda: synchronised.append(1))  # type: ignore[assignment]
    assert text._ask() and synchronised, "what was taken does not hide that nothing was printed"


def test_text_is_asked_for_while_another_thread_takes_earlier_text() -> None:
    fresh.run(taken_by_another_thread_meanwhile)


def more_than_a_pipe_holds() -> None:
    session = Printing()
    end = session.attach()
    end.send(session.begin + session.says(5, 300_000) + session.sync())
    whole = lines(5, 300_000)
    assert len(whole) > 5 << 20 and end.answer(session.journal.seq) == (0, whole)


def test_one_kernel_prints_megabytes() -> None:
    fresh.run(more_than_a_pipe_holds)


def another_link_and_another_owner() -> None:
    session = Printing()
    end, whole = session.attach(), lines(1, 50) + lines(2, 50)
    end.send(session.begin + session.says(1, 50) + session.says(2, 50) + session.sync())
    end.answer(session.journal.seq)
    end.confirm(100)
    again = session.attach(170)  # the agent had so much when the link broke
    assert again.wait_text(len(whole) - 170) == whole[170:]
    session.runtime.quiesce(5)
    assert session.runtime.text.state() == [len(whole), whole[170:]], "kept until it is confirmed"
    session.runtime.resume()
    session.runtime.text.restore([5000, b"tail\n"])  # as the state of another owner says
    third = session.attach(4995)
    third.send(session.says(3) + session.sync())
    assert third.answer(session.journal.seq) == (0, b"tail\n" + lines(3, 1))


def test_what_is_not_confirmed_is_kept() -> None:
    fresh.run(another_link_and_another_owner)


def a_replay_is_silent() -> None:
    session = Printing()
    end = session.attach(given := len(lines(0, 10)) + 4)  # it was printed by a worker that is no more
    end.send(session.begin + session.says(0, 10) + session.sync())
    assert end.answer(session.journal.seq) == (0, b"")
    end.send(session.says(1, 2) + session.sync())
    assert end.answer(session.journal.seq) == (0, lines(1, 2)[4:]) and end.begin == given


def test_a_replay_says_nothing_twice() -> None:
    fresh.run(a_replay_is_silent)


def an_agent_that_reads_slowly() -> None:
    """Calls are not applied while too much is under way; the agent's word for it is read meanwhile."""
    from rgpu.server.worker import session_text

    session_text.LIMIT = 100_000
    session = Printing()
    end = session.attach()
    end.send(session.begin)
    launches = b"".join(session.says(turn, 100) for turn in range(2000))
    end.send(launches + session.sync())
    eventually(lambda: len(end.text) > 100_000, "no text comes")
    time.sleep(0.5)
    stood = session.runtime.applied
    time.sleep(0.3)
    assert session.runtime.applied == stood < session.journal.seq - 1000, "nothing holds the calls up"
    session.runtime.quiesce(5)  # nor does that hold a cut up
    session.runtime.resume()
    eventually(lambda: session.journal.seq in end.answers or end.confirm())
    assert end.answer(session.journal.seq) == (0, b"".join(lines(turn, 100) for turn in range(2000)))


def test_memory_is_bounded_by_what_the_agent_confirms() -> None:
    fresh.run(an_agent_that_reads_slowly)


def the_driver_does_not_come_back() -> None:
    """A call of the driver that waits with a lock held must not keep an answer back for long."""
    session = Printing()
    end = session.attach()
    end.send(session.begin + session.says(1) + session.sync())
    end.answer(session.journal.seq)
    driver().fake_print_at(2)
    began = time.monotonic()
    for turn in range(5):
        end.send(session.says(10 + turn) + session.sync())
        assert end.answer(session.journal.seq)[0] == 0
    assert time.monotonic() - began < 2
    driver().fake_print_at(0)
    eventually(lambda: not session.device.text._stuck, "the driver does not come back")
    end.send(session.sync())
    assert end.answer(session.journal.seq) == (0, lines(1, 1) + b"".join(lines(10 + turn, 1) for turn in range(5)))


def test_an_answer_does_not_wait_for_a_driver_that_is_stuck() -> None:
    fresh.run(the_driver_does_not_come_back)


def nobody_takes_it(printed: Any) -> None:
    session = Printing(BINARY if printed is None else PLAIN)
    end = session.attach(printed)
    end.send(session.begin + (session.says(1, 1000) if printed is None else session.journal.add_one()) + session.sync())
    assert end.answer(session.journal.seq) == (0, b"")
    text = session.device.text
    assert text is not None and text.printing is (printed is None) and session.runtime.text.state()[1] == b""


@pytest.mark.parametrize("printed", [None, 0], ids=["an agent of before", "a module that prints nothing"])
def test_no_text(printed: Any) -> None:
    fresh.run(nobody_takes_it, printed)
