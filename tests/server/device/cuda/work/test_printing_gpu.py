"""What kernels print on a real GPU, up to the agent's end of the link. Each in an interpreter of its own."""

from __future__ import annotations

import random
import struct

import pytest

from tests.support.cuda import fresh
from tests.support.worker.links import End, linked

pytestmark = pytest.mark.gpu

MODULE, STREAM, OTHER = 30, 31, 32
SOURCE = b"""
extern "C" __global__ void say(int turn, int lines) {
    for (int i = 0; i < lines; ++i) printf("turn %d line %d %s %.2f\\n", turn, i, "text", 0.5 * i);
}
extern "C" __global__ void slow(long long cycles) { long long t = clock64(); while (clock64() - t < cycles) ; }
"""


def lines(turn: int, count: int = 1) -> bytes:
    return b"".join(b"turn %d line %d text %.2f\n" % (turn, line, 0.5 * line) for line in range(count))


class Printing:
    def __init__(self) -> None:
        from rgpu.server.device.cuda.work.printed import CapturedStdout

        captured = CapturedStdout()
        from rgpu.server.device.cuda.device import CudaDevice
        from rgpu.server.worker.apply.runtime import SessionRuntime
        from tests.support.cuda.compiled import compiled
        from tests.support.fake_driver.support import Journal

        self.runtime = SessionRuntime("gpu", 1, CudaDevice(0, captured))
        self.journal = make = Journal()
        self.begin = b"".join([
            make("session_open", version=1, pid=1, environment=b""),
            make("context_create", context=16, device=0, flags=0, primary=1),
            make("module_load", compiled(SOURCE), module=MODULE, context=16, library=0, options=b""),
            make("stream_create", stream=STREAM, context=16, flags=1, priority=0),
            make("stream_create", stream=OTHER, context=16, flags=1, priority=0)])
        self.load = 3
        self.functions: dict[str, int] = {}

    def attach(self, printed: int = 0) -> End:
        end = End(linked(self.runtime, printed=printed)[1], printed)
        if not self.functions:
            from rgpu.session.calls import decoders
            from rgpu.session.objects import module_table

            end.send(self.begin)
            assert end.answer(self.load)[0] == 0
            reply = self.runtime.retained.unobserved()[0][2]
            table = module_table.decode(decoders.decode_reply("module_load", reply).table)
            self.functions = {function.name: index for index, function in enumerate(table.functions)}
        return end

    def says(self, turn: int, count: int = 1) -> bytes:
        return self.journal.launch(self.functions["say"], struct.pack("<ii", turn, count), STREAM, module=MODULE)

    def sync(self, stream: int = STREAM) -> bytes:
        return self.journal("stream_synchronize", stream=stream)


def ahead_of_the_answer() -> None:
    session = Printing()
    end, whole = session.attach(), b""
    for turn in range(50):
        end.send(session.says(turn) + session.sync())
        whole += lines(turn)
        assert end.answer(session.journal.seq) == (0, whole), f"turn {turn}"


def test_text_comes_ahead_of_the_answer() -> None:
    fresh.run(ahead_of_the_answer)


def beside_a_running_kernel() -> None:
    """The text of a stream's work is there although another stream still runs: nothing waits for that one."""
    session = Printing()
    end = session.attach()
    end.send(session.says(0) + session.sync())  # the first one of all may wait for the whole device: its buffer is made
    assert end.answer(session.journal.seq) == (0, lines(0))
    end.send(session.journal.launch(session.functions["slow"], struct.pack("<q", 4_000_000_000), OTHER, module=MODULE)
             + session.says(1) + session.sync())
    assert end.answer(session.journal.seq) == (0, lines(0) + lines(1))
    assert session.runtime.device.progress()[0], "the other stream has ended: the test shows nothing"
    end.send(session.sync(OTHER))
    assert end.answer(session.journal.seq)[0] == 0


def test_text_beside_a_running_kernel() -> None:
    fresh.run(beside_a_running_kernel)


def much() -> None:
    """Several MiB in all, each launch within the driver's buffer; nothing is lost and nothing stands still."""
    session = Printing()
    end, whole, rng = session.attach(), b"", random.Random(1)
    for turn in range(40):
        count = rng.randrange(1, 8000)
        end.send(session.says(turn, count) + session.sync())
        whole += lines(turn, count)
        assert end.answer(session.journal.seq)[1] == whole
        end.confirm()
    assert len(whole) > 2 << 20


def test_several_mebibytes() -> None:
    fresh.run(much)


def replayed() -> None:
    session = Printing()
    end = session.attach(len(lines(0, 10)))
    end.send(session.says(0, 10) + session.sync() + session.says(1) + session.sync())
    assert end.answer(session.journal.seq) == (0, lines(1))


def test_what_was_delivered_is_not_repeated() -> None:
    fresh.run(replayed)
