"""Stock libcudart tells a profiler of its functions; without one it never calls a hook."""

from __future__ import annotations

import pytest

from tests.client.shim.handshake.conftest import Stage, stock_runtime

HEAD = r"""
import ctypes as c, struct, sys
rt = c.CDLL(sys.argv[1])
p, n = c.c_void_p(), c.c_int()

def work():
    assert rt.cudaMalloc(c.byref(p), c.c_size_t(4096)) == 0
    assert rt.cudaDeviceGetDefaultMemPool(c.byref(n), 99) != 0  # a number above 255, and an error
    assert rt.cudaFree(p) == 0
"""

PROFILER = HEAD + r"""
cupti = c.CDLL(f"libcupti.so.{sys.argv[2]}")
RUNTIME, DRIVER, EXTERNAL = 5, 4, 39
buffers, found, entered = {}, [], []

@c.CFUNCTYPE(None, c.POINTER(c.c_void_p), c.POINTER(c.c_size_t), c.POINTER(c.c_size_t))
def requested(buffer, size, most):
    made = c.create_string_buffer(4096)
    buffers[c.addressof(made)] = made
    buffer[0], size[0], most[0] = c.addressof(made), 4096, 0

@c.CFUNCTYPE(None, c.c_void_p, c.c_uint32, c.c_void_p, c.c_size_t, c.c_size_t)
def completed(context, stream, buffer, size, valid):
    record = c.c_void_p()
    while not cupti.cuptiActivityGetNextRecord(c.c_void_p(buffer), c.c_size_t(valid), c.byref(record)):
        kind = c.c_uint32.from_address(record.value).value
        found.append((kind, c.string_at(record.value, 24 if kind == EXTERNAL else 40)))
    del buffers[buffer]

def ok(result):
    assert result == 0, result

def name(domain, number):
    text = c.c_char_p()
    ok(cupti.cuptiGetCallbackName(domain, number, c.byref(text)))
    return text.value.decode()

@c.CFUNCTYPE(None, c.c_void_p, c.c_uint32, c.c_uint32, c.c_void_p)
def called(user, domain, number, data):
    site = c.c_uint32.from_address(data).value
    entered.append((domain, site, c.c_char_p.from_address(data + 8).value.decode()))

ok(cupti.cuptiActivityRegisterCallbacks(requested, completed))
for kind in (RUNTIME, DRIVER, EXTERNAL):
    ok(cupti.cuptiActivityEnable(kind))
subscriber = c.c_void_p()
ok(cupti.cuptiSubscribe(c.byref(subscriber), called, None))
ok(cupti.cuptiEnableCallback(1, subscriber, 2, 20))
ok(cupti.cuptiActivityPushExternalCorrelationId(3, c.c_uint64(77)))
work()
ok(cupti.cuptiActivityPopExternalCorrelationId(3, None))
for kind in (RUNTIME, DRIVER, EXTERNAL):
    ok(cupti.cuptiActivityDisable(kind))
ok(cupti.cuptiUnsubscribe(subscriber))
work()
ok(cupti.cuptiActivityFlushAll(1))
outer = {struct.unpack_from("<I", record, 16)[0]: struct.unpack_from("<Q", record, 8)[0]
         for kind, record in found if kind == EXTERNAL}
before = 0
for kind, record in found:
    if kind == RUNTIME:
        cbid, start, end, _, thread, correlation, result = struct.unpack("<4xIQQIIII", record)
        assert before <= start <= end and thread and outer[correlation] == 77
        before = end
        print("runtime", name(2, cbid), result)
    elif kind == DRIVER:
        print("driver", name(1, struct.unpack_from("<I", record, 4)[0]))
print("callbacks", *entered)
text = c.c_char_p()
assert [cupti.cuptiGetCallbackName(*of, c.byref(text)) for of in ((2, 100000), (1, 0))] == [1, 1]
"""


@pytest.mark.parametrize("version", ["12.8.90", "13.0.96"])
def test_runtime_functions_are_told(stage: Stage, version: str) -> None:
    """Each once, with its number, result and external id; what it calls of the driver is not told besides."""
    outcome = stage.run(PROFILER, stock_runtime(version), version.partition(".")[0])
    lines = outcome.out.splitlines()
    told = [line.split()[1:] for line in lines if line.startswith("runtime")]
    assert [name for name, _ in told] == ["cudaMalloc_v3020", "cudaDeviceGetDefaultMemPool_v11020", "cudaFree_v3020"]
    assert [int(result) for _, result in told] == [0, 101, 0]
    assert not [line for line in lines if line.startswith("driver")]
    assert lines[-1] == "callbacks (2, 0, 'cudaMalloc') (2, 1, 'cudaMalloc')"


@pytest.mark.parametrize("version", ["12.8.90", "13.0.96"])
def test_without_a_profiler_no_hook_is_called(stage: Stage, version: str) -> None:
    """A runtime reads a flag of four bytes for each of its functions: all are there, and zero."""
    outcome = stage.run(HEAD + "work(); print('done')", stock_runtime(version), RGPU_SHIM_LOG="1")
    assert outcome.out == "done\n" and "HOOKS" not in outcome.err, outcome.err
