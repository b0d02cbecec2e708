"""A kernel fault: the error is as CUDA reports it, and it sticks."""

import ctypes
import os
import sys
import time

from common import first_line, says, torch_setup

torch = torch_setup()
kind = sys.argv[sys.argv.index("--kind") + 1]
WILD = b""".version 7.0
.target sm_75
.address_size 64
.visible .entry wild() { .reg .b64 %rd<2>; mov.u64 %rd1, 1024; st.global.u32 [%rd1], 1; ret; }
\0"""


def wild_store() -> None:
    """Launches a kernel that writes where nothing is mapped, in PyTorch's own context."""
    driver, module, kernel = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
    assert driver.cuModuleLoadData(ctypes.byref(module), WILD) == 0
    assert driver.cuModuleGetFunction(ctypes.byref(kernel), module, b"wild") == 0
    assert driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, None, None, None) == 0


x = torch.arange(1000, device="cuda")
says("before", x.sum().item())
time.sleep(2.0)  # the bystander is at work
if kind == "assert":
    index = torch.tensor([5000], device="cuda")

    def wrong():  # noqa: ANN201
        x[index]
else:
    wrong = wild_store
for attempt in ("first", "second", "third"):
    try:
        if attempt == "first":
            wrong()
        torch.cuda.synchronize()
        says(attempt, "no error")
    except RuntimeError as error:
        says(attempt, first_line(error))
for name, action in (("launch", lambda: x + 1), ("copy", lambda: x.cpu()),
                     ("allocate", lambda: torch.empty(64 << 20, device="cuda"))):
    try:
        action()
        says(name, "no error")
    except RuntimeError as error:
        says(name, first_line(error))
sys.stdout.flush()
os._exit(0)  # tearing down a broken context says much and means nothing
