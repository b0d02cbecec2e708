"""Stock libcudart on the shim: the handshake, and the calls that every program makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rgpu.session import facts
from tests.client.shim.handshake.conftest import Stage, stock_runtime
from tests.support.shim import peer

PROGRAM = r"""
import ctypes as c, os, sys
rt = c.CDLL(sys.argv[1])
rt.cudaGetErrorString.restype = c.c_char_p

def call(name, *arguments):
    result = getattr(rt, name)(*arguments)
    assert result == 0, (name, result, rt.cudaGetErrorString(result))

n, p, q, free, total = c.c_int(-1), c.c_void_p(), c.c_void_p(), c.c_size_t(), c.c_size_t()
call("cudaDriverGetVersion", c.byref(n)); print("driver", n.value)
call("cudaGetDeviceCount", c.byref(n)); print("count", n.value)
properties = c.create_string_buffer(8192)
name = "cudaGetDeviceProperties_v2" if hasattr(rt, "cudaGetDeviceProperties_v2") else "cudaGetDeviceProperties"
call(name, properties, 0); print("name", properties.value.decode())
print("uuid", properties.raw[256:272].hex())
call("cudaDeviceGetAttribute", c.byref(n), 75, 0); print("major", n.value)
call("cudaSetDevice", 0); call("cudaFree", None)
call("cudaGetDevice", c.byref(n)); assert n.value == 0
call("cudaMemGetInfo", c.byref(free), c.byref(total)); before = free.value; print("total", total.value)
size = 5 << 20
call("cudaMalloc", c.byref(p), c.c_size_t(size)); print("address", hex(p.value))
call("cudaMemGetInfo", c.byref(free), c.byref(total)); assert free.value <= before - size
data, back = os.urandom(size), c.create_string_buffer(size)
call("cudaMemcpy", p, data, c.c_size_t(size), 1); call("cudaMemcpy", back, p, c.c_size_t(size), 2)
assert back.raw == data
call("cudaMemset", p, 7, c.c_size_t(1000)); call("cudaMemcpy", back, p, c.c_size_t(2000), 4)  # cudaMemcpyDefault
assert back.raw[:1000] == b"\7" * 1000 and back.raw[1000:2000] == data[1000:2000]
s, e, f = c.c_void_p(), c.c_void_p(), c.c_void_p()
call("cudaStreamCreate", c.byref(s)); call("cudaEventCreate", c.byref(e)); call("cudaEventCreate", c.byref(f))
call("cudaEventRecord", e, s); call("cudaMemcpyAsync", p, data, c.c_size_t(100), 1, s); call("cudaEventRecord", f, s)
call("cudaStreamSynchronize", s); call("cudaEventSynchronize", f); call("cudaEventQuery", f)
ms = c.c_float(-1); call("cudaEventElapsedTime", c.byref(ms), e, f); assert ms.value >= 0
call("cudaMallocHost", c.byref(q), c.c_size_t(4096)); call("cudaFreeHost", q)
call("cudaStreamDestroy", s); call("cudaEventDestroy", e); call("cudaEventDestroy", f)
call("cudaFree", p)
assert rt.cudaSetDevice(99) == 101 and rt.cudaMalloc(c.byref(p), c.c_size_t(1 << 40)) == 2
assert rt.cudaGetLastError() == 2
call("cudaDeviceSynchronize"); call("cudaDeviceReset")
call("cudaFree", None); call("cudaMalloc", c.byref(p), c.c_size_t(100)); call("cudaFree", p)
print("done")
"""


def _check(stage: Stage, runtime: Path, **environ: str) -> None:
    outcome = stage.run(PROGRAM, runtime, **environ)
    lines = {line.partition(" ")[0]: line.partition(" ")[2] for line in outcome.out.splitlines()}
    device = stage.peer.facts.devices[0]
    assert "done" in lines
    assert lines["driver"] == "13000" and lines["count"] == "1"
    assert lines["name"] == "rgpu test device" and lines["uuid"] == device.uuid.hex() and lines["major"] == "7"
    assert int(lines["total"]) == stage.peer.facts.quota and int(lines["address"], 16) >= device.range_base
    assert "not implemented" not in outcome.err and "not known" not in outcome.err, outcome.err
    assert stage.peer.hellos == 1
    names = stage.peer.names()
    assert names[0] == "session_open"
    # Before the reset and after it: two lives of the primary context.
    assert names.count("context_create") == 2
    assert names.index("context_destroy") < len(names) - 1 - names[::-1].index("context_create")


@pytest.mark.parametrize("version", ["12.8.90", "13.0.96"])
def test_stock_runtime(stage: Stage, version: str) -> None:
    _check(stage, stock_runtime(version))


def test_preloaded_by_name(stage: Stage) -> None:
    """LD_PRELOAD of the driver as well: the same file by both ways, one driver in the process."""
    _check(stage, stock_runtime("13.0.96"), LD_PRELOAD=str(stage.shim / "libcuda.so.1"))


@pytest.mark.parametrize("version", ["12.8.90", "13.0.96"])
def test_two_devices(make_stage: Callable[..., Stage], version: str) -> None:
    """The self-test signs every device; each has a primary context of its own."""
    stage = make_stage(devices=(peer.device(0), peer.device(1)))
    code = r"""
import ctypes as c, sys
rt = c.CDLL(sys.argv[1])
n, p, q = c.c_int(), c.c_void_p(), c.c_void_p()
assert rt.cudaGetDeviceCount(c.byref(n)) == 0
assert rt.cudaSetDevice(1) == 0 and rt.cudaMalloc(c.byref(p), c.c_size_t(4096)) == 0
assert rt.cudaSetDevice(0) == 0 and rt.cudaMalloc(c.byref(q), c.c_size_t(4096)) == 0
print(n.value, hex(p.value), hex(q.value))
"""
    count, first, second = stage.run(code, stock_runtime(version)).out.split()
    ranges = [device.range_base for device in stage.peer.facts.devices]
    assert count == "2" and int(first, 16) >= ranges[1] > int(second, 16) >= ranges[0]
    created = [arguments for name, arguments, _ in stage.peer.calls if name == "context_create"]
    assert [(call.device, call.primary) for call in created] == [(1, 1), (0, 1)]


def test_visible_devices_reorder(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(devices=(peer.device(0), peer.device(1)))
    code = r"""
import ctypes as c, sys
rt = c.CDLL(sys.argv[1])
n, p, d = c.c_int(), c.c_void_p(), c.c_int(-1)
assert rt.cudaGetDeviceCount(c.byref(n)) == 0
assert rt.cudaMalloc(c.byref(p), c.c_size_t(4096)) == 0 and rt.cudaGetDevice(c.byref(d)) == 0
text = c.create_string_buffer(20); assert rt.cudaDeviceGetPCIBusId(text, 20, 0) == 0
print(n.value, hex(p.value), d.value, text.value.decode())
"""
    runtime = stock_runtime("13.0.96")
    count, address, current, bus = stage.run(code, runtime, CUDA_VISIBLE_DEVICES="1").out.split()
    assert (count, current, bus) == ("1", "0", "0000:07:01.0")
    assert int(address, 16) >= stage.peer.facts.devices[1].range_base
    assert [arguments.device for name, arguments, _ in stage.peer.calls if name == "context_create"] == [1]


def test_device_order(make_stage: Callable[..., Stage]) -> None:
    """CUDA_DEVICE_ORDER=PCI_BUS_ID: CUDA_VISIBLE_DEVICES counts by PCI address, not as the session lists them."""
    stage = make_stage(devices=(peer.device(1), peer.device(0)))
    code = "import ctypes as c; d = c.CDLL('libcuda.so.1'); t = c.create_string_buffer(20); d.cuInit(0); " \
           "d.cuDeviceGetPCIBusId(t, 20, 0); print(t.value.decode())"
    assert stage.run(code).out.strip() == "0000:07:01.0"
    assert stage.run(code, CUDA_DEVICE_ORDER="PCI_BUS_ID").out.strip() == "0000:06:01.0"
    assert stage.run(code, CUDA_DEVICE_ORDER="PCI_BUS_ID", CUDA_VISIBLE_DEVICES="1").out.strip() == "0000:07:01.0"


COUNT = "import ctypes as c, sys; print(c.CDLL(sys.argv[1]).cudaGetDeviceCount(c.byref(c.c_int())))"


def test_no_agent(stage: Stage) -> None:
    outcome = stage.run(COUNT, stock_runtime("13.0.96"), RGPU_AGENT=None)
    assert outcome.out.split() == ["100"]
    assert len([line for line in outcome.err.splitlines() if "rgpu run" in line]) == 1


def test_no_visible_device_opens_no_session(stage: Stage) -> None:
    assert stage.run(COUNT, stock_runtime("13.0.96"), CUDA_VISIBLE_DEVICES="").out.split() == ["100"]
    assert stage.peer.hellos == 0


def test_older_driver_is_named(make_stage: Callable[..., Stage]) -> None:
    """What the launcher says of the server's driver is what the runtime sees, also before cuInit."""
    stage = make_stage(driver_version=12080)
    code = "import ctypes as c, sys; rt = c.CDLL(sys.argv[1]); n = c.c_int(); " \
           "print(rt.cudaDriverGetVersion(c.byref(n)), n.value, rt.cudaFree(None))"
    assert stage.run(code, stock_runtime("12.8.90"), RGPU_DRIVER_VERSION="12080").out.split() == ["0", "12080", "0"]
    assert isinstance(stage.peer.facts, facts.SessionFacts)


REGISTERED = r"""
import ctypes as c, struct, sys
rt = c.CDLL(sys.argv[1])
register = rt["__cudaRegisterFatBinary"]
register.restype = c.POINTER(c.c_void_p)
ptx = b'''.version 6.4
.target sm_75
.address_size 64
.const .align 4 .b8 scale[16];
.global .align 4 .b8 counter[4];
.visible .entry add(.param .u64 a, .param .u32 n) { ret; }
\0'''
ptx += b"\0" * (-len(ptx) % 8)
entry = struct.pack("<HHIQIIHHIIIQQQ", 1, 0x101, 64, len(ptx), 0, 0, 4, 6, 75, 0, 0, 0x11, 0, 0) + ptx
fatbin = c.create_string_buffer(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entry)) + entry, 16 + len(entry))
wrapper = c.create_string_buffer(struct.pack("<IIQQ", 0x466243B1, 1, c.addressof(fatbin), 0), 24)
handle = register(wrapper)
stub, scale, counter = (c.create_string_buffer(16) for _ in range(3))  # addresses that stand for the host's symbols
rt["__cudaRegisterFunction"](handle, stub, b"add", b"add", -1, None, None, None, None, None)
rt["__cudaRegisterVar"](handle, scale, b"scale", b"scale", 0, c.c_size_t(16), 1, 0)
rt["__cudaRegisterVar"](handle, counter, b"counter", b"counter", 0, c.c_size_t(4), 0, 0)
rt["__cudaRegisterFatBinaryEnd"](handle)

def launch(n):
    a, count = c.c_uint64(0x200000000000), c.c_uint32(n)
    arguments = (c.c_void_p * 2)(c.addressof(a), c.addressof(count))
    class Dim(c.Structure):
        _fields_ = [("x", c.c_uint), ("y", c.c_uint), ("z", c.c_uint)]
    return rt.cudaLaunchKernel(stub, Dim(4, 1, 1), Dim(64, 2, 1), arguments, c.c_size_t(100), None)

assert launch(7) == 0, launch(7)
assert rt.cudaMemcpyToSymbol(scale, b"0123456789abcdef", c.c_size_t(16), c.c_size_t(0), 1) == 0
back = c.create_string_buffer(16)
assert rt.cudaMemcpyFromSymbol(back, scale, c.c_size_t(16), c.c_size_t(0), 2) == 0 and back.raw == b"0123456789abcdef"
pointer = c.c_void_p(); assert rt.cudaGetSymbolAddress(c.byref(pointer), counter) == 0
blocks = c.c_int()
assert rt.cudaOccupancyMaxActiveBlocksPerMultiprocessor(c.byref(blocks), stub, 128, c.c_size_t(0)) == 0
assert blocks.value == 8, blocks.value
assert rt.cudaFuncSetAttribute(stub, 8, 60000) == 0
assert rt.cudaFuncSetAttribute(stub, 8, 70000) == 1 and rt.cudaGetLastError() == 1
assert rt.cudaDeviceSynchronize() == 0 and rt.cudaDeviceReset() == 0
assert launch(8) == 0 and rt.cudaDeviceSynchronize() == 0
print("done", hex(pointer.value))
"""


@pytest.mark.parametrize("version", ["12.8.90", "13.0.96"])
def test_registered_kernels(stage: Stage, version: str) -> None:
    """A compiled program registers its fat binary, kernels and variables; then it launches."""
    assert stage.run(REGISTERED, stock_runtime(version)).out.startswith("done 0x27")
    launches = [arguments for name, arguments, _ in stage.peer.calls if name == "launch"]
    assert [(call.grid_x, call.block_x, call.block_y, call.shared) for call in launches] == [(4, 64, 2, 100)] * 2
    assert [int.from_bytes(call.parameters[8:12], "little") for call in launches] == [7, 8]
    loads = [(arguments, payload) for name, arguments, payload in stage.peer.calls if name == "module_load"]
    # One load in each life of the context, each of the whole fat binary, and launches name the module of their time.
    assert [call.module for call, _ in loads] == [call.module for call in launches]
    assert all(payload[:4] == b"\x50\xed\x55\xba" and b".entry add" in payload for _, payload in loads)
    attributes = [arguments for name, arguments, _ in stage.peer.calls if name == "function_attribute"]
    assert [(call.attribute, call.value) for call in attributes][:1] == [(8, 60000)]
