"""What the scenario programs share: checked driver calls and NVRTC. They know nothing of rgpu."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver, nvrtc


def check(result: tuple[Any, ...]) -> Any:
    error, *values = result
    if int(error):
        raise SystemExit(f"{error!r}")
    return values[0] if len(values) == 1 else tuple(values)


def start() -> Any:
    """The primary context of device 0, current."""
    check(driver.cuInit(0))
    device = check(driver.cuDeviceGet(0))
    context = check(driver.cuDevicePrimaryCtxRetain(device))
    check(driver.cuCtxSetCurrent(context))
    return context


def ptx(source: bytes, target: bytes = b"compute_75") -> bytes:
    program = check(nvrtc.nvrtcCreateProgram(source, b"p.cu", 0, [], []))
    (error,) = nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=" + target])
    assert int(error) == 0
    text = b" " * check(nvrtc.nvrtcGetPTXSize(program))
    check(nvrtc.nvrtcGetPTX(program, text))
    return text


def kernels(source: bytes, *names: str) -> list[Any]:
    module = check(driver.cuModuleLoadData(ptx(source)))
    return [module] + [check(driver.cuModuleGetFunction(module, name.encode())) for name in names]
