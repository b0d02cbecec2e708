"""Stream capture: what becomes of calls in a capturing stream, and every error that a driver documents."""

from __future__ import annotations

from tests.support.shim.captures import program_of


def test_a_capture_is_not_on_the_wire(agent, program):
    told = program(agent, program_of("""
        context()
        f, a, s = kernel(), alloc(4096), stream()
        tell([begin(s), status(s)])
        ok(launch(f, a, 3, s)); ok(fill(a + 64, s)); ok(cu.cuMemcpyDtoDAsync_v2(U64(a + 128), U64(a), SIZE(16), P(s)))
        code, graph = end(s)
        found = nodes(graph)
        tell([code, status(s), [kind(n) for n in found], [[found.index(b) for b in before(n)] for n in found]])
        x = instantiate(graph)
        ok(cu.cuGraphDestroy(P(graph)))
        for _ in range(3): ok(start(x, s))
        ok(cu.cuGraphExecDestroy(P(x)))
        tell([start(x, s), cu.cuGraphExecDestroy(P(x))])
        """)).end()
    assert told == [[0, 1], [0, 0, [0, 2, 1], [[], [0], [1]]], [1, 1]]
    names = agent.names()
    assert not {"launch", "memset", "memcpy_d2d"} & set(names)
    assert names.count("graph_instantiate") == 1 and names.count("graph_launch") == 3
    assert names.count("graph_exec_destroy") == 1
    (kernel, memset, copy) = agent.graph_nodes(agent.args("graph_instantiate")[0].exec)
    assert (kernel.grid, kernel.dependencies, memset.dependencies, copy.dependencies) == ((1, 1, 1), (), (0,), (1,))
    assert (copy.width, copy.height, copy.depth) == (16, 1, 1)


def test_fork_and_join(agent, program):
    told = program(agent, program_of("""
        context()
        a, s, t = alloc(4096), stream(), stream()
        fork, joined = event(2), event(2)
        ok(begin(s)); ok(fill(a, s)); ok(record(fork, s)); ok(wait(t, fork))
        ok(fill(a + 16, t)); ok(fill(a + 32, s))
        inside = [status(s), status(t)]
        ok(record(joined, t)); ok(wait(s, joined)); ok(fill(a + 48, s))
        code, graph = end(s)
        found = nodes(graph)
        tell([inside, code, status(t), [sorted(found.index(b) for b in before(n)) for n in found]])
        """)).end()
    assert told == [[[1, 1], 0, 0, [[], [0], [0], [1, 2]]]]


def test_every_error_of_capture(agent, program):
    """Each in a capture of its own, which it invalidates where the documentation says so."""
    told = program(agent, program_of("""
        context()
        a, s, t, u, blocking = alloc(4096), stream(), stream(), stream(), stream(0)
        e, f, g = event(2), event(2), event(2)
        def outcome(name, *codes):
            tell([name, *codes, status(s), end(s)[0]])
        ok(begin(s)); outcome("again", begin(s))
        tell(["legacy", begin(None), begin(s, 9), end(s)[0], end(None)[0]])
        for name, call in (("synchronize", lambda: cu.cuStreamSynchronize(P(s))),
                           ("query", lambda: cu.cuStreamQuery(P(s))), ("context", lambda: cu.cuCtxSynchronize()),
                           ("alloc", lambda: cu.cuMemAlloc_v2(c.byref(U64()), SIZE(1))),
                           ("free", lambda: cu.cuMemFree_v2(U64(a)))):
            ok(begin(s)); outcome(name, call(), fill(a, s))
        ok(begin(s)); ok(record(e, s)); outcome("event query", cu.cuEventQuery(P(e)))
        tell(["over", cu.cuEventQuery(P(e)), wait(t, e), cu.cuEventSynchronize(P(e))])
        ok(record(e, t)); tell(["recorded again", cu.cuEventSynchronize(P(e))])
        ok(begin(s)); outcome("isolation", wait(s, e))
        ok(begin(s)); outcome("never recorded", wait(s, g))
        ok(begin(s)); ok(begin(u)); ok(record(f, u)); code = wait(s, f)
        tell(["merge", code, end(u)[0]]); outcome("merged")
        ok(begin(s)); ok(record(f, s)); ok(wait(t, f)); ok(fill(a, t))
        tell(["unmatched", end(t)[0], status(t)]); outcome("after that")
        ok(begin(s)); ok(record(f, s)); ok(wait(t, f)); ok(fill(a, t)); outcome("unjoined")
        ok(begin(s)); ok(record(f, s)); ok(wait(t, f)); outcome("joined without work")
        ok(begin(blocking)); code = fill(a, None); tell(["implicit", code, status(blocking), end(blocking)[0]])
        ok(begin(s)); outcome("legacy beside a non-blocking capture", fill(a, None))
        value = c.c_int(); ok(begin(blocking))
        tell(["asked", cu.cuStreamIsCapturing(None, c.byref(value)), status(blocking), end(blocking)[0]])
        """)).end()
    assert told == [
        ["again", 401, 1, 0],
        ["legacy", 900, 1, 401, 401],
        ["synchronize", 900, 901, 2, 901], ["query", 900, 901, 2, 901], ["context", 900, 901, 2, 901],
        ["alloc", 900, 901, 2, 901], ["free", 900, 901, 2, 901],
        ["event query", 907, 2, 901],
        ["over", 907, 907, 907],
        ["recorded again", 0],
        ["isolation", 905, 2, 901],
        ["never recorded", 0, 1, 0],
        ["merge", 902, 901], ["merged", 2, 901],
        ["unmatched", 903, 2], ["after that", 2, 901], ["unjoined", 1, 904],
        ["joined without work", 1, 0],
        ["implicit", 906, 2, 901],
        ["legacy beside a non-blocking capture", 0, 1, 0],
        ["asked", 906, 1, 0],
    ]


def test_modes_and_threads(agent, program):
    """What other threads may do during a capture, and who may end it."""
    told = program(agent, program_of("""
        import threading
        context()
        s = stream()
        def exchange(mode):
            value = c.c_int(mode)
            return cu.cuThreadExchangeStreamCaptureMode(c.byref(value)), value.value
        def elsewhere(work):
            out = []
            def run():
                current = P(); ok(cu.cuDevicePrimaryCtxRetain(c.byref(current), 0)); ok(cu.cuCtxSetCurrent(current))
                out.append(work())
            thread = threading.Thread(target=run); thread.start(); thread.join()
            return out[0]
        def allocates(): return cu.cuMemAlloc_v2(c.byref(U64()), SIZE(512))
        for mode in (GLOBAL, LOCAL, RELAXED):
            ok(begin(s, mode)); other = elsewhere(allocates); after = status(s); end(s)
            ok(begin(s, mode)); own = allocates(); end(s)
            ok(begin(s, mode)); ended = elsewhere(lambda: end(s)[0])
            tell([mode, other, after, own, ended, end(s)[0]])
        ok(begin(s)); first = exchange(RELAXED); own = allocates(); second = exchange(first[1])
        tell([first, own, second, status(s), end(s)[0], cu.cuThreadExchangeStreamCaptureMode(None), exchange(5)[0]])
        """)).end()
    assert told == [[0, 900, 2, 900, 908, 0], [1, 0, 1, 900, 908, 0], [2, 0, 1, 0, 0, 401],
                    [[0, 0], 0, [0, 2], 1, 0, 1, 1]]


def test_capture_info_and_dependencies(agent, program):
    told = program(agent, program_of("""
        context()
        a, s = alloc(4096), stream()
        def info():
            state, ident, graph, deps, n = c.c_int(), c.c_uint64(), P(), c.POINTER(P)(), SIZE()
            ok(cu.cuStreamGetCaptureInfo_v2(P(s), c.byref(state), c.byref(ident), c.byref(graph), c.byref(deps),
                                            c.byref(n)))
            return state.value, ident.value, graph.value, [deps[i] for i in range(n.value)]
        outside = info()[0]
        ok(begin(s)); first = info(); ok(fill(a, s)); second = info()
        root = (P * 1)(*second[3])
        ok(fill(a, s))
        ok(cu.cuStreamUpdateCaptureDependencies(P(s), root, SIZE(1), 0)); both = len(info()[3])
        ok(cu.cuStreamUpdateCaptureDependencies(P(s), root, SIZE(1), 1)); one = info()[3] == second[3]
        ok(cu.cuStreamUpdateCaptureDependencies(P(s), None, SIZE(0), 1)); none = info()[3]
        code, graph = end(s)
        again = begin(s); later = info()[1]
        tell([outside, first[0], first[3], graph == first[2] == second[2], len(second[3]), both, one, none, code,
              first[1] == second[1], later > first[1], cu.cuGraphDestroy(P(info()[2])), end(s)[0],
              cu.cuStreamUpdateCaptureDependencies(P(s), None, SIZE(0), 1)])
        """)).end()
    assert told == [[0, 1, [], True, 1, 2, True, [], 0, True, True, 1, 0, 401]]


def test_capture_into_a_graph(agent, program):
    told = program(agent, program_of("""
        context()
        a, s, graph, root = alloc(4096), stream(), P(), P()
        ok(cu.cuGraphCreate(c.byref(graph), 0)); ok(cu.cuGraphAddEmptyNode(c.byref(root), graph, None, SIZE(0)))
        ok(cu.cuStreamBeginCaptureToGraph(P(s), graph, (P * 1)(root), None, SIZE(1), GLOBAL))
        ok(fill(a, s))
        code, same = end(s)
        found = nodes(graph.value)
        ok(cu.cuStreamBeginCaptureToGraph(P(s), graph, None, None, SIZE(0), GLOBAL))
        ok(cu.cuStreamSynchronize(P(s)) - 900)
        failed = end(s)
        tell([code, same == graph.value, [kind(n) for n in found], before(found[1]) == [root.value], failed,
              len(nodes(graph.value))])
        """)).end()
    assert told == [[0, True, [5, 2], True, [901, None], 2]]


def test_streams_and_graphs_that_go(agent, program):
    told = program(agent, program_of("""
        context()
        a, s, t, e = alloc(4096), stream(), stream(), event(2)
        ok(begin(s)); ok(record(e, s)); ok(wait(t, e)); ok(cu.cuStreamDestroy_v2(P(t))); first = end(s)[0]
        t = stream(); ok(begin(s)); ok(record(e, s)); ok(wait(t, e)); ok(fill(a, t)); ok(cu.cuStreamDestroy_v2(P(t)))
        second = end(s)[0]
        ok(begin(s)); ok(cu.cuStreamDestroy_v2(P(s))); t = stream()
        tell([first, second, cu.cuMemAlloc_v2(c.byref(U64()), SIZE(1)), status(t)])
        """)).end()
    assert told == [[0, 901, 0, 0]]
