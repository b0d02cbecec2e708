"""Pinned memory that kernels use: when its mirror is read, and what is taken for its address."""

from __future__ import annotations

PINNED = """
        def pinned(size):
            p = P()
            ok(cu.cuMemHostAlloc(c.byref(p), SIZE(size), 2))
            return p.value
"""


def test_a_copy_from_pinned_memory_waits_for_nothing_that_others_hold(agent, program):
    run = program(agent, PINNED + """
        import time
        context()
        f, used, unused, out = kernel(), pinned(4), pinned(4096), alloc(4096)
        ok(launch(f, used, 1))
        tell(1)
        hear()
        time.sleep(0.3)                  # the watermark comes: the kernel is known to be complete
        ok(cu.cuMemcpyHtoDAsync_v2(U64(out), P(unused), SIZE(4096), None))
        tell(2)
        hear()
        ok(cu.cuCtxSynchronize())
        tell(3)
        """)
    run.hear()
    agent.wait_for("launch")
    run.tell()
    run.hear()
    assert "host_mirror_read" not in agent.names()
    run.tell()
    run.hear()
    run.end()
    assert agent.names().count("host_mirror_read") == 1


def test_a_copy_from_pinned_memory_waits_for_the_kernel_that_writes_it(agent, program):
    told = program(agent, PINNED + """
        context()
        f, used, other, out = kernel(), pinned(16), pinned(16), alloc(16)
        ok(launch(f, used, 7))
        ok(launch(f, other, 9))
        ok(cu.cuMemcpyHtoDAsync_v2(U64(out), P(used), SIZE(16), None))
        tell(list(d2h(out, 16)))
        """).end()
    assert told == [[7] * 16]


def test_mirrors_are_all_asked_for_before_the_first_is_waited_for(agent, program):
    told = program(agent, PINNED + """
        context()
        f, ranges = kernel(), [pinned(4096) for _ in range(3)]
        for i, p in enumerate(ranges):
            ok(launch(f, p, i + 1))
        ok(cu.cuCtxSynchronize())
        tell([list(c.string_at(p, 2)) for p in ranges])
        ok(cu.cuCtxSynchronize())
        """).end()
    assert told == [[[1, 1], [2, 2], [3, 3]]]
    reads = agent.seqs("host_mirror_read")
    assert len(reads) == 3
    assert reads[0] not in agent.observed_before(reads[-1])


def test_two_integers_side_by_side_are_no_pinned_memory(agent, program):
    """A size of 6144 behind a zero: what 0x1800_0000_0000 looks like."""
    program(agent, PINNED + """
        context()
        f, a = kernel(), alloc(4096)
        for size in (4096, 1 << 20, 64 << 20):
            pinned(size)
        for low in (0, 1, 512, 1 << 20):
            for high in (6144, 6208, 6272, 6399):
                values = (U64(a), c.c_int(low), c.c_int(high))
                params = (P * 3)(*(c.addressof(v) for v in values))
                ok(cu.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, None, params, None))
        ok(cu.cuCtxSynchronize())
        """).end()
    assert agent.names().count("launch") == 16
    assert not {"host_mirror_write", "host_mirror_read"} & set(agent.names())


def test_a_memset_of_pinned_memory_is_seen_when_it_returns(agent, program):
    """The synchronous one, in all its forms; the other one at the next wait."""
    told = program(agent, PINNED + """
        context()
        p, s = pinned(64), stream()
        look = lambda n=8: list(c.string_at(p, n))
        steps = [cu.cuMemsetD8_v2(U64(p), 7, SIZE(4)), look()]
        steps += [cu.cuMemsetD16_v2(U64(p + 4), 0x0102, SIZE(1)), look()]
        steps += [cu.cuMemsetD2D32_v2(U64(p), SIZE(16), 5, SIZE(1), SIZE(2)), look(20)[::4]]
        steps += [cu.cuMemsetD8Async(U64(p), 9, SIZE(2), P(s)), cu.cuStreamSynchronize(P(s)), look(4)]
        tell(steps)
        """).end()
    assert told == [[0, [7, 7, 7, 7, 0, 0, 0, 0], 0, [7, 7, 7, 7, 2, 1, 0, 0], 0, [5, 2, 0, 0, 5], 0, 0, [9, 9, 0, 0]]]


def test_registered_memory_has_a_device_pointer_when_it_is_asked_for(agent, program):
    """A kernel writes what the program has at its own address; each wrong use has the driver's code."""
    told = program(agent, PINNED + """
        context()
        f, memory = kernel(), c.create_string_buffer(20_000)
        at, other = c.addressof(memory) + 100, c.create_string_buffer(64)
        register = lambda p, n, flags=0: cu.cuMemHostRegister_v2(P(p), SIZE(n), flags)
        unregister = lambda p: cu.cuMemHostUnregister(P(p))
        pointer = U64()
        def device(p, flags=0):
            return cu.cuMemHostGetDevicePointer_v2(c.byref(pointer), P(p), flags)
        wrong = [unregister(at), device(at), register(0, 8), register(at, 0), register(at, 8, 16), register(4096, 64),
                 register(at, 8, 4)]
        ok(register(at, 10_000, 3))
        wrong += [register(at + 5000, 10), register(at, 10_000), unregister(at + 1), cu.cuMemFreeHost(P(at)),
                  device(at, 1)]
        flags = c.c_uint()
        ok(cu.cuMemHostGetFlags(c.byref(flags), P(at)))
        tell(1)                                         # no mirror was needed yet
        hear()
        ok(device(at + 7))
        inner = pointer.value
        ok(device(at))
        first = pointer.value
        memory.raw = b"p" * 20_000
        ok(launch(f, first, 9))
        ok(cu.cuCtxSynchronize())
        seen = [memory.raw[99], memory.raw[100], memory.raw[101], memory.raw[10_100]]
        host, kind = P(), c.c_uint()
        ok(cu.cuPointerGetAttribute(c.byref(host), 4, U64(first + 3)))
        ok(cu.cuPointerGetAttribute(c.byref(kind), 2, U64(first)))
        ok(unregister(at))
        tell([wrong, flags.value, inner - first, (first - at) % 4096, seen, host.value - at, kind.value,
              unregister(at), cu.cuMemsetD8_v2(U64(first), 1, SIZE(1))])
        """)
    told.hear()
    assert "host_allocate" not in agent.names()
    told.tell()
    wrong, flags, inner, alignment, seen, host, kind, again, gone = told.hear()
    told.end()
    assert wrong == [713, 1, 1, 1, 1, 1, 801, 712, 712, 713, 1, 1]
    assert (flags, inner, alignment, host, kind, again, gone) == (3, 7, 0, 3, 1, 713, 1)
    assert seen[0] == seen[3] == ord("p") and seen[1] == ord("p") + 9
    assert agent.names().count("host_allocate") == agent.names().count("host_free") == 1


def test_a_context_leaves_registered_memory_with_what_kernels_wrote(agent, program):
    told = program(agent, """
        context()
        memory, pointer = c.create_string_buffer(4096), U64()
        at = c.addressof(memory)
        ok(cu.cuMemHostRegister_v2(P(at), SIZE(4096), 2))
        ok(cu.cuMemHostGetDevicePointer_v2(c.byref(pointer), P(at), 0))
        ok(launch(kernel(), pointer.value, 6))
        ok(cu.cuDevicePrimaryCtxReset_v2(0))
        tell(memory.raw[0])
        """).end()
    assert told == [6]
    assert agent.names().count("host_free") == 1
