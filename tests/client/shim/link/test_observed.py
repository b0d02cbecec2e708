"""What the program's side knows to be complete, and who is told: SEMANTICS 1 and 7.

A replay has no watermark: whatever is published because work was known to be complete comes behind a ``completed`` in
the journal; and what kernels wrote into mapped memory is there before the program learns of their end, by whatever way.
"""

from __future__ import annotations

import pytest

from tests.support.shim.fake_agent import FakeAgent

PINNED = """
        import ctypes as c, threading, time
        def pinned(size):
            p = P()
            ok(cu.cuMemHostAlloc(c.byref(p), SIZE(size), 2))
            return p.value
        def until(done):          # a watermark says it
            for _ in range(2000):
                if done():
                    return
                time.sleep(0.005)
            raise AssertionError("it never came")
        def query(stream):
            return cu.cuStreamQuery(P(stream))
"""


def told_of(agent, call: int, before: int) -> bool:
    """Whether a stream of ``call``'s was observed at or beyond it before another call was published."""
    return call in agent.observed_before(before)


def test_an_upload_known_to_be_complete_is_told_to_the_journal_before_another_stream_reads_it(agent, program):
    """Else the launch on the second stream, in a replay, is in no order with the upload on the first."""
    run = program(agent, PINNED + """
        context()
        f, p, first, second = kernel(), pinned(4096), stream(), stream()
        c.memset(p, 5, 64)
        ok(launch(f, p, 1, first))
        tell(1)
        hear()
        time.sleep(0.3)           # the watermark comes; the program asks nothing
        ok(launch(f, p, 2, second))
        """)
    run.hear()
    agent.wait_for("launch")
    run.tell()
    run.end()
    (upload,), launches = agent.seqs("host_mirror_write"), agent.seqs("launch")
    waits = [seq for seq in agent.seqs("stream_wait_event") if seq < launches[1]]
    assert waits or told_of(agent, upload, launches[1])


def test_a_mirror_is_read_behind_the_end_of_the_kernel_that_wrote_it(agent, program):
    """Else a replay reads it too early, and an answer that was lost with its worker comes back old."""
    told = program(agent, PINNED + """
        context()
        f, p, other, busy, asked = kernel(), pinned(4096), alloc(64), stream(), stream()
        ok(launch(f, p, 3, busy))
        ok(launch(f, other, 1, asked))
        until(lambda: query(asked) == 0)      # nobody asked for the stream whose kernel wrote the memory
        time.sleep(0.2)
        ok(launch(f, other, 1, asked))
        until(lambda: query(asked) == 0)
        tell(list(c.string_at(p, 2)))
        """).end()
    assert told == [[3, 3]]
    (read,) = agent.seqs("host_mirror_read")
    assert told_of(agent, agent.seqs("launch")[0], read)


@pytest.mark.parametrize("question", ["query(None)", "cu.cuStreamSynchronize(None)"])
def test_the_end_of_work_in_the_legacy_stream_is_told(agent, program, question):
    """Its entry must outlive the watermark that covers it: the program asks later."""
    run = program(agent, PINNED + f"""
        context()
        f, a = kernel(), alloc(64)
        ok(launch(f, a, 1))
        tell(1)
        hear()
        time.sleep(0.3)           # the watermark covers all
        ok({question})
        ok({question})
        ok(launch(f, a, 1, stream()))
        """)
    run.hear()
    agent.wait_for("launch")
    run.tell()
    run.end()
    first, second = agent.seqs("launch")
    assert told_of(agent, first, second)


@pytest.mark.parametrize("legacy", [True, False])
def test_a_host_function_s_knowledge_is_told_although_the_watermark_had_it(agent, program, legacy):
    """The function may wake a thread that gives other streams work, before its own end stands in the journal."""
    run = program(agent, PINNED + f"""
        context()
        f, a, blocking = kernel(), alloc(64), stream(0)
        works = None if {legacy} else blocking
        ok(launch(f, a, 1, works))
        ok(launch(f, a, 1, None))             # in front of the blocking stream's function as well
        tell(1)
        hear()
        time.sleep(0.3)                       # the watermark covers all
        ran = threading.Event()
        @c.CFUNCTYPE(None, P)
        def function(_):
            ran.set()
        ok(cu.cuLaunchHostFunc(P(blocking), function, None))
        ran.wait()
        ok(cu.cuCtxSynchronize())
        """)
    run.hear()
    agent.wait_for("launch", 2)
    run.tell()
    run.end()
    (done,) = agent.seqs("host_function_done")
    launches = agent.seqs("launch")
    assert told_of(agent, launches[1], done)
    assert legacy or told_of(agent, launches[0], done)


def test_what_the_cpu_wrote_survives_a_mirror_read_before_its_upload(agent, program):
    """The upload waits behind a busy stream; another stream's end reads the mirror as it was before."""
    run = program(agent, PINNED + """
        context()
        f, p, free, busy = kernel(), pinned(8192), stream(), stream()
        tell(1)
        hear()
        ok(launch(f, p, 3, free))
        c.memmove(p + 100, b"\\x09" * 8, 8)
        c.memmove(p + 5000, b"\\x08" * 8, 8)
        ok(launch(f, p + 64, 1, busy))
        ok(cu.cuStreamSynchronize(P(free)))
        tell([list(c.string_at(p + at, 1)) for at in (0, 100, 5000)])
        """)
    run.hear()
    agent.wait_for("stream_create", 2)
    agent.held = {agent.args("stream_create")[1].stream}
    run.tell()
    assert run.hear() == [[3], [9], [8]]
    run.end()


def test_what_a_kernel_behind_an_upload_wrote_comes_back_although_the_upload_s_stream_is_busy(agent, program):
    """The kernel waited for the upload: its end says that of the upload too."""
    run = program(agent, PINNED + """
        context()
        f, p, free, busy = kernel(), pinned(4096), stream(), stream()
        tell(1)
        hear()
        c.memmove(p + 100, b"x" * 8, 8)
        ok(launch(f, p + 64, 1, busy))        # uploads the whole block
        tell(2)
        hear()
        ok(launch(f, p, 3, free))
        ok(cu.cuStreamSynchronize(P(free)))
        tell(list(c.string_at(p, 1)))
        """)
    run.hear()
    agent.quiet = True
    run.tell()
    run.hear()
    run.tell()
    assert run.hear() == [3]
    run.end()


def test_a_copy_to_pinned_memory_is_not_undone_by_what_a_kernel_wrote_before_it(agent, program):
    told = program(agent, PINNED + """
        context()
        f, p, a, s = kernel(), pinned(4096), alloc(64), stream()
        h2d(a, b"\\x09" * 16, s)
        ok(launch(f, p, 7, s))
        ok(cu.cuMemcpyDtoHAsync_v2(P(p), U64(a), SIZE(8), P(s)))
        ok(cu.cuStreamSynchronize(P(s)))
        tell(list(c.string_at(p, 16)))
        """).end()
    assert told == [[9] * 8 + [7] * 8]


def test_memory_of_a_kernel_in_a_destroyed_stream_is_waited_for(agent, program):
    """No call may name the stream any more."""
    agent.hold = True
    run = program(agent, PINNED + """
        context()
        f, p, a, s = kernel(), pinned(4096), alloc(64), stream()
        ok(launch(f, p, 7, s))
        ok(cu.cuStreamDestroy_v2(P(s)))
        tell(1)
        ok(cu.cuMemcpyHtoDAsync_v2(U64(a), P(p), SIZE(16), None))
        tell(list(d2h(a, 16)))
        """)
    run.hear()
    agent.wait_for("context_synchronize")
    agent.let_go()
    assert run.hear() == [7] * 16
    run.end()
    assert "stream_synchronize" not in agent.names()


def test_a_copy_between_devices_stands_behind_what_each_was_given_before(tmp_path, program):
    """Both are known to be idle: that has to be told, for a replay cannot know."""
    with FakeAgent(tmp_path, devices=2) as agent:
        run = program(agent, PINNED + """
        context()
        f, a = kernel(), alloc(64)
        second, first = P(), P()
        ok(cu.cuCtxGetCurrent(c.byref(first)))
        ok(cu.cuDevicePrimaryCtxRetain(c.byref(second), 1))
        ok(cu.cuCtxSetCurrent(second))
        b = alloc(64)
        ok(cu.cuCtxSetCurrent(first))
        ok(launch(f, a, 1, stream()))
        tell(1)
        hear()
        time.sleep(0.3)
        ok(cu.cuMemcpyPeer(U64(b), second, U64(a), first, SIZE(16)))
        """)
        run.hear()
        agent.wait_for("launch")
        run.tell()
        run.end()
        (copy,) = agent.seqs("memcpy_d2d")
        waits = [seq for seq in agent.seqs("context_synchronize") if seq < copy]
        assert len(waits) == 2 and set(waits) <= set(agent.observed_before(copy))


WAYS = {
    "an event that another stream waited for": """
        e = event()
        ok(launch(f, p, 5, s))
        ok(cu.cuEventRecord(P(e), P(s)))
        ok(cu.cuStreamWaitEvent(P(t), P(e), 0))
        ok(launch(f, other, 1, t))
        ok(cu.cuStreamSynchronize(P(t)))""",
    "an event of a stream that waited for an event": """
        e, last = event(), event()
        ok(launch(f, p, 5, s))
        ok(cu.cuEventRecord(P(e), P(s)))
        ok(cu.cuStreamWaitEvent(P(t), P(e), 0))
        ok(cu.cuEventRecord(P(last), P(t)))
        ok(cu.cuEventSynchronize(P(last)))""",
    "the legacy stream behind a blocking one": """
        ok(launch(f, p, 5, blocking))
        ok(cu.cuStreamSynchronize(None))""",
    "work of the legacy stream behind a blocking one": """
        e = event()
        ok(launch(f, p, 5, blocking))
        ok(launch(f, other, 5, None))
        ok(cu.cuEventRecord(P(e), None))
        ok(cu.cuEventSynchronize(P(e)))""",
    "a blocking stream behind the legacy one": """
        ok(launch(f, p, 5, None))
        ok(launch(f, other, 5, blocking))
        ok(cu.cuStreamSynchronize(P(blocking)))""",
    "a time between two events": """
        a, b, took = event(), event(), c.c_float()
        ok(cu.cuEventRecord(P(a), P(s)))
        ok(launch(f, p, 5, s))
        ok(cu.cuEventRecord(P(b), P(s)))
        ok(cu.cuEventElapsedTime(c.byref(took), P(a), P(b)))""",
    "a host function in another stream": """
        e, ran, saw = event(), threading.Event(), []
        ok(launch(f, p, 5, s))
        ok(cu.cuEventRecord(P(e), P(s)))
        ok(cu.cuStreamWaitEvent(P(t), P(e), 0))
        @c.CFUNCTYPE(None, P)
        def function(_):
            ran.set()
        ok(cu.cuLaunchHostFunc(P(t), function, None))
        ran.wait()""",
}


@pytest.mark.parametrize("way", WAYS)
def test_mapped_memory_is_there_by_whatever_way_the_program_learns(agent, program, way):
    """No watermark comes: what comes behind a kernel says that the kernel is complete."""
    agent.quiet = True
    told = program(agent, PINNED + """
        context()
        f, p, other, s, t, blocking = kernel(), pinned(4096), alloc(64), stream(), stream(), stream(0)
""" + WAYS[way] + """
        tell(list(c.string_at(p, 16)))
        ok(cu.cuCtxSynchronize())
        """).end()
    assert told == [[5] * 16]
    (read,) = agent.seqs("host_mirror_read")
    assert told_of(agent, agent.seqs("launch")[0], read)


@pytest.mark.parametrize("question", ["cu.cuEventQuery(P(e))", "query(s)"])
def test_a_second_thread_that_asks_does_not_pass_the_first(agent, program, question):
    """While the first still brings mapped memory back, the second is not told that the kernel is complete."""
    agent.kept = {"host_mirror_read"}
    run = program(agent, PINNED + f"""
        context()
        f, p, s, e = kernel(), pinned(4096), stream(), event()
        ok(launch(f, p, 5, s))
        ok(cu.cuEventRecord(P(e), P(s)))
        saw, current = [], P()
        ok(cu.cuCtxGetCurrent(c.byref(current)))
        def ask():
            ok(cu.cuCtxSetCurrent(current))
            until(lambda: {question} == 0)
            saw.append(list(c.string_at(p, 1)))
        threads = [threading.Thread(target=ask) for _ in range(2)]
        threads[0].start()
        tell(1)
        hear()
        threads[1].start()
        threads[1].join(0.5)
        tell(saw)
        for thread in threads:
            thread.join()
        tell(saw)
        """)
    run.hear()
    agent.wait_for("host_mirror_read")
    run.tell()
    assert run.hear() == []
    agent.let_go()
    assert run.hear() == [[5], [5]]
    run.end()


def test_a_wait_for_a_device_that_is_known_to_be_idle_asks_nobody(agent, program):
    """It is told to the journal, once for each stream's last call; a replay waits for these where the program knew."""
    run = program(agent, PINNED + """
        context()
        f, a, side, last = kernel(), alloc(64), stream(), stream()
        ok(launch(f, a, 1, side))
        ok(launch(f, a, 1))
        ok(launch(f, a, 1, last))
        until(lambda: query(last) == 0)       # the watermark covers all
        for _ in range(3):
            ok(cu.cuCtxSynchronize())
        ok(launch(f, a, 1, side))
        """)
    run.end()
    first, second, _, last = agent.seqs("launch")
    assert not agent.seqs("context_synchronize")
    told = agent.observed_before(last)
    assert {first, second} <= set(told) and len(set(told)) == len(told)


def test_a_wait_for_a_device_with_work_asks_and_then_streams_are_known(agent, program):
    agent.quiet = True  # else a watermark may have come before it asks
    told = program(agent, PINNED + """
        context()
        f, a, side = kernel(), alloc(64), stream()
        ok(launch(f, a, 1, side))
        ok(cu.cuCtxSynchronize())
        ok(cu.cuStreamDestroy_v2(P(side)))
        for _ in range(3):
            ok(cu.cuCtxSynchronize())
        tell(1)
        """).end()
    assert told == [1] and len(agent.seqs("context_synchronize")) == 1


def test_the_end_of_a_destroyed_stream_s_work_is_asked_for(agent, program):
    """Nothing else would tell the journal that the program knows of it."""
    run = program(agent, PINNED + """
        context()
        f, p, side = kernel(), pinned(4096), stream()
        ok(launch(f, p, 3, side))
        ok(cu.cuStreamDestroy_v2(P(side)))
        tell(1)
        hear()
        time.sleep(0.3)           # the watermark covers all
        ok(cu.cuCtxSynchronize())
        tell(list(c.string_at(p, 2)))
        ok(cu.cuCtxSynchronize())
        """)
    run.hear()
    agent.wait_for("launch")
    run.tell()
    assert run.end()[-1] == [3, 3] and len(agent.seqs("context_synchronize")) == 1


def test_a_wait_for_an_idle_device_brings_what_kernels_wrote_and_printed(agent, program):
    run = program(agent, PINNED + """
        context()
        f, p = kernel(), pinned(4096)
        ok(launch(f, p, 3, stream()))
        tell(1)
        hear()
        time.sleep(0.3)
        ok(cu.cuCtxSynchronize())
        tell(list(c.string_at(p, 2)))
        """)
    run.hear()
    agent.wait_for("launch")
    run.tell()
    assert run.end()[-1] == [3, 3]
    (read,) = agent.seqs("host_mirror_read")
    assert told_of(agent, agent.seqs("launch")[0], read)


def test_a_fault_is_told_by_a_wait_for_an_idle_device(agent, program):
    run = program(agent, PINNED + """
        context()
        f, a, side = kernel(), alloc(64), stream()
        tell(1)
        hear()
        ok(launch(f, a, 1, side))
        tell(2)
        hear()
        time.sleep(0.3)
        tell(cu.cuCtxSynchronize())
        """)
    run.hear()
    agent.wait_for("stream_create")  # its watermark has left: the next one tells of the fault
    agent.error = 700
    run.tell()
    run.hear()
    agent.wait_for("launch")
    run.tell()
    assert run.end()[-1] == 700
