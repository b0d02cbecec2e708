"""Module variables of a session are bounded by its quota: error 2 at the load, and memory only for what fits."""

from __future__ import annotations

import resource

import pytest

from rgpu.server.device.cpu.device import CpuDevice
from rgpu.session.errors import DeviceError

MIB = 1 << 20


def ptx(name: str, size: int, value: str = "") -> bytes:
    return (f".version 7.0\n.target sm_75\n.address_size 64\n.visible .global .align 8 .b8 {name}[{size}]{value};\n"
            f".visible .entry nothing_{name}() {{ ret; }}\n").encode() + b"\0"


def test_3_gib_of_globals_in_a_session_of_16_mib_are_refused_as_a_driver_would() -> None:
    device = CpuDevice(memory=16 * MIB)
    try:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(DeviceError, match="module globals") as caught:
            device.load(1, ptx("big", 3 << 30, " = {1}"), b"", False)
        assert caught.value.result == 2
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB
        device.load(2, ptx("small", 40 * MIB), b"", False)
        with pytest.raises(DeviceError, match="module globals") as caught:
            device.load(3, ptx("more", 40 * MIB), b"", False)
        assert caught.value.result == 2
        device.unload(2)
        device.load(4, ptx("more", 40 * MIB), b"", False)  # what was unloaded counts no more
    finally:
        device.close()


def test_a_larger_session_may_have_as_many_as_its_quota() -> None:
    device = CpuDevice(memory=256 * MIB)
    try:
        device.load(1, ptx("some", 200 * MIB), b"", False)
        with pytest.raises(DeviceError):
            device.load(2, ptx("more", 100 * MIB), b"", False)
    finally:
        device.close()
