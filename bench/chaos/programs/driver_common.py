"""What the programs that use the driver's own interface share (cuda.bindings, kernels by NVRTC)."""

from __future__ import annotations

from typing import Any

from common import skip

try:
    from cuda.bindings import driver, nvrtc
except ImportError as missing:
    skip(f"cuda.bindings cannot be imported: {missing}")


def check(result: tuple[Any, ...]) -> Any:
    error, *values = result
    if int(error):
        raise SystemExit(f"{error!r}")
    return values[0] if len(values) == 1 else tuple(values)


def start() -> None:
    """The primary context of device 0, current."""
    check(driver.cuInit(0))
    check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(0))))))


def ptx(source: bytes) -> bytes:
    program = check(nvrtc.nvrtcCreateProgram(source, b"chaos.cu", 0, [], []))
    (error,) = nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=compute_75"])
    if int(error):
        log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise SystemExit(log.decode())
    text = b" " * check(nvrtc.nvrtcGetPTXSize(program))
    check(nvrtc.nvrtcGetPTX(program, text))
    return text


def kernels(source: bytes, *names: str) -> list[Any]:
    """The functions; the module stays loaded."""
    module = check(driver.cuModuleLoadData(ptx(source)))
    return [check(driver.cuModuleGetFunction(module, name.encode())) for name in names]
