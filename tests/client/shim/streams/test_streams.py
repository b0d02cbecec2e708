"""Streams, events, launches, host functions, pinned memory."""

from __future__ import annotations


def test_queries_are_answered_from_the_watermark(agent, program):
    run = program(agent, """
        import time
        context()
        a, s, e = alloc(1000), stream(), event()
        tell([cu.cuStreamQuery(P(s)), cu.cuEventQuery(P(e))])
        hear()
        h2d(a, b"x", s)
        ok(cu.cuEventRecord(P(e), P(s)))
        tell([cu.cuStreamQuery(P(s)), cu.cuEventQuery(P(e)), cu.cuStreamQuery(None)])
        hear()
        for _ in range(200):
            if not cu.cuEventQuery(P(e)): break
            time.sleep(0.01)
        tell([cu.cuEventQuery(P(e)), cu.cuStreamQuery(P(s)), cu.cuStreamSynchronize(P(s)), cu.cuEventSynchronize(P(e))])
        """)
    assert run.hear() == [0, 0]
    agent.hold = True
    run.tell()
    assert run.hear() == [600, 600, 0]
    assert "completed" not in agent.names()  # NOT_READY is not journaled
    agent.let_go()
    run.tell()
    assert run.end() == [[0, 0, 0, 0]]
    assert agent.awaited() == []
    record = agent.names().index("event_record") + 1
    observed = [args.observed for args in agent.args("completed")]
    assert record in observed and len(observed) <= 3  # once for the event, once for the stream


def test_synchronise_awaits_only_unknown_work(agent, program):
    program(agent, """
        context()
        a, s = alloc(1000), stream()
        ok(cu.cuStreamSynchronize(P(s)))
        h2d(a, b"x", s)
        ok(cu.cuStreamSynchronize(P(s)))
        ok(cu.cuStreamSynchronize(P(s)))
        """).end()
    assert len(agent.awaited()) <= 1


def test_elapsed_and_wrong_events(agent, program):
    told = program(agent, """
        context()
        a, b, untimed = event(), event(), event(2)
        out = c.c_float()
        codes = [cu.cuEventElapsedTime(c.byref(out), P(a), P(b))]
        for e in (a, b, untimed):
            ok(cu.cuEventRecord(P(e), None))
        for end in (untimed, b):
            codes.append(cu.cuEventElapsedTime(c.byref(out), P(a), P(end)))
        tell([codes, out.value, cu.cuEventDestroy_v2(P(a)), cu.cuEventDestroy_v2(P(a)),
              cu.cuEventCreate(c.byref(P()), 64)])
        """).end()
    assert told == [[[400, 400, 0], 1.5, 0, 400, 1]]


def test_handles(agent, program):
    told = program(agent, """
        context()
        streams = [stream() for _ in range(50)]
        zeros = all(c.string_at(s, 4096) == bytes(4096) for s in streams)
        ok(cu.cuStreamDestroy_v2(P(streams[0])))
        flags, priority = c.c_uint(), c.c_int()
        ok(cu.cuStreamGetFlags(P(streams[1]), c.byref(flags)))
        other = P()
        ok(cu.cuStreamCreateWithPriority(c.byref(other), 0, -100))
        ok(cu.cuStreamGetPriority(other, c.byref(priority)))
        codes = [cu.cuStreamSynchronize(P(streams[0])), cu.cuStreamDestroy_v2(P(streams[0])),
                 cu.cuStreamSynchronize(P(streams[1] + 8)), cu.cuStreamDestroy_v2(P(2)), cu.cuEventQuery(P(streams[1]))]
        tell([zeros, len(set(streams)), flags.value, priority.value, codes])
        """).end()
    assert told == [[True, 50, 1, -5, [400, 400, 400, 400, 400]]]
    numbers = [args.stream for args in agent.args("stream_create")]
    assert min(numbers) >= 16 and len(set(numbers)) == len(numbers)


def test_launch_checks_and_parameters(agent, program):
    told = program(agent, """
        context()
        a, f = alloc(1000), kernel()
        codes = [launch(f, a, 3), launch(f, a, 1, grid=(0, 1, 1)), launch(f, a, 1, grid=(1, 65536, 1)),
                 launch(f, a, 1, block=(1025, 1, 1)), launch(f, a, 1, block=(32, 33, 1)),
                 launch(f, a, 1, block=(1, 1, 65)), launch(f, a, 1, shared=49137),
                 launch(f, a, 1, shared=49136)]
        size = SIZE(16)
        buffer = (c.c_uint64 * 2)(a, 5)
        extra = (P * 5)(1, c.addressof(buffer), 2, c.addressof(size), None)
        codes.append(cu.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, None, None, extra))
        for size.value in (9, 0):  # fewer bytes than the parameters are taken, none are not: as a driver has it
            codes.append(cu.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, None, None, extra))
        codes.append(cu.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, None, None, None))
        tell([codes, list(d2h(a, 2)), cu.cuCtxSynchronize()])
        """).end()
    assert told == [[[0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1], [14, 14], 0]]
    given = [bytes(args.parameters) for args in agent.args("launch")]
    assert given[0][8:12] == bytes([3, 0, 0, 0]) and given[-1] == given[-2], "what was not given is zeros"


def test_registers_beyond_the_block_are_out_of_resources(agent, program):
    from rgpu.session.objects.module_table import FunctionInfo, ModuleTable
    from tests.support.shim import fake_agent

    greedy = FunctionInfo("kernel", fake_agent.KERNEL.parameters, (256, 0, 0, 0, 200, 75, 75, 0, 49152, *[0] * 7))
    saved = fake_agent.TABLE
    fake_agent.TABLE = ModuleTable((greedy,), ())
    try:
        told = program(agent, """
            context()
            a, f = alloc(1000), kernel()
            tell([launch(f, a, 1, block=(threads, 1, 1)) for threads in (1024, 288, 256)])
            """).end()
    finally:
        fake_agent.TABLE = saved
    assert told == [[701, 1, 0]]


def test_launch_blocking(agent, program):
    program(agent, """
        context()
        ok(launch(kernel(), alloc(1000), 1))
        """, CUDA_LAUNCH_BLOCKING="1").end()
    assert agent.awaited()[-1] == "stream_synchronize"


def test_host_function_runs_before_its_stream_goes_on(agent, program):
    run = program(agent, """
        context()
        a, s = alloc(1000), stream()
        ran = []
        FN = c.CFUNCTYPE(None, P)
        CB = c.CFUNCTYPE(None, P, c.c_int, P)
        fn = FN(lambda user: ran.append(user))
        cb = CB(lambda stream, status, user: ran.append([stream == s, status, user]))
        tell("ready"); hear()
        h2d(a, b"x", s)
        ok(cu.cuLaunchHostFunc(P(s), fn, P(7)))
        ok(cu.cuStreamAddCallback(P(s), cb, P(8), 0))
        tell(ran)
        hear()
        ok(cu.cuStreamSynchronize(P(s)))
        while len(ran) < 2: pass
        tell(ran); hear()
        """)
    run.hear()
    agent.hold = True
    run.tell()
    assert run.hear() == []
    agent.let_go()
    run.tell()
    assert run.hear() == [7, [True, 0, 8]]
    agent.wait_for("host_function_done", 2)
    assert run.end() == []
    names = agent.names()
    copy, function = names.index("memcpy_h2d") + 1, names.index("host_function") + 1
    done = names.index("host_function_done")
    observed = [(record.seq, args.observed) for record, args in
                zip([r for r in agent.records if r.call_id == 2], agent.args("completed"), strict=True)]
    # The function knew that the copy was complete: that stands before what it did.
    assert any(what == copy and seq < done + 1 for seq, what in observed)
    assert any(what == function and seq > done + 1 for seq, what in observed)
    assert "host_function" not in agent.awaited()


def test_mapped_memory_travels_both_ways(agent, program):
    told = program(agent, """
        context()
        p, d = P(), U64()
        ok(cu.cuMemHostAlloc(c.byref(p), SIZE(100000), 2))
        ok(cu.cuMemHostGetDevicePointer_v2(c.byref(d), p, 0))
        f = kernel()
        c.memset(p, 5, 100000)
        ok(launch(f, d.value + 64, 1))
        ok(launch(f, d.value + 64, 1))          # the first one's result is not overwritten by old host bytes
        c.memset(p.value + 9000, 9, 1)
        ok(launch(f, d.value + 64, 1))
        ok(cu.cuCtxSynchronize())
        data = c.string_at(p, 100000)
        tell([d.value == p.value, list(data[62:66]), data[80], data[9000], data[99999]])
        out = alloc(100)
        h2d(out, data[64:80])
        ok(cu.cuMemcpyDtoD_v2(U64(out + 16), U64(out), SIZE(16)))
        tell(list(d2h(out + 16, 2)))
        ok(cu.cuMemFreeHost(p))
        tell([cu.cuMemFreeHost(p), cu.cuMemHostGetDevicePointer_v2(c.byref(d), p, 0)])
        """).end()
    assert told == [[True, [5, 5, 8, 8], 5, 9, 5], [8, 8], [1, 1]]
    uploads = agent.args("host_mirror_write")
    assert len(uploads) == 2  # the whole range once, then one byte
    assert agent.names().count("host_mirror_read") == 1


def test_context_destruction_frees_what_it_owns(agent, program):
    told = program(agent, """
        context()
        second = P()
        ok(cu.cuCtxCreate_v2(c.byref(second), 0, 0))
        alloc(8 << 20), stream(), event()
        before = info()[0]
        ok(cu.cuCtxDestroy_v2(second))
        tell([before, cu.cuMemAlloc_v2(c.byref(U64()), SIZE(8))])
        ok(cu.cuCtxSetCurrent(None))
        context()
        tell(info()[0])
        """).end()
    assert told == [[248 << 20, 0], 254 << 20]  # the primary context is current again
    names = agent.names()
    assert names.index("memory_unmap") < names.index("context_destroy")
    assert {"stream_destroy", "event_destroy"} <= set(names)


def test_exports_and_needs(shim):
    import subprocess

    symbols = subprocess.run(["nm", "-D", "--defined-only", str(shim)], capture_output=True, text=True, check=True)
    names = [line.split()[-1] for line in symbols.stdout.splitlines()]
    assert len(names) > 600 and all(name.startswith("cu") for name in names)
    dynamic = subprocess.run(["readelf", "-d", str(shim)], capture_output=True, text=True, check=True).stdout
    needed = {line.split("[")[1].split("]")[0] for line in dynamic.splitlines() if "NEEDED" in line}
    assert needed <= {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}
