"""Managed memory in one process, against the fake agent: what is sent and fetched, who waits, who gets a fault."""

from __future__ import annotations

import signal
import subprocess
import textwrap
from pathlib import Path

from tests.support.eventually import eventually

MANAGED = """
import threading

GLOBAL, HOST, SINGLE, UNIT = 1, 2, 4, 65536

def managed(size, flags=GLOBAL):
    at = U64()
    ok(cu.cuMemAllocManaged(c.byref(at), SIZE(size), flags))
    return at.value, (c.c_ubyte * size).from_address(at.value)

def wait():
    ok(cu.cuCtxSynchronize())
"""
HANDLERS = Path(__file__).parent / "handlers.c"


def code(text: str) -> str:
    return MANAGED + textwrap.dedent(text)


def compiled(folder: Path) -> str:
    library = folder / "handlers.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", str(HANDLERS), "-o", str(library)], check=True)
    return str(library)


def test_launches_send_what_the_cpu_changed_and_touches_fetch(agent, program):
    agent.quiet = True  # a watermark would say that what was sent is there, and no launch had to wait for it
    told = program(agent, code("""
        context()
        f = kernel()
        at, a = managed(10 * UNIT)
        steps = [max(a[::UNIT])]           # new memory is zeros, and here
        a[5], a[3 * UNIT] = 7, 9
        ok(launch(f, at, 1))
        ok(launch(f, at, 1))               # nothing was touched: nothing goes
        wait()
        steps += [list(a[4:7]), a[3 * UNIT], a[9 * UNIT]]
        ok(launch(f, at, 1))               # only looked at: nothing goes
        wait()
        a[0] = 50
        ok(launch(f, at, 1))
        wait()
        tell([*steps, list(a[:6]), cu.cuMemFree_v2(U64(at))])
        """)).end()
    assert told == [[0, [2, 9, 2], 9, 0, [51, 4, 4, 4, 4, 11], 0]]
    sent = [record.payload for record in agent.records if record.call_id == 14]
    assert [len(data) for data in sent] == [65536, 65536, 65536]
    launches, reads = agent.seqs("launch"), agent.seqs("memcpy_d2h")
    assert [sum(a < seq < b for seq in reads) for a, b in zip(launches[1:], launches[2:], strict=False)] == [2, 1]
    assert launches[1] <= max(agent.observed_before(reads[0])), "a replay must not read before the kernel has ended"
    waits = agent.args("stream_wait_event")
    assert waits and {wait.stream for wait in waits} == {0}


def test_a_touch_waits_for_work_that_runs_and_says_so(agent, program):
    run = program(agent, code("""
        context()
        f = kernel()
        at, a = managed(4096)
        a[0] = 3
        tell(1)
        hear()
        ok(launch(f, at, 4))
        tell(a[0])
        """))
    run.hear()
    agent.hold = True
    run.tell()
    agent.wait_for("stream_synchronize")
    assert "memcpy_d2h" not in agent.names()
    agent.let_go()
    assert run.hear() == 7
    run.end()


def test_a_touch_of_a_lost_session_is_the_programs_fault(agent, program):
    """It ends by SIGSEGV, with a line that says why, and does not hang; a system call gets EFAULT."""
    run = program(agent, code("""
        import errno
        context()
        f = kernel()
        at, a = managed(4096)
        tell(1)
        hear()
        ok(launch(f, at, 4))
        try:
            os.write(2, a)
        except OSError as error:
            tell(error.errno == errno.EFAULT)
        tell(a[0])
        """))
    run.hear()
    agent.hold = True
    run.tell()
    agent.wait_for("stream_synchronize")
    agent.close_connection()
    assert run.hear() is True
    assert run.process.wait(20) == -signal.SIGSEGV
    assert "the session is lost" in run.errors() and "0x2000" in run.errors()


def test_system_calls_on_what_the_device_has(agent, program):
    told = program(agent, code("""
        import socket
        context()
        f = kernel()
        at, a = managed(4 * UNIT)
        def away():
            ok(launch(f, at, 1))
            wait()
            return memoryview(a)
        reads, writes = os.pipe()
        file = os.memfd_create("file")
        left, right = socket.socketpair()
        steps = []
        away()
        steps.append([os.write(writes, away()[:16]), list(os.read(reads, 16))])
        os.write(writes, bytes(range(16)))
        steps.append([os.fdopen(reads, "rb", buffering=0, closefd=False).readinto(away()[UNIT - 8:UNIT + 8]),
                      list(a[UNIT - 8:UNIT + 8]), a[0]])
        away()
        libc = c.CDLL(None)
        steps.append([libc.pwrite(file, U64(at), SIZE(4 * UNIT), c.c_long(0)), list(os.pread(file, 4, 0))])
        away()
        steps.append([libc.pread(file, U64(at + 100), SIZE(4), c.c_long(0)), list(a[98:106])])
        away()
        steps.append([left.send(away()[:UNIT]), right.recv_into(away()[UNIT:], UNIT, socket.MSG_WAITALL), a[UNIT]])
        steps.append([libc.getrandom(U64(at + 3 * UNIT), SIZE(256), 0), len(set(a[3 * UNIT:3 * UNIT + 256])) > 20])
        tell(steps)
        """)).end()
    assert told == [[[16, [2] * 16], [16, list(range(16)), 3], [262144, [4] * 4], [4, [0, 0, 4, 4, 4, 4, 0, 0]],
                     [65536, 65536, 7], [256, True]]]


def test_the_programs_own_handlers_get_its_own_faults(agent, program, tmp_path):
    """Set before or after ours, found again at the next launch; one that hands on what it found does so once."""
    told = program(agent, code("""
        lib = c.CDLL(os.environ["HANDLERS"])
        context()
        lib.set_jump()                     # before ours
        f = kernel()
        at, a = managed(3 * UNIT)
        look = lambda where: lib.look(P(where))
        steps = [look(at), look(0x1000), lib.counts()]
        ok(launch(f, at, 5)); wait()
        steps += [look(at), look(0x1000), lib.counts()]
        lib.set_mend()                     # after ours, which it found
        ok(launch(f, at, 5)); wait()
        steps += [look(at), look(0x600000000000), look(0x1000), lib.counts()]
        lib.set_jump()
        ok(launch(f, at, 5)); wait()
        steps += [look(at), look(0x2fff00000000), lib.counts()]
        ok(launch(f, at, 5)); wait()
        steps += [lib.look_on_small_stack(P(at))]
        tell(steps)
        """), HANDLERS=compiled(tmp_path)).end()
    assert told == [[0, -1, 100, 5, -1, 200, 10, 0, -1, 301, 15, -1, 401, 20]]


def test_a_fault_of_a_program_without_handlers_ends_it(agent, program):
    run = program(agent, code("""
        context()
        at, a = managed(4096)
        tell(a[0])
        c.string_at(64)
        """))
    run.hear()
    assert run.process.wait(20) == -signal.SIGSEGV


def test_a_forked_child_has_no_managed_memory_and_the_parent_keeps_its_own(agent, program):
    told = program(agent, code("""
        context()
        f = kernel()
        at, a = managed(2 * UNIT)
        a[0] = 1
        ok(launch(f, at, 1))
        child = os.fork()
        if not child:
            out = U64()
            os._exit(11 if cu.cuMemAllocManaged(c.byref(out), SIZE(4), 1) == 3 else 12)
        ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]
        child = os.fork()
        if not child:
            a[1] = 5
            os._exit(0)
        ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        tell([ended, list(a[:2])])
        """)).end()
    assert told == [[[11, -11], [2, 1]]]


def test_threads_touch_at_once(agent, program):
    told = program(agent, code("""
        context()
        f = kernel()
        at, a = managed(64 * UNIT)
        a[:] = bytes(range(256)) * (64 * UNIT // 256)
        ok(launch(f, at, 0))
        sums = []
        def add(k):
            sums.append(sum(a[k * 8 * UNIT:(k + 1) * 8 * UNIT:127]))
            a[k] = 1
        threads = [threading.Thread(target=add, args=(k,)) for k in range(8)]
        for each in threads: each.start()
        for each in threads: each.join()
        whole = bytes(range(256)) * (64 * UNIT // 256)
        expected = [sum(whole[k * 8 * UNIT:(k + 1) * 8 * UNIT:127]) for k in range(8)]
        tell([sorted(sums) == sorted(expected), list(a[:9])])
        """)).end()
    assert told == [[True, [1] * 8 + [8]]]
    assert len(agent.seqs("memcpy_d2h")) <= 20, "what follows each other comes by larger pieces"


def test_attached_memory_waits_for_its_stream_only(agent, program):
    run = program(agent, code("""
        context()
        f, s, t = kernel(), stream(), stream()
        mine, a = managed(4096, HOST)
        hosts, h = managed(4096, HOST)
        everyones, g = managed(4096)
        attach = lambda stream, at, flags, size=0: cu.cuStreamAttachMemAsync(P(stream), U64(at), SIZE(size), flags)
        ok(attach(s, mine, SINGLE))
        tell([attach(s, mine + 1, SINGLE), attach(s, mine, SINGLE, 5), attach(None, mine, SINGLE), attach(s, mine, 3),
              attach(7, mine, HOST), attach(s, 4096, HOST), attach(s, mine, SINGLE, 4096)])
        a[0] = h[0] = g[0] = 1
        ok(launch(f, mine, 1, s)); ok(cu.cuStreamSynchronize(P(s)))
        hear()
        ok(launch(f, everyones, 1, t))     # of which no end is seen
        a[0] += 1
        h[0] += 1
        tell([a[0], h[0]])
        hear()
        tell(g[0])
        """))
    assert run.hear() == [1, 1, 1, 1, 400, 1, 0]
    agent.wait_for("stream_create", 2)
    held = agent.args("stream_create")[1].stream
    agent.held.add(held)
    run.tell()
    assert run.hear() == [3, 2]
    run.tell()
    eventually(lambda: held in [wait.stream for wait in agent.args("stream_synchronize")])
    agent.close_connection()
    assert run.process.wait(20) == -signal.SIGSEGV


def test_host_functions_use_managed_memory_of_their_stream(agent, program):
    """The device waits for them, so they wait for nothing that comes behind."""
    told = program(agent, code("""
        context()
        f, s = kernel(), stream()
        at, a = managed(4096)
        seen, ended = [], threading.Event()
        def look(_):
            seen.append(a[0])
            ended.set()
        callback = c.CFUNCTYPE(None, P)(look)
        ok(launch(f, at, 3, s))
        ok(cu.cuLaunchHostFunc(P(s), callback, None))
        ok(launch(f, at, 3, s))
        tell(ended.wait(20))
        tell(len(seen))
        """)).end()
    assert told == [True, 1]


def test_wrong_arguments_have_the_drivers_codes(agent, program):
    told = program(agent, code("""
        at = U64()
        before = cu.cuMemAllocManaged(c.byref(at), SIZE(4), GLOBAL)
        context()
        allocate = lambda size, flags, out=c.byref(at): cu.cuMemAllocManaged(out, SIZE(size), flags)
        steps = [before, allocate(0, 1), allocate(4, 0), allocate(4, 3), allocate(4, 4), allocate(4, 1, None),
                 allocate(1 << 40, 1), allocate(300, 1)]
        out = alloc(4096)
        advise = lambda where, size, what, device: cu.cuMemAdvise(U64(where), SIZE(size), what, device)
        prefetch = lambda where, size, device: cu.cuMemPrefetchAsync(U64(where), SIZE(size), device, None)
        m = at.value
        steps += [advise(m, 300, 1, 0), advise(m, 301, 1, 0), advise(out, 4, 1, 0), advise(m, 300, 9, 0),
                  advise(m, 300, 3, 5), advise(m, 0, 1, 0)]
        steps += [prefetch(m, 300, 0), prefetch(m, 300, -1), prefetch(m, 300, 9), prefetch(out, 4, 0)]
        tell(steps)
        """)).end()
    assert told == [[3, 1, 1, 1, 1, 1, 2, 0, 0, 1, 1, 1, 101, 1, 0, 0, 101, 1]]


def test_advice_is_remembered_page_by_page(agent, program):
    told = program(agent, code("""
        context()
        at, _ = managed(4 * 4096)
        def ask(which, offset=0, size=4 * 4096, ints=1):
            out = (c.c_int * ints)()
            ok(cu.cuMemRangeGetAttribute(out, SIZE(4 * ints), which, U64(at + offset), SIZE(size)))
            return list(out) if ints > 1 else out[0]
        steps = [[ask(k) for k in (1, 2, 4, 5, 7)], ask(3, ints=2)]
        ok(cu.cuMemAdvise(U64(at), SIZE(100), 1, 0))
        steps.append([ask(1), ask(1, 0, 4096), ask(1, 4096, 4096)])
        ok(cu.cuMemAdvise(U64(at + 4096), SIZE(4096), 3, 0))
        ok(cu.cuMemAdvise(U64(at + 8192), SIZE(4096), 3, -1))
        steps.append([ask(2), ask(2, 4096, 4096), ask(2, 8192, 4096), ask(5, 8192, 10), ask(2, 4096, 8192)])
        ok(cu.cuMemAdvise(U64(at), SIZE(4 * 4096), 5, 0))
        ok(cu.cuMemAdvise(U64(at), SIZE(4096), 5, -1))
        steps.append([ask(3, ints=3), ask(3, 0, 4096, ints=3)])
        ok(cu.cuMemPrefetchAsync(U64(at), SIZE(4 * 4096), 0, None))
        steps.append([ask(4), ask(7), cu.cuMemRangeGetAttribute(c.byref(U64()), SIZE(8), 1, U64(at), SIZE(4)),
                      cu.cuMemRangeGetAttribute(c.byref(c.c_int()), SIZE(4), 77, U64(at), SIZE(4))])
        tell(steps)
        """)).end()
    assert told == [[[0, -2, -2, 0, 0], [-2, -2], [0, 1, 0], [-2, 0, -1, 2, -2], [[0, -2, -2], [-1, 0, -2]],
                     [0, 1, 1, 1]]]


def test_what_a_managed_pointer_is(agent, program):
    told = program(agent, code("""
        context()
        at, a = managed(5000)
        def ask(which, kind=c.c_uint64):
            out = kind()
            return [cu.cuPointerGetAttribute(c.byref(out), which, U64(at + 9)), out.value]
        base, size = U64(), SIZE()
        ok(cu.cuMemGetAddressRange_v2(c.byref(base), c.byref(size), U64(at + 9)))
        host = (c.c_ubyte * 4)(1, 2, 3, 4)
        ok(cu.cuMemcpyHtoD_v2(U64(at), host, SIZE(4)))
        steps = [list(a[:5])]
        ok(cu.cuMemcpyHtoD_v2(U64(alloc(4)), P(at), SIZE(4)))   # it is a host pointer, too
        tell([*steps, ask(8, c.c_uint), ask(2, c.c_uint), ask(3)[1] == at + 9, ask(4)[1] == at + 9, base.value == at,
              size.value, at % 4096])
        """)).end()
    assert told == [[[1, 2, 3, 4, 0], [0, 1], [0, 2], True, True, True, 5000, 0]]


def test_calls_that_write_their_answers_to_managed_memory(agent, program):
    """An object in managed memory holds the pointers to what it allocates."""
    told = program(agent, code("""
        context()
        f = kernel()
        at, a = managed(UNIT)
        def away():
            ok(launch(f, at, 1)); wait()
            return U64.from_address(at + 64)
        steps = [cu.cuMemHostAlloc(P(at + 64), SIZE(64), 0), away().value > 0]
        away()
        steps += [cu.cuMemAllocManaged(P(at + 64), SIZE(64), 1), U64.from_address(at + 64).value > at]
        away()
        steps += [cu.cuMemRangeGetAttribute(P(at + 64), SIZE(4), 2, U64(at), SIZE(8))]
        steps += [c.c_int.from_address(at + 64).value]
        away()
        steps += [cu.cuModuleLoadData(P(at + 64), P(at + 128))]  # no image: what stands there is read all the same
        tell(steps)
        """)).end()
    assert told == [[0, True, 0, True, 0, -2, 200]]


def test_a_prefetch_in_a_capture_is_refused(agent, program):
    told = program(agent, code("""
        context()
        f, s = kernel(), stream()
        at, a = managed(2 * UNIT)
        ok(cu.cuStreamBeginCapture_v2(P(s), 2))
        ok(launch(f, at, 3, s))
        refused = cu.cuMemPrefetchAsync(U64(at), SIZE(8), 0, P(s))
        tell(refused != 0)
        """)).end()
    assert told == [True]


def test_launches_of_a_graph_use_managed_memory(agent, program):
    told = program(agent, code("""
        context()
        f, s = kernel(), stream()
        at, a = managed(2 * UNIT)
        graph, made = P(), P()
        ok(cu.cuStreamBeginCapture_v2(P(s), 2))
        ok(launch(f, at, 3, s))
        ok(cu.cuStreamEndCapture(P(s), c.byref(graph)))
        ok(cu.cuGraphInstantiateWithFlags(c.byref(made), graph, U64(0)))
        steps = [a[0]]
        for _ in range(2):
            a[1] += 10
            ok(cu.cuGraphLaunch(made, P(s)))
            ok(cu.cuStreamSynchronize(P(s)))
            steps.append(list(a[:3]))
        tell(steps)
        """)).end()
    assert told == [[0, [3, 13, 3], [6, 26, 6]]]
