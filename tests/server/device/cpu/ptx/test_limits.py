"""PTX that is large or made to be slow: it runs, or is refused with what it came to, and the process goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

from rgpu.server.device.cpu.ptx import control, flow, module, parse_module
from rgpu.server.device.cpu.ptx.errors import CompileLimit
from rgpu.server.device.cpu.ptx.machine import compiling
from rgpu.server.device.cpu.ptx.syntax.parser import parse
from tests.support.cpu.ptx import HEADER, launch, ptx

TraceFunction = Callable[[FrameType, str, Any], Any]


def labels(count: int) -> str:
    """A kernel of so many labels: lane i is sent on by label i alone, and counts those that it passes."""
    body = "".join(f"L{i}:\nsetp.eq.u32 %p1, %r1, {i};\n@%p1 bra DONE;\nadd.u32 %r2, %r2, 1;\n" for i in range(count))
    return (".visible .entry k(.param .u64 p) {\n.reg .b32 %r<3>;\n.reg .b64 %rd<3>;\n.reg .pred %p<2>;\n"
            "ld.param.u64 %rd1, [p];\nmov.u32 %r1, %tid.x;\nmul.wide.u32 %rd2, %r1, 4;\nadd.u64 %rd1, %rd1, %rd2;\n"
            f"mul.lo.u32 %r1, %r1, 100;\nmov.u32 %r2, 0;\n{body}DONE:\nst.global.u32 [%rd1], %r2;\nret;\n}}\n")


def stores(count: int) -> str:
    """A kernel of one block of so many stores."""
    body = "".join(f"ld.global.u32 %r1, [%rd1+{4 * i}];\nst.global.u32 [%rd1+{4 * i}], %r1;\n" for i in range(count))
    return (f".visible .entry k(.param .u64 p) {{\n.reg .b32 %r<2>;\n.reg .b64 %rd<2>;\nld.param.u64 %rd1, [p];\n"
            f"{body}ret;\n}}\n")


def upwards(count: int) -> str:
    """Each label is reached from the one below it: what lives there is known only after all that follow."""
    body = "".join(f"M{i}:\nadd.u32 %r1, %r1, 1;\nbra M{i - 1 if i else 'E'};\n" for i in range(count))
    return f".visible .entry k() {{\n.reg .b32 %r<2>;\nmov.u32 %r1, 0;\nbra M{count - 1};\n{body}ME:\nret;\n}}\n"


def test_a_kernel_of_thousands_of_labels_runs_as_any_other() -> None:
    out = np.zeros(32, np.uint32)
    text = labels(3000)
    assert len(parse_module(HEADER + text)._code["k"].text) > compiling.OPTIMISED, "in a process of its own"
    assert launch(ptx(text), "k", 1, 32, out).error == 0
    assert (out == np.minimum(np.arange(32) * 100, 3000)).all()


def lines_run(work: Callable[[], object]) -> int:
    """The number of lines of Python that a piece of work runs: what it takes, without the machine's load in it."""
    lines = 0

    def local(_frame: FrameType, event: str, _arg: object) -> TraceFunction:
        nonlocal lines
        lines += event == "line"
        return local

    before = sys.gettrace()
    sys.settrace(local)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("make", [labels, upwards])
def test_work_grows_with_the_size_and_not_with_its_square(make: Callable[[int], str]) -> None:
    def work(count: int) -> None:
        flow.blocks_of(parse(HEADER + make(count), 75).functions["k"], 0)
        parse_module(HEADER + make(count))

    work(100)
    small, large = lines_run(lambda: work(250)), lines_run(lambda: work(2000))
    assert small > 250 * 100, "counted at all"
    assert large < 10 * small, "8 times as large; its square would be 64 times as many"


@pytest.mark.parametrize(("limits", "why"), [({"seconds": 1}, "1 s"), ({"memory": 300 << 20}, "300 MiB")])
def test_a_compilation_that_comes_to_its_limits_is_refused(limits: dict[str, int], why: str) -> None:
    code = parse_module(HEADER + labels(10_000))._code["k"]
    text = "\n".join([code.text, *(helper.declaration for helper in code.helpers),
                      'attributes #0 = { nounwind "min-legal-vector-width"="512" }\n'])
    with pytest.raises(CompileLimit, match=why):
        compiling.object_code(text, 2, **limits)


def test_a_kernel_that_needs_more_stack_than_a_thread_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "MOST_FRAME", 64 << 10)
    with pytest.raises(CompileLimit, match="bytes of stack"):
        ptx(stores(6000)).compile("k")
    began = time.process_time()
    with pytest.raises(CompileLimit, match="bytes of stack"):
        ptx(stores(6000)).compile("k")
    assert time.process_time() - began < 60, "known from the first time"


def test_what_is_too_large_is_refused_before_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = "".join(f".func f{i}() {{ {f'call f{i - 1}, ();' if i else ''} ret; }}\n" for i in range(300))
    with pytest.raises(CompileLimit, match="functions deep"):
        parse_module(HEADER + deep + ".visible .entry k() { call f299, (); ret; }\n")
    for where, name, most in ((control, "MOST_LINES", 1000), (module, "MOST_IR", 50_000), (module, "MOST_TEXT", 5000)):
        with monkeypatch.context() as context:
            context.setattr(where, name, most)
            with pytest.raises(CompileLimit, match=str(most)):
                parse_module(HEADER + labels(300 + most % 7))
