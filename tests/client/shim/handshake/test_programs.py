"""Programs on the driver API itself: cuda.bindings, cuda.core and Numba, unchanged."""

from __future__ import annotations

import site
from pathlib import Path

import pytest

from tests.client.shim.handshake.conftest import Stage

BINDINGS = r"""
import ctypes
import numpy as np
from cuda.bindings import driver as d

KINDS = (None, ctypes.c_float, ctypes.c_uint)

def ok(answer):
    assert answer[0] == d.CUresult.CUDA_SUCCESS, answer
    return answer[1] if len(answer) == 2 else answer[1:]

ok(d.cuInit(0))
assert ok(d.cuDriverGetVersion()) == 13000
assert ok(d.cuDeviceGetCount()) == 1
device = ok(d.cuDeviceGet(0))
print(ok(d.cuDeviceGetName(64, device)).split(b"\0")[0].decode())
context = ok(d.cuDevicePrimaryCtxRetain(device)); ok(d.cuCtxSetCurrent(context))
assert int(ok(d.cuCtxGetDevice())) == 0
ptx = b'''.version 6.4
.target sm_75
.address_size 64
.global .align 4 .u32 total[8];
.visible .entry fill(.param .u64 a, .param .f32 x, .param .u32 n) { ret; }
.visible .entry other(.param .u8 flag) { ret; }
'''
module = ok(d.cuModuleLoadData(ptx))
fill = ok(d.cuModuleGetFunction(module, b"fill"))
assert d.cuModuleGetFunction(module, b"nope")[0] == d.CUresult.CUDA_ERROR_NOT_FOUND
assert ok(d.cuModuleGetFunctionCount(module)) == 2
assert [ok(d.cuFuncGetParamInfo(fill, i)) for i in range(3)] == [(0, 8), (8, 4), (12, 4)]
assert d.cuFuncGetParamInfo(fill, 3)[0] == d.CUresult.CUDA_ERROR_INVALID_VALUE
address, size = ok(d.cuModuleGetGlobal(module, b"total")); assert size == 32
p = ok(d.cuMemAlloc(4096)); stream = ok(d.cuStreamCreate(0)); event = ok(d.cuEventCreate(0))
data = np.arange(1024, dtype=np.float32); back = np.zeros_like(data)
ok(d.cuMemcpyHtoDAsync(p, data.ctypes.data, data.nbytes, stream))
ok(d.cuLaunchKernel(fill, 4, 1, 1, 256, 1, 1, 0, stream, ((p, 1.5, 1024), KINDS), 0))
ok(d.cuEventRecord(event, stream)); ok(d.cuEventSynchronize(event))
ok(d.cuMemcpyDtoHAsync(back.ctypes.data, p, back.nbytes, stream)); ok(d.cuStreamSynchronize(stream))
assert (back == data).all()
library = ok(d.cuLibraryLoadData(ptx, [], [], 0, [], [], 0))
kernel = ok(d.cuLibraryGetKernel(library, b"fill")); assert ok(d.cuLibraryGetKernelCount(library)) == 2
assert ok(d.cuKernelGetName(kernel)) == b"fill"
ok(d.cuLaunchKernel(d.CUfunction(int(kernel)), 1, 1, 1, 1, 1, 1, 0, 0, ((p, 2.5, 1), KINDS), 0))
result, *_ = d.cuModuleLoadData(b".version 6.4\n.target sm_75\n.address_size 64\nbogus\n")
assert result == d.CUresult.CUDA_ERROR_INVALID_PTX
ok(d.cuLibraryUnload(library)); ok(d.cuModuleUnload(module)); ok(d.cuStreamDestroy(stream)); ok(d.cuMemFree(p))
ok(d.cuCtxSynchronize()); ok(d.cuDevicePrimaryCtxRelease(device))
print("done")
"""


def test_cuda_bindings(stage: Stage) -> None:
    pytest.importorskip("cuda.bindings.driver")
    outcome = stage.run(BINDINGS)
    assert outcome.out.split("\n")[:2] == ["rgpu test device", "done"]
    launches = [arguments for name, arguments, _ in stage.peer.calls if name == "launch"]
    assert len(launches) == 2 and launches[0].module != launches[1].module
    names = stage.peer.names()
    assert names[-1] in ("context_destroy", "completed") and names.count("module_unload") == 2


CORE = r"""
import numpy as np
from cuda.core import Device, Linker, LinkerOptions, ObjectCode, Program, ProgramOptions, LaunchConfig, launch
device = Device(); device.set_current(); print(device.name, device.compute_capability)
stream = device.create_stream()
code = 'extern "C" __global__ void twice(float *x, int n) { int i = threadIdx.x; if (i < n) x[i] *= 2; }'
program = Program(code, "c++", ProgramOptions(arch="compute_75"))
kernel = program.compile("ptx").get_kernel("twice")
buffer = device.allocate(4096, stream=stream)
launch(stream, LaunchConfig(grid=2, block=64), kernel, buffer, np.int32(64))
stream.sync(); buffer.close(); print("done")
"""


def test_cuda_core(stage: Stage) -> None:
    pytest.importorskip("cuda.core")
    outcome = stage.run(CORE)
    assert "rgpu test device" in outcome.out and "done" in outcome.out
    assert [a.block_x for name, a, _ in stage.peer.calls if name == "launch"] == [64]


NUMBA = r"""
import numpy as np
from numba import cuda
assert cuda.is_available()
assert cuda.detect()
device = cuda.get_current_device(); print(device.compute_capability)
a = np.arange(10000, dtype=np.float64)
d = cuda.to_device(a); assert (d.copy_to_host() == a).all()

@cuda.jit("void(float64[:], float64)")
def scale(x, f):
    i = cuda.grid(1)
    if i < x.size:
        x[i] *= f

stream = cuda.stream(); scale[40, 256, stream](d, 2.0); stream.synchronize()
event = cuda.event(); event.record(); event.synchronize()
pinned = cuda.pinned_array(100, dtype=np.int32); pinned[:] = 3
e = cuda.to_device(pinned); assert (e.copy_to_host() == 3).all()
print(cuda.current_context().get_memory_info().total)
print("done")
"""


#: Where nvJitLink is not installed, cuda.core links through the driver's cuLink functions.
WITHOUT_NVJITLINK = """
import cuda.pathfinder as finder
found = finder.load_nvidia_dynamic_lib
def load(name):
    if name == "nvJitLink":
        raise finder.DynamicLibNotFoundError("hidden by the test")
    return found(name)
finder.load_nvidia_dynamic_lib = load
"""


@pytest.mark.parametrize("linker", ["nvjitlink", "driver"])
def test_numba(stage: Stage, linker: str) -> None:
    pytest.importorskip("numba.cuda")
    if linker == "nvjitlink":
        if not list(Path(site.getsitepackages()[0]).glob("nvidia/*/lib/libnvJitLink.so*")):
            pytest.skip("nvidia-nvjitlink is not installed: the cpu device cannot run the cubins that it makes")
    code = (WITHOUT_NVJITLINK if linker == "driver" else "") + NUMBA
    outcome = stage.run(code, NUMBA_CUDA_DRIVER=str(stage.shim / "libcuda.so.1"))
    assert "done" in outcome.out and "major=7, minor=5" in outcome.out
    launches = [arguments for name, arguments, _ in stage.peer.calls if name == "launch"]
    assert [(call.grid_x, call.block_x) for call in launches] == [(40, 256)]
    assert ("link" in stage.peer.names()) == (linker == "driver")
