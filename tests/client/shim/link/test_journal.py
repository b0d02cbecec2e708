"""The journal and the link: order, space, the agent's end."""

from __future__ import annotations

import struct
import time

from rgpu.session.journal.record import HEADER_SIZE
from tests.support.shim.fake_agent import MIB, FakeAgent


def test_threads_publish_one_order(agent, program):
    """The fake agent checks sums, numbers and lengths of every record."""
    program(agent, """
        import threading
        here = context()
        a = alloc(1 << 20)
        def work(n):
            ok(cu.cuCtxSetCurrent(here))
            for i in range(10000):
                if i % 100:
                    ok(cu.cuMemsetD32Async(U64(a), n * 100000 + i, SIZE(1), P(2)))
                else:
                    h2d(a, bytes([n]) * (i + 1), 2)
        threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        ok(cu.cuCtxSynchronize())
        """).end()
    values = [args.value for args in agent.args("memset")]
    for n in (1, 2):  # each thread's own order is kept
        assert [v % 100000 for v in values if v // 100000 == n] == [i for i in range(10000) if i % 100]
    assert len({record.thread for record in agent.records}) >= 3
    streams = {args.stream for args in agent.args("memset")}
    assert len(streams) == 2 and 0 not in streams  # each thread has its own default stream


def test_end_of_the_agent_wakes_a_waiter_at_once(agent, program):
    run = program(agent, """
        import time
        context()
        a = alloc(1000)
        tell("ready"); hear()
        h2d(a, b"x")
        out = c.create_string_buffer(8)
        tell(cu.cuMemcpyDtoH_v2(out, U64(a), SIZE(8)))
        began = time.monotonic()
        tell([cu.cuMemcpyHtoD_v2(U64(a), out, SIZE(8)), cu.cuCtxSynchronize(), cu.cuStreamQuery(None), free(a)])
        tell(time.monotonic() - began)
        """)
    run.hear()
    agent.hold = True
    run.tell()
    agent.wait_for("memcpy_d2h")
    began = time.monotonic()
    agent.close_connection()
    assert run.hear() == 802
    assert time.monotonic() - began < 10
    told = run.end()
    assert told[0] == [802] * 4 and told[1] < 5


def test_no_agent(program, tmp_path):
    assert program(None, "tell([cu.cuInit(0), cu.cuCtxSynchronize()])").end() == [[100, 3]]
    gone = f"os.environ['RGPU_AGENT'] = {str(tmp_path / 'none')!r}\n"  # putenv: the library sees it
    assert program(None, gone + "tell([cu.cuInit(0), cu.cuCtxSynchronize()])").end() == [[802, 3]]


def test_completed_follows_each_awaited_answer(agent, program):
    program(agent, """
        context()
        a = alloc(1000)
        s = stream()
        for i in range(5):
            h2d(a, bytes([i]) * 100, s)
            assert d2h(a, 100) == bytes([i]) * 100
        launch(kernel(), a, 1)
        e = event(); ok(cu.cuEventRecord(P(e), P(s))); ok(cu.cuEventSynchronize(P(e)))
        ok(cu.cuCtxSynchronize())
        """).end()
    observed = [args.observed for args in agent.args("completed")]
    for record in agent.records:
        if record.flags & 2:
            assert record.seq in observed
    # Nothing that a thread did after an answer stands before the record of it.
    position = {args.observed: record.seq for record, args in
                zip([r for r in agent.records if r.call_id == 2], agent.args("completed"), strict=True)}
    for record in agent.records:
        if record.flags & 2:
            between = agent.records[record.seq:position[record.seq] - 1]
            assert all(other.thread != record.thread for other in between)


def test_full_journal_blocks_until_release(tmp_path, program):
    with FakeAgent(tmp_path, journal_limit=MIB) as agent:
        run = program(agent, """
            import threading
            here = context()
            a = alloc(1 << 20)
            tell("ready"); hear()
            done = []
            def work():
                ok(cu.cuCtxSetCurrent(here))
                for i in range(100):
                    h2d(a, bytes(50000))
                done.append(1)
            t = threading.Thread(target=work); t.start()
            t.join(1.5)
            tell(len(done))
            hear()
            t.join()
            tell(d2h(a, 1)[0])
            """)
        run.hear()
        agent.recycle = False
        run.tell()
        assert run.hear() == 0
        blocked = agent.names().count("memcpy_h2d")
        assert 15 <= blocked <= 30  # about 1 MiB of them
        agent.recycle = True
        agent.let_go()
        run.tell()
        assert run.end() == [0]
        assert agent.names().count("memcpy_h2d") == 100


def test_answers_pass_through_a_full_journal(tmp_path, program):
    """completed() uses reserved space: a waiter gets its answer while others wait for room."""
    with FakeAgent(tmp_path, journal_limit=MIB) as agent:
        run = program(agent, """
            import threading
            here = context()
            a, s = alloc(1 << 20), stream()
            def flood():
                ok(cu.cuCtxSetCurrent(here))
                for _ in range(100):
                    h2d(a, bytes(50000))
            tell("ready"); hear()
            waiter = threading.Thread(target=lambda: (ok(cu.cuStreamSynchronize(P(s))), tell("answered")))
            ok(cu.cuMemsetD8Async(U64(a), 0, SIZE(8), P(s)))
            waiter.start(); hear()
            threading.Thread(target=flood, daemon=True).start()
            hear()
            os._exit(0)
            """)
        run.hear()
        agent.recycle, agent.hold = False, True
        run.tell()
        agent.wait_for("stream_synchronize")
        run.tell()
        agent.wait_for("memcpy_h2d", 15)
        time.sleep(0.3)
        before = agent.names().count("completed")
        agent.let_go()
        assert run.hear() == "answered"
        agent.wait_for("completed", before + 1)
        run.tell()
        run.end()


def test_fork(agent, program):
    told = program(agent, """
        import ctypes
        context()
        a = alloc(1000)
        if not any("/memfd:rgpu-" in line for line in open("/proc/self/maps")):
            sys.exit("the segments of the journal go by another name")
        pid = os.fork()
        if pid == 0:
            out = ctypes.create_string_buffer(8)
            codes = [cu.cuInit(0), cu.cuCtxSynchronize(), cu.cuMemcpyDtoH_v2(out, U64(a), SIZE(8)), free(a)]
            maps = sum("/memfd:rgpu-" in line for line in open("/proc/self/maps"))
            os._exit(0 if codes == [3] * 4 and maps == 0 else 1)
        tell(os.waitpid(pid, 0)[1])
        pid = os.fork()
        if pid == 0:
            sys.exit(0)                      # through destructors: they must not speak for the parent
        tell(os.waitpid(pid, 0)[1])
        h2d(a, b"abc")
        tell(d2h(a, 3).decode())
        """).end()
    assert told == [0, 0, "abc"]


def test_fork_before_init_gets_a_session(agent, program):
    told = program(agent, """
        pid = os.fork()
        if pid == 0:
            context()
            a = alloc(1000)
            h2d(a, b"abc")
            tell(d2h(a, 3).decode())
            sys.stdout.flush()
            sys.exit(0)
        tell(os.waitpid(pid, 0)[1])
        """).end()
    assert told == ["abc", 0]
    assert agent.goodbye.is_set()


def test_parent_is_not_kept_open_by_a_child(agent, program):
    run = program(agent, """
        import time
        context()
        if os.fork() == 0:
            os.close(0); os.close(1); os.close(2)
            time.sleep(5)
            os._exit(0)
        os._exit(0)
        """)
    run.process.wait(20)
    assert agent.ended.wait(4)  # end of file although a child lives


def test_goodbye_at_exit(agent, program):
    program(agent, "context()").end()
    assert agent.goodbye.wait(5)
    assert agent.hello[:2] == (1, agent.hello[1])


def test_ranges_are_reserved_when_loaded(program):
    told = program(None, """
        import mmap
        spans = [line.split()[0].split("-") for line in open("/proc/self/maps")]
        spans = [(int(a, 16), int(b, 16)) for a, b in spans]
        tell([any(a <= p < b for a, b in spans) for p in (0x180000000000, 0x200000000000, 0x2fffffffffff)])
        """).end()
    assert told == [[True, True, True]]


def test_session_open_is_first(agent, program):
    program(agent, "context()", CUDA_LAUNCH_BLOCKING="0", OTHER="x").end()
    assert agent.records[0].seq == 1 and agent.names()[0] == "session_open"
    environment = agent.args("session_open")[0].environment
    assert b"CUDA_LAUNCH_BLOCKING=0\0" in environment and b"OTHER" not in environment
    assert all(len(record.args) < 1 << 20 for record in agent.records) and HEADER_SIZE == 40


def test_refusal(agent, program):
    agent.refusal = 101
    assert program(agent, "tell([cu.cuInit(0), cu.cuCtxSynchronize()])").end() == [[101, 3]]


def test_an_error_sticks(agent, program):
    run = program(agent, """
        import time
        context()
        a, s = alloc(1000), stream()
        tell("ready"); hear()
        cu.cuMemcpyHtoD_v2(U64(a), b"x", SIZE(1))  # awaited: it may be told of the error, or not yet
        for _ in range(200):
            if cu.cuCtxSynchronize(): break
            time.sleep(0.01)
        out = c.create_string_buffer(8)
        tell([cu.cuCtxSynchronize(), cu.cuMemcpyDtoH_v2(out, U64(a), SIZE(8)),
              cu.cuMemAlloc_v2(c.byref(U64()), SIZE(8)), cu.cuStreamQuery(P(s)), free(a)])
        """)
    run.hear()
    agent.error = 700
    run.tell()
    assert run.end() == [[700] * 5]


def test_a_broken_answer_ends_the_link_not_the_program(agent, program):
    run = program(agent, """
        context()
        memory = alloc(64)
        tell("ready"); hear()
        h2d(memory, b"x")
        tell(cu.cuCtxSynchronize())
        """)
    run.hear()
    agent.hold = True
    run.tell()
    agent.wait_for("context_synchronize")
    seq = agent.records[-1].seq
    agent.sockets[0].sendall(struct.pack("<IIQiII", 24, 33, seq, 0, 0, 1 << 31) + bytes(4))
    assert run.end() == [802]
