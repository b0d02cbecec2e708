"""A stand-in for the PTX engine: "kernels" are Python functions, modules are named in a comment."""

from __future__ import annotations

import re
import struct
import time
from dataclasses import dataclass, field
from typing import Any

from rgpu.server.device.cpu import addressspace
from rgpu.server.device.cpu.ptx import ParamInfo


@dataclass
class KernelInfo:
    params: list[ParamInfo]
    static_shared: int = 0
    local_bytes: int = 0
    max_threads: int = 1024
    num_regs: int = 32
    const_bytes: int = 0
    ptx_version: tuple[int, int] = (8, 0)


@dataclass
class GlobalInfo:
    size: int
    align: int
    space: str
    data: bytes = b""
    managed: bool = False


@dataclass
class LaunchResult:
    error: int = 0
    address: int = 0
    detail: str = ""


class PtxError(Exception):
    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line, self.reason = line, reason


class MemoryRanges:
    def __init__(self, ranges: list[tuple[int, int]]) -> None:
        self.ranges = ranges

    def holds(self, address: int, size: int) -> bool:
        return any(base <= address and address + size <= end for base, end in self.ranges)


def poke(address: int, value: int) -> None:
    addressspace.view(address, 4)[:] = memoryview(struct.pack("<I", value))


def peek(address: int) -> int:
    return struct.unpack("<I", addressspace.view(address, 4).tobytes())[0]


def _spin(params: bytes, cancel: Any) -> LaunchResult:
    """Until the word at the first parameter is not zero; then writes 1 at the second."""
    flag, out = struct.unpack("<QQ", params)
    while not peek(flag):
        if cancel.wait(0.001):
            return LaunchResult(719, 0, "cancelled")
    poke(out, 1)
    return LaunchResult()


def _sleep(params: bytes, cancel: Any) -> LaunchResult:
    """Sleeps the milliseconds of the second parameter, then appends 1 to the word at the first."""
    address, milliseconds = struct.unpack("<QQ", params)
    time.sleep(milliseconds / 1000)
    poke(address, peek(address) + 1)
    return LaunchResult()


def _append(params: bytes, cancel: Any) -> LaunchResult:
    """word = word * 10 + digit: shows the order of launches."""
    address, digit = struct.unpack("<QQ", params)
    poke(address, peek(address) * 10 + digit)
    return LaunchResult()


def _fault(params: bytes, cancel: Any) -> LaunchResult:
    _, error = struct.unpack("<QQ", params)
    return LaunchResult(int(error), 0x1234, "on purpose")


def _print(params: bytes, cancel: Any) -> LaunchResult:
    return LaunchResult()


def _count(params: bytes, cancel: Any, conditions: dict[int, int] | None = None) -> LaunchResult:
    """Takes 1 from the word at the first parameter; the condition of the second is what is left."""
    address, handle = struct.unpack("<QQ", params)
    if not conditions or handle not in conditions:
        return LaunchResult(700, handle, "no condition")
    left = peek(address) - 1
    poke(address, left)
    conditions[handle] = left
    return LaunchResult()


KERNELS = {"spin": _spin, "sleep": _sleep, "append": _append, "fault": _fault, "print": _print, "count": _count}


@dataclass
class Linked:
    addresses: dict[str, int]

    def launch(self, kernel: str, grid: Any, block: Any, dynamic_shared: int, params: bytes, ranges: MemoryRanges, *,
               threads: int, cancel: Any, printf: Any, cooperative: bool, textures: Any,
               conditions: dict[int, int] | None = None) -> LaunchResult:
        if kernel == "print":
            number = struct.unpack_from("<Q", params, 8)[0]
            printf(b"say %d\n" % number if number else b"hello\n")
        address = struct.unpack_from("<Q", params)[0]
        if kernel != "fault" and not ranges.holds(address, 4):
            return LaunchResult(700, address, "global access")
        if kernel == "count":
            return _count(params, cancel, conditions)
        return KERNELS[kernel](params, cancel)


@dataclass
class Module:
    kernels: dict[str, KernelInfo] = field(default_factory=dict)
    globals: dict[str, GlobalInfo] = field(default_factory=dict)

    def initial_image(self, addresses: dict[str, int]) -> dict[str, bytes]:
        return {name: info.data for name, info in self.globals.items() if name in addresses}

    def link(self, addresses: dict[str, int]) -> Linked:
        return Linked(addresses)


def parse_module(text: str, max_target: int = 75, max_registers: int = 0) -> Module:
    module = Module()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if words[:2] == ["//", "bad"]:
            raise PtxError(number, "unsupported instruction 'bad'")
        if words[:2] == ["//", "kernel"]:
            options = dict(word.split("=") for word in words[3:])
            module.kernels[words[2]] = KernelInfo([ParamInfo(0, 8), ParamInfo(8, 8)],
                                                  **{name: int(value) for name, value in options.items()})
        if match := re.match(r"// (global|const) (\w+) (\d+) (\d+) ?(\w*)", line):
            module.globals[match[2]] = GlobalInfo(int(match[3]), int(match[4]), match[1], match[5].encode())
    return module


def text(*lines: str) -> bytes:
    """A module image: all stub kernels, plus these comment lines."""
    kernels = [f"kernel {name}" for name in KERNELS]
    return ("\n".join([".version 8.0", ".target sm_75", ".address_size 64",
                       *(f"// {line}" for line in [*kernels, *lines])]) + "\0").encode()


INDEX = {name: i for i, name in enumerate(KERNELS)}
