"""A script of driver calls; each section prints its calls and what the driver answered, as JSON.

    python -m tests.gpu.trace.script SECTION

It needs nothing but Python and ``libcuda.so.1``: natively the real one, under ``rgpu run`` ours. Addresses, handles
and times are never printed, only what must be the same on every run: results, states, counts, order, and whether
something waited. A section ends its process: one that breaks its context harms no other.
"""

from __future__ import annotations

import ctypes as c
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.client.shim.handshake.native_driver import Driver

#: About a fifth of a second on a GPU of 1.7 GHz.
SPIN_CYCLES = 400_000_000
PTX = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry spin(.param .u64 cycles)
{ .reg .b64 %rd<5>; .reg .pred %p1; ld.param.u64 %rd1,[cycles]; mov.u64 %rd2,%clock64;
AGAIN: mov.u64 %rd3,%clock64; sub.u64 %rd4,%rd3,%rd2; setp.lt.u64 %p1,%rd4,%rd1; @%p1 bra AGAIN; ret; }
.visible .entry count(.param .u64 p)
{ .reg .b64 %rd<2>; .reg .b32 %r<2>; ld.param.u64 %rd1,[p]; atom.global.add.u32 %r1,[%rd1],1; ret; }
.visible .entry bounded(.param .u64 p) .maxntid 128, 1, 1
{ .reg .b64 %rd<2>; ld.param.u64 %rd1,[p]; st.global.u32 [%rd1],7; ret; }
.visible .entry wild() { .reg .b64 %rd<2>; mov.u64 %rd1,1024; st.global.u32 [%rd1],1; ret; }
.visible .entry stop() { trap; ret; }
\0"""
HOST_FUNCTION = c.CFUNCTYPE(None, c.c_void_p)
PER_THREAD = c.c_void_p(2)


class Script:
    """The driver in a primary context, and the answers so far."""

    def __init__(self) -> None:
        self.d = Driver()
        self.answers: list[list[Any]] = []
        self.context = c.c_void_p()
        for result in (self.d.cuInit(0), self.d.cuDevicePrimaryCtxRetain(c.byref(self.context), 0),
                       self.d.cuCtxSetCurrent(self.context)):
            if result:
                raise SystemExit(f"no CUDA: error {result}")

    def say(self, what: str, *answer: Any) -> None:
        self.answers.append([what, *answer])

    def alloc(self, size: int) -> c.c_uint64:
        pointer = c.c_uint64()
        self.must(self.d.cuMemAlloc_v2(c.byref(pointer), c.c_size_t(size)), "cuMemAlloc")
        return pointer

    def made(self, name: str, *arguments: Any) -> c.c_void_p:
        """The handle that a function of the form ``(handle *, …)`` makes."""
        handle = c.c_void_p()
        self.must(getattr(self.d, name)(c.byref(handle), *arguments), name)
        return handle

    def must(self, result: int, what: str) -> None:
        if result:
            print(json.dumps({"answers": self.answers, "failed": [what, result]}), flush=True)
            os._exit(1)

    def kernels(self, *names: str) -> list[c.c_void_p]:
        module = self.made("cuModuleLoadData", PTX)
        return [self.made("cuModuleGetFunction", module, name.encode()) for name in names]

    def launch(self, kernel: c.c_void_p, *values: Any, grid: int = 1, block: int = 1, shared: int = 0,
               stream: Any = None) -> int:
        parameters = (c.c_void_p * max(1, len(values)))(*(c.cast(c.byref(v), c.c_void_p) for v in values))
        return self.d.cuLaunchKernel(kernel, grid, 1, 1, block, 1, 1, shared, stream, parameters, None)

    def read(self, pointer: c.c_uint64) -> list[int]:
        word = c.c_uint32(0xFFFF)
        return [self.d.cuMemcpyDtoH_v2(c.byref(word), pointer, c.c_size_t(4)), word.value]


def arguments(s: Script) -> None:
    """Wrong arguments: reported at once, by the right code, and nothing sticks."""
    d, p, host = s.d, s.alloc(4096), c.create_string_buffer(8192)
    out = c.c_uint64()
    s.say("alloc 0", d.cuMemAlloc_v2(c.byref(out), c.c_size_t(0)))
    s.say("alloc too much", d.cuMemAlloc_v2(c.byref(out), c.c_size_t(1 << 60)))
    s.say("free 0", d.cuMemFree_v2(c.c_uint64(0)))
    s.say("free inside", d.cuMemFree_v2(c.c_uint64(p.value + 512)))
    s.say("free host", d.cuMemFree_v2(c.c_uint64(c.addressof(host))))
    s.say("copy 0", d.cuMemcpyHtoD_v2(p, host, c.c_size_t(0)))
    s.say("copy ok", d.cuMemcpyHtoD_v2(p, host, c.c_size_t(4096)))
    s.say("memset ok", d.cuMemsetD32_v2(p, 5, c.c_size_t(1024)))
    s.say("memset unaligned", d.cuMemsetD32_v2(c.c_uint64(p.value + 1), 5, c.c_size_t(4)))
    s.say("memset nothing", d.cuMemsetD8_v2(p, 5, c.c_size_t(0)))
    s.say("stream flags", d.cuStreamCreate(c.byref(c.c_void_p()), 77))
    s.say("event flags", d.cuEventCreate(c.byref(c.c_void_p()), 1 << 20))
    s.say("host alloc flags", d.cuMemHostAlloc(c.byref(c.c_void_p()), c.c_size_t(64), 1 << 20))
    s.say("register 0", d.cuMemHostRegister_v2(host, c.c_size_t(0), 0))
    s.say("unregister", d.cuMemHostUnregister(host))
    s.say("free host pointer", d.cuMemFreeHost(host))
    s.say("free", d.cuMemFree_v2(p))
    s.say("free twice", d.cuMemFree_v2(p))
    s.say("then", d.cuCtxSynchronize())


def pointers(s: Script) -> None:
    """Attributes of device, pinned, registered, unknown and freed pointers."""
    d, p = s.d, s.alloc(1 << 20)
    pinned, page = c.c_void_p(), c.create_string_buffer(1 << 16)
    s.must(d.cuMemHostAlloc(c.byref(pinned), c.c_size_t(1 << 16), 0), "cuMemHostAlloc")
    registered = (c.addressof(page) + 4095) & ~4095
    s.must(d.cuMemHostRegister_v2(c.c_void_p(registered), c.c_size_t(8192), 0), "cuMemHostRegister")
    places = {"device": p.value, "device inside": p.value + 4097, "pinned": pinned.value or 0,
              "pinned inside": (pinned.value or 0) + 100, "registered": registered,
              "unknown": c.addressof(page) + 32768, "null": 0}

    def attributes(when: str) -> None:
        for name, address in places.items():
            kind, ordinal, whole = c.c_uint(99), c.c_int(99), c.c_size_t(99)
            host, device, managed = c.c_void_p(), c.c_uint64(), c.c_ubyte(99)
            at = c.c_uint64(address)
            s.say(f"{when} {name}", "memory type", d.cuPointerGetAttribute(c.byref(kind), 2, at), kind.value)
            s.say(f"{when} {name}", "ordinal", d.cuPointerGetAttribute(c.byref(ordinal), 9, at), ordinal.value)
            s.say(f"{when} {name}", "managed", d.cuPointerGetAttribute(c.byref(managed), 8, at))
            result = d.cuPointerGetAttribute(c.byref(device), 3, at)
            s.say(f"{when} {name}", "device pointer", result, device.value == address if not result else None)
            result = d.cuPointerGetAttribute(c.byref(host), 4, at)
            s.say(f"{when} {name}", "host pointer", result, (host.value or 0) == address if not result else None)
            result = d.cuPointerGetAttribute(c.byref(whole), 12, at)
            s.say(f"{when} {name}", "range size", result, whole.value if not result else None)

    attributes("held")
    base, size = c.c_uint64(), c.c_size_t()
    s.say("range", d.cuMemGetAddressRange_v2(c.byref(base), c.byref(size), c.c_uint64(p.value + 5000)),
          p.value - base.value, size.value)
    flags = c.c_uint(99)
    s.say("host flags", d.cuMemHostGetFlags(c.byref(flags), pinned), flags.value)
    there = c.c_uint64()
    s.say("device pointer", d.cuMemHostGetDevicePointer_v2(c.byref(there), pinned, 0), there.value == pinned.value)
    s.say("frees", d.cuMemFree_v2(p), d.cuMemFreeHost(pinned), d.cuMemHostUnregister(c.c_void_p(registered)))
    attributes("freed")
    s.say("range of freed", d.cuMemGetAddressRange_v2(c.byref(base), c.byref(size), p))


def events(s: Script) -> None:
    """Events that were never recorded, that were, without timing; their times."""
    d, time_ms = s.d, c.c_float(-1)
    timed, other, bare = (s.made("cuEventCreate", flags) for flags in (0, 1, 2))
    s.say("unrecorded", d.cuEventQuery(timed), d.cuEventSynchronize(timed))
    s.say("time of unrecorded", d.cuEventElapsedTime(c.byref(time_ms), timed, other))
    s.say("wait for unrecorded", d.cuStreamWaitEvent(None, timed, 0))
    s.say("record", d.cuEventRecord(timed, None), d.cuEventRecord(other, None), d.cuEventRecord(bare, None))
    s.say("synchronize", d.cuEventSynchronize(other), d.cuEventQuery(timed))
    s.say("time", d.cuEventElapsedTime(c.byref(time_ms), timed, other), time_ms.value >= 0)
    s.say("time of itself", d.cuEventElapsedTime(c.byref(time_ms), timed, timed), time_ms.value)
    s.say("time without timing", d.cuEventElapsedTime(c.byref(time_ms), timed, bare))
    s.say("wait flags", d.cuStreamWaitEvent(None, timed, 7))
    s.say("null", d.cuEventRecord(None, None), d.cuEventQuery(None))
    s.say("destroy", [d.cuEventDestroy_v2(e) for e in (timed, other, bare)])


def contexts(s: Script) -> None:
    """The context stack of one thread, and that of another."""
    d, got = s.d, c.c_void_p()
    other = c.c_void_p()
    created = d.cuCtxCreate_v2(c.byref(other), 0, 0)
    names = {s.context.value: "primary", other.value: "other", None: "none"}

    def current() -> str:
        result = d.cuCtxGetCurrent(c.byref(got))
        return names.get(got.value, "?") if result == 0 else str(result)

    s.say("created", created, current())
    s.say("pop", d.cuCtxPopCurrent_v2(c.byref(got)), names.get(got.value), current())
    s.say("push twice", d.cuCtxPushCurrent_v2(s.context), d.cuCtxPushCurrent_v2(other), current())
    s.say("set", d.cuCtxSetCurrent(s.context), current())
    s.say("pops", [(d.cuCtxPopCurrent_v2(c.byref(got)), names.get(got.value)) for _ in range(4)], current())
    s.say("without one", d.cuCtxSynchronize(), d.cuMemAlloc_v2(c.byref(c.c_uint64()), c.c_size_t(8)))
    s.must(d.cuCtxSetCurrent(s.context), "cuCtxSetCurrent")
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend([current(), d.cuCtxSynchronize(),
                                                           d.cuCtxSetCurrent(other), current()]))
    thread.start()
    thread.join()
    s.say("another thread", found, current())
    p = s.alloc(64)
    s.must(d.cuCtxSetCurrent(other), "cuCtxSetCurrent")
    s.say("foreign memory", d.cuMemsetD8_v2(p, 1, c.c_size_t(64)))
    s.say("destroy current", d.cuCtxDestroy_v2(other), current())


def capture(s: Script) -> None:
    """States of a capture; what breaks one; how it ends. Nodes are memsets: no kernel is needed."""
    d, p = s.d, s.alloc(4096)
    a, b = (s.made("cuStreamCreate", 1) for _ in range(2))
    blocking = s.made("cuStreamCreate", 0)
    event, other = s.made("cuEventCreate", 2), s.made("cuEventCreate", 2)

    def states(*streams: Any) -> list[list[int]]:
        found = []
        for stream in streams:
            state = c.c_int(99)
            found.append([d.cuStreamIsCapturing(stream, c.byref(state)), state.value])
        return found

    def ident(stream: Any) -> int:
        state, number = c.c_int(), c.c_uint64()
        d.cuStreamGetCaptureInfo_v2(stream, c.byref(state), c.byref(number), None, None, None)
        return number.value

    def memset(stream: Any, value: int = 1) -> int:
        return d.cuMemsetD8Async(p, value, c.c_size_t(64), stream)

    def begin(stream: Any = a, mode: int = 0) -> int:
        return d.cuStreamBeginCapture_v2(stream, mode)

    def end(stream: Any = a) -> list[Any]:
        graph, count = c.c_void_p(), c.c_size_t(0)
        result = d.cuStreamEndCapture(stream, c.byref(graph))
        nodes = d.cuGraphGetNodes(graph, None, c.byref(count)) if graph.value else None
        if graph.value:
            d.cuGraphDestroy(graph)
        return [result, bool(graph.value), nodes, count.value]

    s.say("idle", states(a, b, None))
    s.say("end without begin", end())
    s.say("begin", begin(), states(a, b))
    first = ident(a)
    s.say("begin twice", begin(), states(a))
    s.say("nodes", memset(a), memset(a, 2))
    s.say("fork", d.cuEventRecord(event, a), d.cuStreamWaitEvent(b, event, 0), states(a, b), ident(b) == first)
    s.say("in the fork", memset(b), end(b), states(a, b))
    s.say("end after that", end(), states(a, b))
    s.say("another capture", begin(), ident(a) != first, memset(a))
    s.say("captured event", d.cuEventRecord(event, a), d.cuEventQuery(event), states(a))
    s.say("end invalidated", end(), states(a))
    for name, mode in (("global", 0), ("thread", 1), ("relaxed", 2)):
        s.must(begin(a, mode), "begin")
        out = c.c_uint64()
        result = d.cuMemAlloc_v2(c.byref(out), c.c_size_t(64))
        s.say(f"{name}: allocation", result, states(a), end())
        s.must(begin(a, mode), "begin")
        s.say(f"{name}: another stream's wait", d.cuStreamSynchronize(b), states(a), end())
    s.must(begin(), "begin")
    s.say("own wait", d.cuStreamSynchronize(a), states(a), memset(a), end())
    s.must(begin(), "begin")
    s.say("own query", d.cuStreamQuery(a), states(a), end())
    s.must(begin(), "begin")
    s.say("context wait", d.cuCtxSynchronize(), states(a), end())
    s.must(begin(blocking), "begin")
    s.say("legacy stream", memset(None), states(blocking), end(blocking))
    s.must(begin(), "begin")
    s.say("unjoined", d.cuEventRecord(event, a), d.cuStreamWaitEvent(b, event, 0), memset(b), end(), states(a, b))
    s.must(begin(), "begin")
    s.say("joined", d.cuEventRecord(event, a), d.cuStreamWaitEvent(b, event, 0), memset(b),
          d.cuEventRecord(other, b), d.cuStreamWaitEvent(a, other, 0), end(), states(a, b))
    s.must(begin(), "begin")
    s.must(begin(b), "begin")
    s.say("two captures meet", d.cuEventRecord(event, a), d.cuStreamWaitEvent(b, event, 0), states(a, b), end(), end(b))
    mine = c.c_int(2)
    s.say("exchange", d.cuThreadExchangeStreamCaptureMode(c.byref(mine)), mine.value,
          d.cuThreadExchangeStreamCaptureMode(c.byref(mine)), mine.value)
    s.say("legacy cannot", begin(None), states(None))
    s.say("destroyed while capturing", begin(), d.cuStreamDestroy_v2(a))
    s.say("then", d.cuCtxSynchronize())


def graphs(s: Script) -> None:
    """Graphs made by capture and by hand: counts, kinds, launches, a second launch, an executable that outlives it."""
    d, p = s.d, s.alloc(4096)
    stream = s.made("cuStreamCreate", 1)
    s.must(d.cuMemsetD8_v2(p, 0, c.c_size_t(4096)), "memset")
    host = c.create_string_buffer(b"\7" * 64, 64)
    s.must(d.cuStreamBeginCapture_v2(stream, 2), "begin")
    s.must(d.cuMemsetD8Async(p, 9, c.c_size_t(16), stream), "memset")
    s.must(d.cuMemcpyDtoDAsync_v2(c.c_uint64(p.value + 1024), p, c.c_size_t(16), stream), "copy")
    s.say("pageable source", d.cuMemcpyHtoDAsync_v2(c.c_uint64(p.value + 2048), host, c.c_size_t(16), stream))
    graph = c.c_void_p()
    s.say("end", d.cuStreamEndCapture(stream, c.byref(graph)), bool(graph.value))
    count, edges = c.c_size_t(9), c.c_size_t(9)
    s.say("nodes", d.cuGraphGetNodes(graph, None, c.byref(count)), count.value)
    nodes = (c.c_void_p * 8)()
    count = c.c_size_t(8)
    d.cuGraphGetNodes(graph, nodes, c.byref(count))
    kinds = []
    for index in range(min(8, count.value)):
        kind = c.c_int(99)
        kinds.append([d.cuGraphNodeGetType(c.c_void_p(nodes[index]), c.byref(kind)), kind.value])
    s.say("kinds", sorted(kinds))
    s.say("roots", d.cuGraphGetRootNodes(graph, None, c.byref(edges)), edges.value)
    run = c.c_void_p()
    s.say("instantiate", d.cuGraphInstantiateWithFlags(c.byref(run), graph, c.c_uint64(0)))
    s.say("before", s.read(p))
    s.say("launches", [d.cuGraphLaunch(run, stream) for _ in range(3)], d.cuStreamSynchronize(stream))
    s.say("after", s.read(p), s.read(c.c_uint64(p.value + 1024)), s.read(c.c_uint64(p.value + 2048)))
    s.say("destroy graph", d.cuGraphDestroy(graph))
    s.say("launch still", d.cuGraphLaunch(run, stream), d.cuStreamSynchronize(stream))
    s.say("destroy", d.cuGraphExecDestroy(run))
    empty = s.made("cuGraphCreate", 0)
    one = s.made("cuGraphAddEmptyNode", empty, None, c.c_size_t(0))
    pair = (c.c_void_p * 1)(one)
    two = s.made("cuGraphAddEmptyNode", empty, pair, c.c_size_t(1))
    s.say("null node", d.cuGraphAddEmptyNode(None, empty, None, c.c_size_t(0)))
    s.say("by hand", d.cuGraphGetNodes(empty, None, c.byref(count)), count.value)
    s.say("remove", d.cuGraphDestroyNode(two), d.cuGraphGetNodes(empty, None, c.byref(count)), count.value)
    s.say("flags", d.cuGraphCreate(c.byref(c.c_void_p()), 5))


def host_functions(s: Script) -> None:
    """Host functions run in their stream's order, before any wait returns; CUDA calls in them are not permitted."""
    d, p, order = s.d, s.alloc(64), []
    a, b = (s.made("cuStreamCreate", 1) for _ in range(2))
    event = s.made("cuEventCreate", 2)

    def note(label: str) -> Any:
        return HOST_FUNCTION(lambda _: order.append(label))

    kept = [note(f"a{i}") for i in range(5)]
    s.say("launch", [d.cuLaunchHostFunc(a, function, None) for function in kept])
    s.say("wait", d.cuStreamSynchronize(a), list(order))
    order.clear()

    go = threading.Event()

    def slowly(_: int | None) -> None:
        go.wait(30)
        order.append("slow")

    slow = HOST_FUNCTION(slowly)
    after = note("after")
    s.must(d.cuLaunchHostFunc(a, slow, None), "cuLaunchHostFunc")
    s.must(d.cuEventRecord(event, a), "cuEventRecord")
    s.say("not yet", d.cuEventQuery(event), d.cuStreamQuery(a))
    s.must(d.cuStreamWaitEvent(b, event, 0), "cuStreamWaitEvent")
    s.must(d.cuLaunchHostFunc(b, after, None), "cuLaunchHostFunc")
    go.set()
    s.say("across streams", d.cuStreamSynchronize(b), list(order), d.cuEventQuery(event))
    inside: list[int] = []
    calls = HOST_FUNCTION(lambda _: inside.extend([d.cuMemAlloc_v2(c.byref(c.c_uint64()), c.c_size_t(8)),
                                                   d.cuStreamQuery(a)]))
    s.must(d.cuLaunchHostFunc(a, calls, None), "cuLaunchHostFunc")
    s.say("calls inside", d.cuStreamSynchronize(a), inside)
    pinned = c.c_void_p()
    s.must(d.cuMemHostAlloc(c.byref(pinned), c.c_size_t(64), 0), "cuMemHostAlloc")
    word = c.cast(pinned, c.POINTER(c.c_uint32))
    seen: list[int] = []
    look = HOST_FUNCTION(lambda _: seen.append(word[0]))
    for value in (5, 6, 7):
        d.cuMemsetD32Async(p, value, c.c_size_t(1), a)
        d.cuMemcpyDtoHAsync_v2(pinned, p, c.c_size_t(4), a)
        d.cuLaunchHostFunc(a, look, None)
    s.say("copies before", d.cuStreamSynchronize(a), seen)
    s.say("null", d.cuLaunchHostFunc(a, None, None))


def per_thread(s: Script) -> None:
    """Default streams: the legacy one waits for blocking streams; each thread has one of its own."""
    d, p = s.d, s.alloc(4096)
    idents: list[int] = []

    def ident(stream: Any) -> int:
        number = c.c_uint64()
        return number.value if d.cuStreamGetId(stream, c.byref(number)) == 0 else -1

    def work(value: int, results: list[Any]) -> None:
        results.append(d.cuCtxSetCurrent(s.context))
        results.append(d.cuMemsetD8Async_ptsz(c.c_uint64(p.value + 64 * value), value, c.c_size_t(64), None))
        results.append(d.cuStreamSynchronize_ptsz(None))
        results.append(d.cuStreamSynchronize(PER_THREAD))
        idents.append(ident(PER_THREAD))

    for value in (1, 2, 3):
        results: list[Any] = []
        thread = threading.Thread(target=work, args=(value, results))
        thread.start()
        thread.join()
        s.say(f"thread {value}", results, s.read(c.c_uint64(p.value + 64 * value)))
    s.say("own ones", ident(PER_THREAD) not in idents, ident(None) not in idents, -1 in idents)
    flags = c.c_uint(99)
    s.say("flags", d.cuStreamGetFlags(PER_THREAD, c.byref(flags)), flags.value,
          d.cuStreamGetFlags(None, c.byref(flags)), flags.value)
    priority = c.c_int(99)
    s.say("priority", d.cuStreamGetPriority(None, c.byref(priority)), priority.value)
    s.say("destroy", d.cuStreamDestroy_v2(PER_THREAD), d.cuStreamDestroy_v2(None))


def running(s: Script) -> None:
    """While a kernel runs: queries, times, and a free behind it, which waits."""
    d, p = s.d, s.alloc(1 << 20)
    (spin,) = s.kernels("spin")
    stream, cycles, time_ms = s.made("cuStreamCreate", 1), c.c_uint64(SPIN_CYCLES), c.c_float()
    begin, end = (s.made("cuEventCreate", 0) for _ in range(2))
    s.must(d.cuEventRecord(begin, stream), "cuEventRecord")
    s.say("launch", s.launch(spin, cycles, stream=stream))
    s.must(d.cuEventRecord(end, stream), "cuEventRecord")
    s.say("queries", d.cuEventQuery(end), d.cuStreamQuery(stream))
    s.say("time", d.cuEventElapsedTime(c.byref(time_ms), begin, end))
    s.say("destroy event", d.cuEventDestroy_v2(begin))
    s.say("free waits", d.cuMemFree_v2(p), d.cuEventQuery(end), d.cuStreamQuery(stream))
    s.must(s.launch(spin, cycles, stream=stream), "launch")
    s.say("stream destroyed at work", d.cuStreamDestroy_v2(stream), d.cuCtxSynchronize())
    s.must(s.launch(spin, cycles), "launch")
    word = c.c_uint32()
    q = s.alloc(64)
    began = time.monotonic()
    s.say("blocking copy waits", d.cuMemcpyDtoH_v2(c.byref(word), q, c.c_size_t(4)), d.cuStreamQuery(None))
    s.say("it took", time.monotonic() - began > 0.02)
    pool = c.c_uint64()
    other = s.made("cuStreamCreate", 1)
    s.must(d.cuMemAllocAsync(c.byref(pool), c.c_size_t(4096), other), "cuMemAllocAsync")
    s.must(s.launch(spin, cycles, stream=other), "launch")
    s.say("asynchronous free does not wait", d.cuMemFreeAsync(pool, other), d.cuStreamQuery(other))
    s.say("then", d.cuCtxSynchronize(), d.cuStreamQuery(other))


def launch_errors(s: Script) -> None:
    """Configurations that no GPU takes: reported at the call, and the next launch works."""
    p = s.alloc(64)
    s.must(s.d.cuMemsetD8_v2(p, 0, c.c_size_t(64)), "memset")
    count, bounded = s.kernels("count", "bounded")
    for name, kernel, options in (
            ("threads 2048", count, {"block": 2048}), ("threads 0", count, {"block": 0}),
            ("grid 0", count, {"grid": 0}), ("bound 256", bounded, {"block": 256}),
            ("shared 49152", count, {"shared": 49152}), ("shared 49153", count, {"shared": 49153}),
            ("shared 1 GiB", count, {"shared": 1 << 30})):
        s.say(name, s.launch(kernel, p, **options), s.d.cuCtxSynchronize())
    s.say("grid y", s.d.cuLaunchKernel(count, 1, 70000, 1, 1, 1, 1, 0, None,
                                       (c.c_void_p * 1)(c.cast(c.byref(p), c.c_void_p)), None))
    s.say("null", s.d.cuLaunchKernel(None, 1, 1, 1, 1, 1, 1, 0, None, None, None))
    s.say("opt in", s.d.cuFuncSetAttribute(count, 8, 60000), s.launch(count, p, shared=60000))
    s.say("too much", s.d.cuFuncSetAttribute(count, 8, 1 << 30))
    s.say("works", s.launch(count, p, block=32), s.d.cuCtxSynchronize(), s.read(p))
    s.say("missing", s.d.cuModuleGetFunction(c.byref(c.c_void_p()), s.made("cuModuleLoadData", PTX), b"nope"))


def _after_fault(s: Script) -> None:
    d = s.d
    s.say("synchronize", d.cuCtxSynchronize(), d.cuCtxSynchronize())
    s.say("allocate", d.cuMemAlloc_v2(c.byref(c.c_uint64()), c.c_size_t(64)))
    s.say("memset", d.cuMemsetD8_v2(c.c_uint64(1 << 20), 1, c.c_size_t(4)))
    s.say("stream", d.cuStreamCreate(c.byref(c.c_void_p()), 1), d.cuStreamQuery(None), d.cuStreamSynchronize(None))
    s.say("event", d.cuEventCreate(c.byref(c.c_void_p()), 0))
    s.say("module", d.cuModuleLoadData(c.byref(c.c_void_p()), PTX))
    s.say("host memory", d.cuMemHostAlloc(c.byref(c.c_void_p()), c.c_size_t(64), 0))
    count = c.c_int()
    s.say("count", d.cuDeviceGetCount(c.byref(count)), count.value)
    s.say("attribute", d.cuDeviceGetAttribute(c.byref(count), 39, 0))
    got = c.c_void_p()
    s.say("current", d.cuCtxGetCurrent(c.byref(got)), got.value == s.context.value)
    s.say("memory", d.cuMemGetInfo_v2(c.byref(c.c_size_t()), c.byref(c.c_size_t())))


def illegal_address(s: Script) -> None:
    """A kernel that writes where nothing is mapped: the launch is good, whatever waits is not, nor what follows."""
    (wild, count), p = s.kernels("wild", "count"), s.alloc(64)
    s.say("launch", s.launch(wild))
    _after_fault(s)
    s.say("copy", s.read(p)[0])
    s.say("launch again", s.launch(count, p))
    s.say("free", s.d.cuMemFree_v2(p))


def trap(s: Script) -> None:
    """A kernel that stops itself."""
    (stop,) = s.kernels("stop")
    s.say("launch", s.launch(stop))
    _after_fault(s)


#: Sections; those of KERNELS need a GPU, or a device that runs them as fast as one.
SECTIONS: dict[str, Callable[[Script], None]] = {
    function.__name__: function for function in (
        arguments, pointers, events, contexts, capture, graphs, host_functions, per_thread, running, launch_errors,
        illegal_address, trap)}
KERNELS = ("running", "launch_errors", "illegal_address", "trap")


def main() -> None:
    script = Script()
    SECTIONS[sys.argv[1]](script)
    print(json.dumps({"answers": script.answers}), flush=True)
    os._exit(0)  # no teardown: a broken context, and streams that capture, are left to the driver


if __name__ == "__main__":
    main()
