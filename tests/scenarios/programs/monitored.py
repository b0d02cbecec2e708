"""Asks NVML about the device before the program has a session and while it has one, and compares with the driver.

Argument: how many sessions the run has before its first CUDA call.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pynvml as n
from cuda.bindings import driver as d


def ok(answer: tuple) -> object:
    assert answer[0] == 0, answer
    return answer[1] if len(answer) == 2 else answer[1:]


def rows() -> int:
    """Sessions of this run that the pool knows."""
    listed = subprocess.run([sys.executable, "-m", "rgpu.cli.main", "ps", "--all", "-o", "json"], capture_output=True,
                            text=True, check=True).stdout
    return listed.count(f'"session": "monitored-{sys.argv[1]}')


n.nvmlInit()
assert n.nvmlDeviceGetCount() == 1
device = n.nvmlDeviceGetHandleByIndex(0)
before = (n.nvmlDeviceGetUUID(device), n.nvmlDeviceGetName(device), n.nvmlDeviceGetPciInfo(device).busId)
memory = n.nvmlDeviceGetMemoryInfo(device)
assert (memory.total, memory.used) == (64 << 20, 0) and n.nvmlDeviceGetComputeRunningProcesses(device) == []
assert n.nvmlSystemGetCudaDriverVersion() == int(os.environ["RGPU_DRIVER_VERSION"])
assert rows() == int(sys.argv[1]), "looking made a session"

ok(d.cuInit(0))
context = ok(d.cuDevicePrimaryCtxRetain(0))
ok(d.cuCtxSetCurrent(context))
assert n.nvmlSystemGetCudaDriverVersion() == ok(d.cuDriverGetVersion())
held = []
for size in (1, 5 << 20, 3 << 20, 100):
    held.append(ok(d.cuMemAlloc(size)))
    free, total = ok(d.cuMemGetInfo())
    memory = n.nvmlDeviceGetMemoryInfo(device)
    assert (memory.total, memory.free, memory.used) == (total, free, total - free), (memory, free, total)
properties = d.CUmemAllocationProp()
properties.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
properties.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
physical = ok(d.cuMemCreate(4 << 20, properties, 0))  # counts from here on, as cuMemGetInfo says
assert n.nvmlDeviceGetMemoryInfo(device).used == memory.used + (4 << 20)
ok(d.cuMemRelease(physical))
assert n.nvmlDeviceGetMemoryInfo(device).used == memory.used
(process,) = n.nvmlDeviceGetComputeRunningProcesses(device)
assert (process.pid, process.usedGpuMemory) == (os.getpid(), total - free)
uuid = bytes(ok(d.cuDeviceGetUuid(0)).bytes).hex()
assert n.nvmlDeviceGetUUID(device).removeprefix("GPU-").replace("-", "") == uuid
assert n.nvmlDeviceGetPciInfo(device).busId.endswith(ok(d.cuDeviceGetPCIBusId(16, 0)).split(b"\0")[0].decode().upper())
assert before == (n.nvmlDeviceGetUUID(device), n.nvmlDeviceGetName(device), n.nvmlDeviceGetPciInfo(device).busId)
for ask in (n.nvmlDeviceGetUtilizationRates, n.nvmlDeviceGetPowerUsage, n.nvmlDeviceGetFanSpeed):
    try:
        ask(device)
    except n.NVMLError_NotSupported:
        continue
    raise AssertionError(ask)
# A process of its own, which never uses CUDA, sees the session of this one.
print(subprocess.run([sys.executable, "-m", "gpustat", "--no-color", "--json"], capture_output=True, text=True,
                     check=True).stdout)
for address in held:
    ok(d.cuMemFree(address))
assert n.nvmlDeviceGetMemoryInfo(device).used == 0
code = ctypes.CDLL("libnvidia-ml.so.1").nvmlInit_v2()
assert code == 0 and rows() == 1
print("monitored")
