"""Contexts, modules, libraries and kernels by ctypes: life, threads, several contexts, wrong use."""

from __future__ import annotations

from collections.abc import Callable

from rgpu.session import facts
from tests.client.shim.handshake.conftest import Stage
from tests.support.eventually import eventually
from tests.support.shim import peer
from tests.support.shim.peer import START


def _run(stage: Stage, code: str, **environ: str) -> str:
    return stage.run(START + code, **environ).out


def test_context_stack_is_the_threads_own(stage: Stage) -> None:
    _run(stage, r"""
primary = new("cuDevicePrimaryCtxRetain", 0); ok("cuCtxSetCurrent", primary)
other = new("cuCtxCreate_v2", 0, 0)
seen = []
def thread():
    seen.append(new("cuCtxGetCurrent").value)
    ok("cuCtxSetCurrent", other); seen.append(new("cuCtxGetCurrent").value == other.value)
    seen.append(d.cuCtxSynchronize())
    barrier.wait(); barrier.wait()
    seen.append(d.cuCtxSynchronize()); seen.append(d.cuMemAlloc_v2(c.byref(c.c_void_p()), c.c_size_t(8)))
barrier = threading.Barrier(2)
t = threading.Thread(target=thread); t.start(); barrier.wait()
assert new("cuCtxGetCurrent").value == other.value
ok("cuCtxDestroy_v2", other); assert new("cuCtxGetCurrent").value == primary.value
assert d.cuCtxDestroy_v2(other) == 201 and d.cuCtxSetCurrent(other) == 201
barrier.wait(); t.join()
assert seen == [None, True, 0, 709, 709], seen
""")


def test_nothing_reaches_the_server_before_a_context_is_active(stage: Stage) -> None:
    _run(stage, r"""
n = c.c_int(); ok("cuDeviceGetCount", c.byref(n)); ok("cuDevicePrimaryCtxGetState", 0, c.byref(n), c.byref(n))
ok("cuDevicePrimaryCtxSetFlags_v2", 0, 4)
library = new("cuLibraryLoadData", PTX, None, None, 0, None, None, 0)
""")
    eventually(lambda: stage.peer.names() == ["session_open"], stage.peer.names)


def test_flags_and_limits_travel(stage: Stage) -> None:
    _run(stage, r"""
ok("cuDevicePrimaryCtxSetFlags_v2", 0, 4)
primary = new("cuDevicePrimaryCtxRetain", 0); ok("cuCtxSetCurrent", primary)
ok("cuCtxSetLimit", 0, c.c_size_t(5000)); ok("cuDevicePrimaryCtxSetFlags_v2", 0, 1); ok("cuCtxSetFlags", 1)
ok("cuDevicePrimaryCtxReset_v2", 0); ok("cuDevicePrimaryCtxRetain", c.byref(primary), 0)
assert new("cuCtxGetLimit", 0, kind=c.c_size_t).value == 1024  # of the new life
""")
    calls = [(name, arguments) for name, arguments, _ in stage.peer.calls if name.startswith("context_")]
    assert [name for name, _ in calls if name != "context_synchronize"] == [
        "context_create", "context_limit", "context_flags", "context_destroy", "context_create"]
    assert calls[0][1].flags == 4 and calls[1][1].value == 5008 and calls[2][1].flags == 1


STORAGE = r"""
table = c.POINTER(c.c_void_p)()
uuid = bytes.fromhex("c693336e1121df11a8c368f355d89593")
ok("cuGetExportTable", c.byref(table), uuid)
DESTROY = c.CFUNCTYPE(None, c.c_void_p, c.c_void_p, c.c_void_p)
put = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p, c.c_void_p, DESTROY)(table[0])
delete = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p)(table[1])
get = c.CFUNCTYPE(c.c_int, c.POINTER(c.c_void_p), c.c_void_p, c.c_void_p)(table[2])
assert not table[3]
out = c.c_void_p(); gone = []
@DESTROY
def destroy(context, key, value): gone.append((context, key, value, d.cuCtxSynchronize()))
assert get(c.byref(out), None, 5) == 201
context = new("cuCtxCreate_v2", 0, 0)
assert get(c.byref(out), None, 5) == 400 and get(c.byref(out), context, 5) == 400
assert put(None, 5, 50, destroy) == 0 and put(context, 6, 60, destroy) == 0 and put(context, 7, 70, destroy) == 0
assert get(c.byref(out), context, 5) == 0 and out.value == 50
assert delete(None, 6) == 0 and delete(None, 6) == 400 and get(c.byref(out), None, 6) == 400
ok("cuCtxDestroy_v2", context)
assert gone == [(context.value, 5, 50, 0), (context.value, 7, 70, 0)], gone  # the context still works meanwhile
primary = new("cuDevicePrimaryCtxRetain", 0)
assert put(primary, 1, 10, destroy) == 0; ok("cuDevicePrimaryCtxReset_v2", 0)
assert gone[2:] == [(primary.value, 1, 10, 201)] and get(c.byref(out), primary, 1) == 400
"""


def test_context_storage_runs_its_destructors(stage: Stage) -> None:
    _run(stage, STORAGE)


def test_library_in_two_contexts(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(devices=(peer.device(0), peer.device(1)))
    _run(stage, r"""
first, second = new("cuDevicePrimaryCtxRetain", 0), new("cuDevicePrimaryCtxRetain", 1)
library = new("cuLibraryLoadData", PTX, None, None, 0, None, None, 0)
ok("cuCtxSetCurrent", first)
kernel = new("cuLibraryGetKernel", library, b"one"); f = new("cuKernelGetFunction", kernel)
ok("cuKernelSetAttribute", 8, 60000, kernel, 0)
a = new("cuLibraryGetGlobal", c.byref(c.c_size_t()), library, b"counter", kind=c.c_uint64)
ok("cuCtxSetCurrent", second)
g = new("cuKernelGetFunction", kernel); assert f.value != g.value
b = new("cuLibraryGetGlobal", c.byref(c.c_size_t()), library, b"counter", kind=c.c_uint64); assert a.value != b.value
get = lambda device: new("cuKernelGetAttribute", 8, kernel, device, kind=c.c_int).value
assert (get(0), get(1)) == (60000, 49152)
assert new("cuFuncGetModule", f).value != new("cuFuncGetModule", g).value == new("cuLibraryGetModule", library).value
assert d.cuModuleUnload(new("cuFuncGetModule", f)) == 800
ok("cuDevicePrimaryCtxReset_v2", 0); assert d.cuFuncGetAttribute(c.byref(c.c_int()), 0, f) == 400
assert new("cuKernelGetFunction", kernel).value == g.value
ok("cuDevicePrimaryCtxRetain", c.byref(first), 0); ok("cuCtxSetCurrent", first)
h = new("cuKernelGetFunction", kernel); assert new("cuFuncGetAttribute", 8, h, kind=c.c_int).value == 60000
ok("cuLibraryUnload", library)
assert d.cuLibraryUnload(library) == 400 and d.cuKernelGetFunction(c.byref(f), kernel) == 400
assert d.cuFuncGetAttribute(c.byref(c.c_int()), 0, h) == 400
""")
    loads = [arguments for name, arguments, _ in stage.peer.calls if name == "module_load"]
    created = [arguments for name, arguments, _ in stage.peer.calls if name == "context_create"]
    assert [call.context for call in loads] == [created[0].context, created[1].context, created[2].context]
    unloaded = {arguments.module for name, arguments, _ in stage.peer.calls if name == "module_unload"}
    assert unloaded == {loads[1].module, loads[2].module}  # the first ended with its context
    attributes = [arguments.module for name, arguments, _ in stage.peer.calls if name == "function_attribute"]
    assert attributes == [loads[0].module, loads[2].module]


def test_library_loaded_by_many_threads_is_sent_once(stage: Stage) -> None:
    _run(stage, r"""
primary = new("cuDevicePrimaryCtxRetain", 0)
library = new("cuLibraryLoadData", PTX, None, None, 0, None, None, 0)
found = []
def thread():
    ok("cuCtxSetCurrent", primary)
    kernel = new("cuLibraryGetKernel", library, b"two")
    found.append((kernel.value, new("cuKernelGetFunction", kernel).value))
threads = [threading.Thread(target=thread) for _ in range(16)]
for t in threads: t.start()
for t in threads: t.join()
assert len(found) == 16 and len(set(found)) == 1, found
""")
    assert stage.peer.names().count("module_load") == 1


def test_library_keeps_a_copy_unless_told_not_to(stage: Stage) -> None:
    _run(stage, r"""
ok("cuCtxSetCurrent", new("cuDevicePrimaryCtxRetain", 0))
for preserved in (0, 1):
    binary = c.create_string_buffer(PTX, len(PTX))
    library = new("cuLibraryLoadData", binary, None, None, 0, (c.c_int * 1)(1), (c.c_void_p * 1)(preserved), 1)
    if not preserved: c.memset(binary, 0x41, len(PTX))
    new("cuLibraryGetKernel", library, b"one")
""")
    assert [payload for name, _, payload in stage.peer.calls if name == "module_load"] == [
        START.split("PTX = b'''")[1].split("\\0")[0].encode()] * 2


def test_library_without_a_context_uses_the_first_device(stage: Stage) -> None:
    _run(stage, r"""
library = new("cuLibraryLoadData", PTX, None, None, 0, None, None, 0)
kernel = new("cuLibraryGetKernel", library, b"one")
assert new("cuKernelGetAttribute", 4, kernel, 0, kind=c.c_int).value == 16
assert d.cuKernelGetFunction(c.byref(c.c_void_p()), kernel) == 201
ok("cuLibraryUnload", library)
""")
    names = [name for name in stage.peer.names() if name not in ("completed", "context_synchronize")]
    assert names == ["session_open", "context_create", "module_load", "module_unload", "context_destroy"]


def test_no_binary_is_seen_without_asking(stage: Stage) -> None:
    _run(stage, r"""
ok("cuCtxSetCurrent", new("cuDevicePrimaryCtxRetain", 0))
entry = struct.pack("<HHIQIIHHI", 2, 0x101, 64, 8, 0, 0, 0, 0, 90) + bytes(32) + bytes(8)
fatbin = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entry)) + entry
assert d.cuModuleLoadData(c.byref(c.c_void_p()), fatbin) == 209
""")
    assert "module_load" not in stage.peer.names()


def _answer(table: bytes) -> Callable[[bytes], tuple[int, bytes, bytes]]:
    return lambda _: (0, table, b"")


def test_hostile_module_table(stage: Stage) -> None:
    """A worker that answers nonsense: an error code, and the module is given back."""
    many_parameters = b"\x01\0\0\0\x02\0ab\xff\xff\xff\x7f" + bytes(64)
    for table in (b"", b"\xff\xff\xff\xff", bytes(8) + b"x", many_parameters, bytes(3)):
        stage.peer.loads.append(_answer(table))
    _run(stage, r"""
ok("cuCtxSetCurrent", new("cuDevicePrimaryCtxRetain", 0))
assert [d.cuModuleLoadData(c.byref(c.c_void_p()), PTX) for _ in range(5)] == [999] * 5
ok("cuModuleLoadData", c.byref(c.c_void_p()), PTX)
""")
    assert stage.peer.names().count("module_unload") == 5


def test_jit_logs_and_options(stage: Stage) -> None:
    _run(stage, r"""
ok("cuCtxSetCurrent", new("cuDevicePrimaryCtxRetain", 0))
def load(text, room):
    info, error = c.create_string_buffer(b"\xff" * 64, 64), c.create_string_buffer(b"\xff" * 64, 64)
    options = (c.c_int * 6)(3, 4, 5, 6, 0, 7)  # two logs with their sizes, MAX_REGISTERS, OPTIMIZATION_LEVEL
    values = (c.c_void_p * 6)(c.addressof(info), room, c.addressof(error), room, 32, 3)
    result = d.cuModuleLoadDataEx(c.byref(c.c_void_p()), text, 6, options, values)
    return result, info.raw.split(b"\0")[0], error.raw.split(b"\0")[0], values[1], values[3], error.raw[room:room + 1]
result, info, error, info_size, error_size, behind = load(PTX, 20)
assert (result, info, error, info_size, error_size) == (0, b"loaded", b"", 6, None), (result, info, error, info_size)
result, info, error, info_size, error_size, behind = load(PTX.replace(b"two", b"bogus two"), 20)
assert (result, info, error, info_size, error_size, behind) == (218, b"", b"ptxas application p", None, 19, b"\xff")
assert d.cuModuleLoadDataEx(c.byref(c.c_void_p()), PTX, 2, None, None) == 1
""")
    options = [arguments.options for name, arguments, _ in stage.peer.calls if name == "module_load"]
    assert options[0].hex() == "00000000" "2000000000000000" "07000000" "0300000000000000"


def test_module_from_a_file(stage: Stage) -> None:
    _run(stage, r"""
import tempfile
ok("cuCtxSetCurrent", new("cuDevicePrimaryCtxRetain", 0))
with tempfile.NamedTemporaryFile(suffix=".ptx") as file:
    file.write(PTX.rstrip(b"\0")); file.flush()
    module = new("cuModuleLoad", file.name.encode())
    assert new("cuModuleGetFunctionCount", module, kind=c.c_uint).value == 2
    library = new("cuLibraryLoadFromFile", file.name.encode(), None, None, 0, None, None, 0)
new("cuLibraryGetKernel", library, b"two")
with tempfile.NamedTemporaryFile() as file: assert d.cuModuleLoad(c.byref(module), file.name.encode()) == 200
assert d.cuModuleLoad(c.byref(module), b"/") == 301
""")


def test_handles_of_another_kind_and_wild_ones(stage: Stage) -> None:
    _run(stage, r"""
context = new("cuDevicePrimaryCtxRetain", 0); ok("cuCtxSetCurrent", context)
module = new("cuModuleLoadData", PTX); function = new("cuModuleGetFunction", module, b"one")
for wrong in (context, c.c_void_p(0), c.c_void_p(1), c.c_void_p(0x1234567812345678), c.c_void_p(module.value + 8)):
    assert d.cuModuleUnload(wrong) == 400 and d.cuModuleGetFunction(c.byref(c.c_void_p()), wrong, b"one") == 400
    assert d.cuFuncGetAttribute(c.byref(c.c_int()), 0, wrong) == 400 and d.cuLibraryUnload(wrong) == 400
    assert d.cuKernelGetName(c.byref(c.c_void_p()), wrong) == 400 and d.cuLinkDestroy(wrong) == 400
    assert d.cuOccupancyMaxActiveBlocksPerMultiprocessor(c.byref(c.c_int()), wrong, 32, c.c_size_t(0)) == 400
assert d.cuCtxSetCurrent(module) == 201 and d.cuCtxPushCurrent_v2(function) == 201
assert c.string_at(function.value, 0x488) == bytes(0x488)  # libraries look behind handles
ok("cuModuleUnload", module); assert d.cuModuleUnload(module) == 400
""")


def test_total_memory_is_the_quota(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(quota=100 << 20)
    assert _run(stage, "print(new('cuDeviceTotalMem_v2', 0, kind=c.c_size_t).value)").split() == [str(100 << 20)]


def test_peers(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(devices=(peer.device(0), peer.device(1)))
    _run(stage, r"""
first, second = new("cuDevicePrimaryCtxRetain", 0), new("cuDevicePrimaryCtxRetain", 1)
ok("cuCtxSetCurrent", first)
assert new("cuDeviceCanAccessPeer", 0, 1, kind=c.c_int).value == 0
assert [d.cuCtxEnablePeerAccess(x, 0) for x in (first, second, None)] == [101, 217, 201]
assert d.cuCtxDisablePeerAccess(second) == 705
""")


def test_no_device_in_the_session(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(devices=())
    code = "import ctypes as c; d = c.CDLL('libcuda.so.1'); print(d.cuInit(0), d.cuDeviceGetCount(c.byref(c.c_int())))"
    assert stage.run(code).out.split() == ["100", "3"]
    assert isinstance(stage.peer.facts, facts.SessionFacts)
