"""Runs PTX on the host's processor: text to LLVM IR to machine code, 32 lanes at a time.

``parse_module`` checks everything (unsupported PTX fails there, with its
line), ``PtxModule.link`` places the variables, ``LinkedModule.launch`` runs a
grid.  Device memory is this process's own memory at the very addresses that
the program uses; every access is checked against ``MemoryRanges``.
"""

from __future__ import annotations

from rgpu.server.device.cpu.ptx.errors import PtxError
from rgpu.server.device.cpu.ptx.jit import keep_in
from rgpu.server.device.cpu.ptx.launch import LaunchResult, MemoryRanges
from rgpu.server.device.cpu.ptx.module import GlobalInfo, KernelInfo, LinkedModule, ParamInfo, PtxModule, parse_module

__all__ = [
    "GlobalInfo",
    "KernelInfo",
    "LaunchResult",
    "LinkedModule",
    "MemoryRanges",
    "ParamInfo",
    "PtxError",
    "PtxModule",
    "keep_in",
    "parse_module",
]
