"""The ``cpu`` device: see :mod:`rgpu.server.device.cpu.device`."""

from rgpu.server.device.cpu.device import CpuDevice

__all__ = ["CpuDevice"]
