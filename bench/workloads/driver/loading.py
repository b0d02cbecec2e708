"""What the workloads without a framework share: checked calls of the driver, a context, kernels compiled by NVRTC."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver, nvrtc


def check(result: tuple[Any, ...]) -> Any:
    """The values of a call of the driver or NVRTC. Raises :class:`SystemExit`."""
    error, *values = result
    if int(error):
        raise SystemExit(f"{error!r}")
    return values[0] if len(values) == 1 else tuple(values)


def kernels(source: bytes, *names: bytes) -> tuple[Any, ...]:
    """The kernels of CUDA C++, in the primary context of device 0, which is current from here on."""
    check(driver.cuInit(0))
    check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(0))))))
    program = check(nvrtc.nvrtcCreateProgram(source, b"kernels.cu", 0, [], []))
    check(nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=compute_75"]))
    text = b" " * check(nvrtc.nvrtcGetPTXSize(program))
    check(nvrtc.nvrtcGetPTX(program, text))
    module = check(driver.cuModuleLoadData(text))
    return tuple(check(driver.cuModuleGetFunction(module, name)) for name in names)
