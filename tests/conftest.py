"""Tests that need a GPU are skipped elsewhere, with that reason."""

from __future__ import annotations

import ctypes
import os
import resource
import signal

import pytest

try:
    from hypothesis import settings
except ImportError:  # tests/gpu/compat.py imports this in Pythons of frameworks
    pass
else:  # how long an example takes is the machine's affair
    settings.register_profile("busy", settings(), deadline=None)
    settings.load_profile("busy")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # begun in the background of a script: programs would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # begun under nohup: shells of tests would outlive their terminal
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


os.environ.setdefault("RGPU_RESIDENT_IDLE", "60s")  # of pools of tests; LocalPool kills its own

# One process runs thousands of tests whose objects keep descriptors until they are collected; many limits are 1,024.
_soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (_hard, _hard))


def gpu_count() -> int:
    """GPUs that the real driver reports; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = [item for item in items if item.get_closest_marker("gpu")]
    if wanted and not gpu_count():
        for item in wanted:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU and its driver (make test-gpu)"))
    if not os.environ.get("RGPU_SWEEP"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="whole in `make sweep`"))
