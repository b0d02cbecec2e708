"""The device with the real PTX engine: kernels from NVRTC, globals, faults, linking, concurrency."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from cuda.bindings import nvrtc

from rgpu.checkpoint.device import GRANULE, Launch, ModuleTable
from rgpu.server.device.cpu import CpuDevice
from rgpu.session.addresses import DEVICE_BASE
from rgpu.session.errors import DeviceError
from tests.server.device.cpu_device.conftest import WAIT

A, B = 20, 21
BASE = DEVICE_BASE

SOURCE = """
__device__ int counter = 5;
__constant__ float factor[2] = {2.0f, 3.0f};
extern "C" __global__ void scale(float *x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= factor[1];
    if (i == 0) counter += 1;
}
extern "C" __global__ void spin(volatile int *flag, int *out) { while (!*flag) { } *out = 1; }
extern "C" __global__ void touch(int *p) { *p = 1; }
"""


@functools.cache
def ptx(source: str, *options: str) -> bytes:
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"test.cu", 0, [], [])
    flags = [b"--gpu-architecture=compute_75", *(option.encode() for option in options)]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    assert error == 0
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = b" " * size
    nvrtc.nvrtcGetPTX(program, text)
    return text


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    made = CpuDevice(0, 64 << 20, 2)
    made.create_context(16, 0, True)
    made.map(BASE, GRANULE)
    made.allocate(BASE, 1 << 20)
    made.create_stream(A, 16, 1, 0)
    made.create_stream(B, 16, 1, 0)
    yield made
    made.close()


def launch(device: CpuDevice, table: ModuleTable, name: str, seq: int, parameters: bytes, stream: int = A,
           grid: int = 1, block: int = 1, module: int = 1) -> None:
    index = [function.name for function in table.functions].index(name)
    device.launch(seq, Launch(module, index, (grid, 1, 1), (block, 1, 1), 0, stream, parameters))


def test_a_kernel_with_globals_and_constants(device: CpuDevice) -> None:
    table, _ = device.load(1, ptx(SOURCE), b"", False)
    places = {variable.name: variable for variable in table.globals}
    assert device.read(places["counter"].address, 4) == struct.pack("<i", 5)
    assert device.read(places["factor"].address, 8) == struct.pack("<2f", 2, 3)
    x = np.arange(1000, dtype=np.float32)
    device.copy_in(1, A, BASE, x.nbytes, x.nbytes, 1, x.tobytes())
    launch(device, table, "scale", 2, struct.pack("<Qi", BASE, 1000), grid=8, block=128)
    assert device.wait_complete(2, WAIT) and device.error == 0, device.error_detail()
    assert device.read(BASE, x.nbytes) == (3 * x).tobytes()
    assert device.read(places["counter"].address, 4) == struct.pack("<i", 6)
    device.write(places["factor"].address + 4, struct.pack("<f", 10))
    launch(device, table, "scale", 3, struct.pack("<Qi", BASE, 1000), grid=8, block=128)
    assert device.drain(WAIT)
    assert device.read(BASE, x.nbytes) == (30 * x).tobytes()
    scale = next(function for function in table.functions if function.name == "scale")
    assert scale.parameters == ((0, 8), (8, 4))


def test_a_spinning_kernel_and_a_copy_in_another_stream(device: CpuDevice) -> None:
    table, _ = device.load(1, ptx(SOURCE), b"", False)
    launch(device, table, "spin", 1, struct.pack("<QQ", BASE, BASE + 4096))
    assert not device.wait_complete(1, 0.05)
    device.copy_in(2, B, BASE, 4, 4, 1, b"\1\0\0\0")
    assert device.wait_complete(1, WAIT)
    assert device.read(BASE + 4096, 4) == b"\1\0\0\0"


@pytest.mark.parametrize("address", [8, BASE - 4, BASE + (1 << 20), BASE + GRANULE, 2**63])
def test_a_wild_pointer_is_an_illegal_address(device: CpuDevice, address: int) -> None:
    table, _ = device.load(1, ptx(SOURCE), b"", False)
    launch(device, table, "touch", 1, struct.pack("<Q", address))
    assert device.drain(WAIT)
    assert device.error == 700, device.error_detail()
    assert "touch" in device.error_detail()


def test_a_hanging_kernel_is_cancelled_by_an_error_elsewhere(device: CpuDevice) -> None:
    table, _ = device.load(1, ptx(SOURCE), b"", False)
    launch(device, table, "spin", 1, struct.pack("<QQ", BASE, BASE + 4096), A)
    launch(device, table, "touch", 2, struct.pack("<Q", 8), B)
    assert device.drain(WAIT)
    assert device.error == 700


def test_unsupported_code_is_refused_with_its_line(device: CpuDevice) -> None:
    with pytest.raises(DeviceError) as caught:
        device.load(1, ptx(SOURCE).replace(b".target sm_75", b".target sm_90"), b"", False)
    assert caught.value.result == 218
    with pytest.raises(DeviceError) as caught:
        device.load(1, b".version 8.0\n.target sm_75\n.address_size 64\n.visible .entry k() {\n nonsense.u32 x;\n}\n",
                    b"", False)
    assert caught.value.result == 218 and caught.value.message.startswith("line 5: ")


def test_separately_compiled_modules_are_linked_and_run(device: CpuDevice) -> None:
    main = ptx('extern "C" __device__ int twice(int); extern __device__ int shared_value;\n'
               'extern "C" __global__ void k(int *p) { *p = twice(*p) + shared_value; }\n',
               "--relocatable-device-code=true")
    library = ptx('__device__ int shared_value = 100;\n'
                  'extern "C" __device__ __noinline__ int half_(int x) { return x / 2; }\n'
                  'extern "C" __device__ int twice(int x) { return half_(4 * x); }\n', "--relocatable-device-code=true")
    binary, _ = device.link([(1, "main", main), (1, "library", library)], b"")
    table, _ = device.load(1, binary, b"", False)
    device.write(BASE, struct.pack("<i", 21))
    launch(device, table, "k", 1, struct.pack("<Q", BASE))
    assert device.drain(WAIT) and device.error == 0, device.error_detail()
    assert device.read(BASE, 4) == struct.pack("<i", 142)
