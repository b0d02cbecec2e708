"""What a program without a framework feels first: driver, module, kernel, small calls, copies. Only cuda.bindings.

Prints rows as the other workloads do, then waits for a line on standard input, so that its session can be looked at.
"""

import ctypes
import sys
import time

began = time.perf_counter()
from common import row  # noqa: E402
from cuda.bindings import driver  # noqa: E402

PTX = b""".version 7.0
.target sm_75
.address_size 64
.visible .entry add_one(.param .u64 p, .param .u32 n) {
  .reg .pred %q; .reg .b32 %r<6>; .reg .b64 %d<4>;
  ld.param.u64 %d1, [p]; ld.param.u32 %r1, [n];
  mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x; mad.lo.s32 %r2, %r2, %r3, %r4;
  setp.ge.u32 %q, %r2, %r1; @%q bra DONE;
  mul.wide.u32 %d2, %r2, 4; add.s64 %d3, %d1, %d2;
  ld.global.u32 %r5, [%d3]; add.u32 %r5, %r5, 1; st.global.u32 [%d3], %r5;
DONE: ret;
}
"""


def check(result):
    error, *values = result
    if int(error):
        raise SystemExit(f"{error!r}")
    return values[0] if len(values) == 1 else tuple(values)


def best(action, count):
    """Median of five runs of ``count``, s each."""
    found = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(count):
            action()
        found.append((time.perf_counter() - start) / count)
    return sorted(found)[2]


def stage(name, action):
    start = time.perf_counter()
    result = action()
    row(name, "ms", (time.perf_counter() - start) * 1e3, 1)
    return result


def context():
    check(driver.cuInit(0))
    device = check(driver.cuDeviceGet(0))
    check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(device))))
    return device


large = int(sys.argv[1]) << 20
device = stage("driver and context", context)
kernel = check(driver.cuModuleGetFunction(stage("first module (PTX)", lambda: check(driver.cuModuleLoadData(PTX))),
                                          b"add_one"))
memory = check(driver.cuMemAlloc(large))
check(driver.cuMemsetD8(memory, 0, large))


def launch():
    check(driver.cuLaunchKernel(kernel, 1, 1, 1, 64, 1, 1, 0, 0,
                                ((int(memory), 64), (ctypes.c_void_p, ctypes.c_uint32)), 0))


def first():
    launch()
    check(driver.cuCtxSynchronize())


stage("first launch and wait", first)
row("to the first result", "ms", (time.perf_counter() - began) * 1e3, 1)
word, pageable = bytearray(4), bytearray(large)
check(driver.cuMemcpyDtoH(word, memory, 4))
if int.from_bytes(word, "little") != 1:
    raise SystemExit(f"a wrong result: {int.from_bytes(word, 'little')}")
row("launch, tiny", "us", best(launch, 300) * 1e6, 5)
check(driver.cuCtxSynchronize())
row("item (4 bytes back)", "us", best(lambda: check(driver.cuMemcpyDtoH(word, memory, 4)), 100) * 1e6, 5)
for size, name in ((1 << 20, "1 MB"), (large, f"{large >> 20} MiB")):
    count = max(1, (8 << 20) // size)
    to = best(lambda size=size: (check(driver.cuMemcpyHtoD(memory, pageable, size)), check(driver.cuCtxSynchronize())),
              count)
    back = best(lambda size=size: check(driver.cuMemcpyDtoH(pageable, memory, size)), count)
    row(f"{name} to the device, pageable", "GB/s", size / to / 1e9, 5)
    row(f"{name} from the device, pageable", "GB/s", size / back / 1e9, 5)
print('{"end": true}', flush=True)
sys.stdin.readline()
