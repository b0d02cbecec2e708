"""Memory: the quota without a round trip, frees, pointers, copies."""

from __future__ import annotations

import random

from tests.support.shim.fake_agent import MIB, FakeAgent


def test_quota_is_exact_and_asks_nobody(agent, program):
    told = program(agent, """
        context()
        before = info()
        held = []
        while True:
            address = U64()
            code = cu.cuMemAlloc_v2(c.byref(address), SIZE(9 << 20))
            if code:
                break
            held.append(address.value)
        left = info()[0]
        rest = alloc(left)                       # what is said to be free can be had
        tell([before, code, len(held), left, info()[0], cu.cuMemAlloc_v2(c.byref(address), SIZE(1))])
        """).end()
    assert told == [[[256 * MIB, 256 * MIB], 2, 25, 6 * MIB, 0, 2]]
    assert agent.awaited() == []


def test_out_of_quota_is_said_once_with_quota_use_and_the_option(tmp_path, program):
    with FakeAgent(tmp_path, quota=64 * MIB) as agent:
        process = program(agent, """
            context()
            alloc(40 << 20)
            address, physical = U64(), U64()
            tell([cu.cuMemAlloc_v2(c.byref(address), SIZE(30 << 20)) for _ in range(3)])
            """)
        assert process.end() == [[2, 2, 2]]
        (line,) = process.errors().splitlines()
    assert line.endswith("out of memory: 30.0 MiB were asked for, and 40.0 MiB of the session's quota of 64.0 MiB are "
                         "in use; rgpu run --memory SIZE asks for more")


def test_small_allocations_share_a_granule(agent, program):
    told = program(agent, """
        context()
        addresses = [alloc(100) for _ in range(2048)]
        tell([info()[0], max(a % 512 for a in addresses), len(set(addresses))])
        for address in addresses:
            ok(free(address))
        tell(info()[0])
        """).end()
    assert told == [[254 * MIB, 0, 2048], 256 * MIB]
    assert agent.names().count("memory_map") == 1


def test_rest_of_the_quota_can_be_allocated(tmp_path, program):
    with FakeAgent(tmp_path, quota=5 * MIB) as agent:  # not a multiple of the granule
        told = program(agent, """
            context()
            tell(info())
            alloc(1)
            tell(info())
            alloc(info()[0])
            tell(info())
            """).end()
        assert told == [[4 * MIB, 4 * MIB], [2 * MIB, 4 * MIB], [0, 4 * MIB]]
        assert agent.awaited() == []


def test_wild_pointers_give_codes(agent, program):
    told = program(agent, """
        context()
        a = alloc(1000)
        host = c.create_string_buffer(4096)
        codes = {}
        codes["free inside"] = free(a + 8)
        codes["free wild"] = free(0x200000000000 + (1 << 40))
        codes["free host"] = free(c.addressof(host))
        codes["free null"] = free(0)
        codes["overrun"] = cu.cuMemcpyHtoD_v2(U64(a), host, SIZE(1001))
        codes["exact"] = cu.cuMemcpyHtoD_v2(U64(a), host, SIZE(1000))
        codes["before"] = cu.cuMemcpyHtoD_v2(U64(a - 1), host, SIZE(1))
        codes["to host"] = cu.cuMemcpyHtoD_v2(U64(c.addressof(host)), host, SIZE(1))
        codes["from wild"] = cu.cuMemcpyDtoH_v2(host, U64(0xdeadbeef), SIZE(1))
        codes["empty"] = cu.cuMemcpyHtoD_v2(U64(0xdeadbeef), host, SIZE(0))
        codes["null source"] = cu.cuMemcpyHtoD_v2(U64(a), None, SIZE(1))
        codes["memset over"] = cu.cuMemsetD32_v2(U64(a), 1, SIZE(251))
        codes["memset odd"] = cu.cuMemsetD32_v2(U64(a + 2), 1, SIZE(1))
        codes["d2d over"] = cu.cuMemcpyDtoD_v2(U64(a), U64(a + 999), SIZE(2))
        codes["stream"] = cu.cuStreamSynchronize(P(0x1234560))
        codes["event"] = cu.cuEventQuery(P(c.addressof(host)))
        codes["launch"] = launch(P(0x7000), a, 1)
        ok(free(a))
        codes["twice"] = free(a)
        tell(codes)
        """).end()[0]
    assert told == {"free inside": 1, "free wild": 1, "free host": 1, "free null": 0, "overrun": 1, "exact": 0,
                    "before": 1, "to host": 1, "from wild": 1, "empty": 0, "null source": 1, "memset over": 1,
                    "memset odd": 1, "d2d over": 1, "stream": 400, "event": 400, "launch": 400, "twice": 1}


def test_a_blocking_copy_to_the_device_is_observed(agent, program):
    """Behind it the program may use the bytes on any stream: its end stands in the journal (SEMANTICS 1)."""
    program(agent, """
        context()
        a, host = alloc(1000), c.create_string_buffer(1000)
        ok(cu.cuMemcpyHtoDAsync_v2(U64(a), host, SIZE(1000), None))
        ok(cu.cuMemcpyHtoD_v2(U64(a), host, SIZE(1000)))
        ok(cu.cuMemcpy(U64(a), U64(c.addressof(host)), SIZE(1000)))
        tell(0)
        """).end()
    names = [name for name in agent.names() if name in ("memcpy_h2d", "stream_synchronize", "completed")]
    assert names[:7] == ["memcpy_h2d", *["memcpy_h2d", "stream_synchronize", "completed"] * 2], names
    assert agent.awaited()[:2] == ["stream_synchronize"] * 2


def test_big_payload_goes_through_a_bulk_segment(agent, program):
    size = 70 * MIB + 13
    told = program(agent, f"""
        import hashlib, random
        context()
        data = random.Random(5).randbytes({size})
        a = alloc(len(data))
        h2d(a, data)
        h2d(a, data[:65536])
        h2d(a, data[:65537])
        tell(hashlib.sha256(data).hexdigest())
        tell(hashlib.sha256(d2h(a, len(data))).hexdigest())
        """).end()
    assert told[0] == told[1]
    assert agent.external == 5 + 17 + 1  # uploads: five growing calls, then 4 MiB each; what is small is inline
    assert bytes(agent.records[agent.names().index("memcpy_h2d")].payload[:16]) == random.Random(5).randbytes(16)


def test_many_bulk_copies_recycle_segments(tmp_path, program):
    with FakeAgent(tmp_path, journal_limit=100 * MIB) as agent:
        told = program(agent, """
            context()
            a = alloc(12 << 20)
            for i in range(60):                        # 720 MiB through a journal of 100
                h2d(a, bytes([i]) * (12 << 20))
            tell(d2h(a, 4)[0])
            tell(sum("/memfd:rgpu-bulk" in line for line in open("/proc/self/maps")))
            """).end()
        assert told[0] == 59
        assert told[1] < 10
        assert agent.external == 60 * 7  # five growing calls and two of 4 MiB


def test_rows(agent, program):
    told = program(agent, """
        context()
        class C2(c.Structure):
            _fields_ = [("srcX", SIZE), ("srcY", SIZE), ("srcType", c.c_int), ("srcHost", P), ("srcDevice", U64),
                        ("srcArray", P), ("srcPitch", SIZE), ("dstX", SIZE), ("dstY", SIZE), ("dstType", c.c_int),
                        ("dstHost", P), ("dstDevice", U64), ("dstArray", P), ("dstPitch", SIZE), ("w", SIZE),
                        ("h", SIZE)]
        address, pitch = U64(), SIZE()
        ok(cu.cuMemAllocPitch_v2(c.byref(address), c.byref(pitch), SIZE(10), SIZE(4), 4))
        source = bytes(range(48))
        p = C2(srcType=1, srcHost=c.cast(c.c_char_p(source), P), srcPitch=12, dstType=2,
               dstDevice=address, dstPitch=pitch, w=10, h=4)
        ok(cu.cuMemcpy2D_v2(c.byref(p)))
        out = c.create_string_buffer(64)
        q = C2(srcX=1, srcY=1, srcType=2, srcDevice=address, srcPitch=pitch, dstType=1,
               dstHost=c.addressof(out), dstPitch=16, w=3, h=2)
        ok(cu.cuMemcpy2D_v2(c.byref(q)))
        q.h = 4
        tell([pitch.value, list(out.raw[:3]), list(out.raw[16:19]), cu.cuMemcpy2D_v2(c.byref(q))])
        """).end()
    assert told == [[512, [13, 14, 15], [25, 26, 27], 1]]


def test_free_is_local_when_nothing_is_unfinished(agent, program):
    run = program(agent, """
        context()
        a, b = alloc(4 << 20), alloc(4 << 20)
        h2d(a, b"x" * 100)
        ok(cu.cuCtxSynchronize())
        ok(free(a))
        tell(info()[0])
        h2d(b, b"x" * 100)
        while cu.cuStreamQuery(None): pass
        tell("idle"); hear()
        tell(free(b))
        """)
    assert run.hear() == 252 * MIB
    assert "memory_free_wait" not in agent.names()
    assert run.hear() == "idle"
    agent.hold = True  # not before the watermark of the second copy was sent: nothing would send it then
    run.tell()
    assert run.end() == [0]


def test_free_waits_for_unfinished_work(agent, program):
    run = program(agent, """
        context()
        a = alloc(4 << 20)
        tell("ready"); hear()
        h2d(a, b"x" * 100)
        tell(free(a))
        b = alloc(4 << 20)
        tell(b == a)
        """)
    run.hear()
    agent.hold = True
    run.tell()
    agent.wait_for("memory_free_wait")
    assert "memory_unmap" not in agent.names()  # neither unmapped nor handed out before
    agent.let_go()
    assert run.end() == [0, True]
    names = agent.names()
    assert names.index("memory_free_wait") < names.index("completed") < names.index("memory_unmap")


def test_stream_ordered_free_waits_without_being_awaited(agent, program):
    run = program(agent, """
        context()
        s = stream()
        a = U64()
        ok(cu.cuMemAllocAsync(c.byref(a), SIZE(200 << 20), P(s)))
        tell("ready"); hear()
        ok(cu.cuMemsetD8Async(a, 1, SIZE(100), P(s)))
        ok(cu.cuMemFreeAsync(a, P(s)))
        tell(info()[0])
        hear()
        ok(cu.cuStreamSynchronize(P(s)))
        tell(info()[0])
        """)
    run.hear()
    agent.hold = True
    run.tell()
    assert run.hear() == 56 * MIB
    assert "memory_free" not in agent.names()
    agent.let_go()
    run.tell()
    assert run.end() == [256 * MIB]


def test_pointer_attributes(agent, program):
    told = program(agent, """
        context()
        a = alloc(1000)
        host = c.create_string_buffer(8)
        def ask(which, pointer, kind):
            out = kind()
            return [cu.cuPointerGetAttribute(c.byref(out), which, U64(pointer)), out.value]
        p = P()
        ok(cu.cuMemHostAlloc(c.byref(p), SIZE(5000), 0))
        tell([ask(2, a, c.c_uint), ask(9, a + 10, c.c_int), ask(11, a + 10, U64)[1] == a, ask(12, a, SIZE)[1],
              ask(2, c.addressof(host), c.c_uint), ask(2, p.value, c.c_uint), p.value >> 40 == 0x18])
        """).end()
    assert told == [[[0, 2], [0, 0], True, 1000, [1, 0], [0, 1], True]]


def test_booleans_of_pointers_are_words(agent, program):
    """The CUDA runtime asks with an int that it did not set, and tells managed memory by it."""
    told = program(agent, """
        context()
        address = alloc(4096)
        def ask(pointer, which):
            out = (c.c_uint32 * 2)(0xAAAAAAAA, 0xBBBBBBBB)
            many = (c.c_uint32 * 2)(0xAAAAAAAA, 0xBBBBBBBB)
            code = cu.cuPointerGetAttribute(out, which, U64(pointer))
            both = cu.cuPointerGetAttributes(1, (c.c_int * 1)(which), (P * 1)(c.addressof(many)), U64(pointer))
            return [code, out[0], out[1] == 0xBBBBBBBB, both, many[0], many[1] == 0xBBBBBBBB]
        tell([ask(address, 8), ask(address, 13), ask(c.addressof(c.create_string_buffer(8)), 8)])
        """).end()
    assert told == [[[0, 0, True, 0, 0, True], [0, 1, True, 0, 1, True], [1, 0xAAAAAAAA, True, 0, 0, True]]]
