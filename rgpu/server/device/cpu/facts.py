"""The facts that the ``cpu`` device reports: a Turing-class device without the hardware.

Attribute numbers are CUdevice_attribute (cuda.h). The values are those of a device of compute capability 7.5, except
for features that this device lacks (textures, peers), which it reports as missing.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from blake3 import blake3

from rgpu.checkpoint.device import DeviceFacts
from rgpu.session.facts import ONLY_PTX, PEER_ATOMICS, PEERS

COMPUTE_CAPABILITY = (7, 5)
DRIVER_VERSION = 13000
MULTIPROCESSORS = 16
MAX_THREADS = 1024
MAX_BLOCK = (1024, 1024, 64)
REGISTERS = 65536  #: of a multiprocessor, and of a block
MOST_BLOCKS = 16  #: of a multiprocessor
MAX_GRID = (2**31 - 1, 65535, 65535)
SHARED_DEFAULT = 48 * 1024
SHARED_OPTIN = 64 * 1024

#: CUdevice_attribute → value; those missing here are 0.
_TURING: dict[int, int] = {
    1: MAX_THREADS, 2: MAX_BLOCK[0], 3: MAX_BLOCK[1], 4: MAX_BLOCK[2],
    5: MAX_GRID[0], 6: MAX_GRID[1], 7: MAX_GRID[2],
    8: SHARED_DEFAULT,
    9: 65536,  # constant memory
    10: 32,  # warp
    11: 2**31 - 1,  # pitch
    12: REGISTERS,  # of a block
    13: 1_500_000,  # clock, kHz
    14: 512,  # texture alignment
    15: 1,  # overlap of copies and kernels
    16: MULTIPROCESSORS,
    19: 1,  # can map host memory
    30: 512,  # surface alignment
    31: 1,  # concurrent kernels
    36: 5_000_000,  # memory clock, kHz
    37: 256,  # bus width, bits
    38: 4 * 1024 * 1024,  # L2
    39: 1024,  # threads of a multiprocessor
    40: 3,  # async engines
    41: 1,  # unified addressing
    51: 32,  # texture pitch alignment
    75: COMPUTE_CAPABILITY[0], 76: COMPUTE_CAPABILITY[1],
    78: 1,  # stream priorities
    79: 1, 80: 1,  # L1 for global and local
    81: SHARED_OPTIN,  # shared memory of a multiprocessor
    82: REGISTERS,  # of a multiprocessor
    83: 1,  # managed memory; 89, concurrent access to it, is 0
    87: 32,  # single to double ratio
    90: 1,  # compute preemption
    97: SHARED_OPTIN,
    102: 1,  # virtual memory management
    95: 1,  # cooperative launches
    106: MOST_BLOCKS,  # of a multiprocessor
    129: 1,  # unified function pointers
    122: 1,  # stream memory operations, also of 64 bits …
    123: 1,  # … and waits of the form NOR
    134: 0,  # host NUMA id
    131: -1,
    99: 1,  # memory can be registered
    113: 1,  # … to be read only
    141: 1, 145: 1,  # cuMemCreate on memory of the CPU
}
_LAST_ATTRIBUTE = 148
MOST_PEERS = 30  #: devices that the mask in an attribute covers

#: Texture and surface limits: those of 7.5, for programs that only print them.
_TEXTURE: dict[int, int] = {
    21: 131072, 22: 131072, 23: 65536, 24: 16384, 25: 16384, 26: 16384, 27: 32768, 28: 32768, 29: 2048,
    42: 32768, 43: 2048, 44: 1, 45: 32768, 46: 32768, 47: 8192, 48: 8192, 49: 32768, 52: 32768, 53: 32768,
    54: 2046, 55: 32768, 56: 131072, 57: 65536, 58: 16384, 59: 16384, 60: 16384, 61: 32768, 62: 2048,
    63: 32768, 64: 32768, 65: 2048, 66: 32768, 67: 32768, 68: 2046, 69: 268435456, 70: 131072, 71: 65000,
    72: 2097120, 73: 32768, 74: 32768, 77: 32768,
}


def device_uuid(host: str, ordinal: int) -> bytes:
    """Return 16 bytes, stable for (host, ordinal), different for different ones; an RFC 9562 version 8 UUID."""
    raw = bytearray(blake3(f"rgpu cpu device\0{host}\0{ordinal}".encode()).digest(length=16))
    raw[6] = raw[6] & 0x0F | 0x80
    raw[8] = raw[8] & 0x3F | 0x80
    return bytes(raw)


def driver_version() -> int:
    """Return RGPU_CPU_DRIVER_VERSION, with which pools of different drivers can be tried; default 13000."""
    text = os.environ.get("RGPU_CPU_DRIVER_VERSION", "")
    return int(text) if text.isdecimal() else DRIVER_VERSION


def make_facts(ordinal: int, memory: int, host: str = "") -> DeviceFacts:
    """Make the facts of device ``ordinal`` of ``host`` (default: this machine's name); ``memory`` in bytes."""
    pci = (0, ordinal + 1, 0)
    attributes = dict.fromkeys(range(1, _LAST_ATTRIBUTE + 1), 0) | _TEXTURE | _TURING
    everyone = (1 << MOST_PEERS) - 1  # every device is this machine's memory
    attributes |= {50: pci[0], 33: pci[1], 34: pci[2], ONLY_PTX: 1, PEERS: everyone, PEER_ATOMICS: everyone}
    return DeviceFacts(
        name="rgpu CPU device (sm_75)", uuid=device_uuid(host or socket.gethostname(), ordinal),
        total_memory=memory, pci=pci, compute_capability=COMPUTE_CAPABILITY, driver_version=driver_version(),
        attributes=attributes)


def available_memory() -> int:
    """Return the bytes of host memory available without swapping and within a container's limit; 0: unknown."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name == "MemAvailable":
                    return min(int(value.split()[0]) * 1024, *map(_left, _CONTAINERS))
    except (OSError, ValueError, IndexError):
        pass
    return 0


#: Files of a control group: its limit, its usage, its statistics; and the statistic that counts its idle page cache.
_CONTAINERS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat", "inactive_file"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes",
     "/sys/fs/cgroup/memory/memory.stat", "total_inactive_file"))
_NO_LIMIT = 1 << 62


def _left(files: tuple[str, str, str, str]) -> int:
    """Return the bytes that a control group still allows once its idle page cache is dropped."""
    limit, used, statistics, idle = files
    try:
        found = int(Path(limit).read_text()) - int(Path(used).read_text())
        for line in Path(statistics).read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == idle:
                found += int(value)
        return max(0, found)
    except (OSError, ValueError):  # no such group, or its limit is the word "max"
        return _NO_LIMIT
