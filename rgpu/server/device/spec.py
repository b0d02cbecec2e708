"""Devices by their specification, ``cpu:N`` or ``cuda:N``: making one, and what else differs between the two kinds.

The modules of a device are imported when one is made, so that a process loads no driver that it does not use.
"""

from __future__ import annotations

from rgpu.checkpoint.device import Device
from rgpu.session.errors import Refused


def make_device(spec: str, memory: int, host: str = "", *, own_stdout: bool = False) -> Device:
    """Make the device ``cpu:N`` or ``cuda:N``, or several of one kind: ``cuda:N+M``. ``memory``: bytes.

    Raises :class:`DeviceError`; :class:`Refused` for another kind. ``own_stdout``: the device may use this process's
    standard output for the text that its kernels print.
    """
    kind, _, listed = spec.partition(":")
    ordinal, *others = [int(number) for number in (listed or "0").split("+")]
    if kind == "cpu":
        from rgpu.server.device.cpu.device import CpuDevice

        return CpuDevice(ordinal, memory=memory, host=host, others=others)
    if kind == "cuda":
        from rgpu.server.device.cuda.device import CudaDevice
        from rgpu.server.device.cuda.work.printed import CapturedStdout

        made = CudaDevice([ordinal, *others], CapturedStdout() if own_stdout else None)
        made.resize(memory)
        return made
    raise Refused(f"unknown device {spec!r}: use cpu:N, cuda:N or several as cuda:N+M")


def lost(spec: str, device: Device) -> str:
    """Return why the driver has lost the device; empty where it has not, or where that is unknown."""
    if not spec.startswith("cuda"):
        return ""
    from rgpu.server.device.cuda import nvml

    every = getattr(device, "every_facts", (device.facts,))
    return next((why for one in every if (why := nvml.lost(one.uuid))), "")


def warm(spec: str) -> None:
    """Load what a session's first calls need: done by a warm worker before a session waits for it."""
    if spec.startswith("cpu"):
        from rgpu.server.device.cpu.ptx import jit

        jit.warm()
