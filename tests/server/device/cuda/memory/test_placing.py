"""Where modules are placed does not depend on what else the process has mapped."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from rgpu.server.device.cuda.memory.placing import gaps, highest, joined
from tests.support.pools.pool import ROOT

ADDR_NO_RANDOMIZE = 0x0040000  #: personality(2)
MAPS = """1000-3000 r--p 00000000 00:00 0
5000-6000 rw-p 00000000 00:00 0 [heap]
6000-8000 rw-p 00000000 00:00 0
a000-b000 rw-p 00000000 00:00 0 [stack]
"""
NOISE = """
import threading, time, numpy as np
noise = [np.zeros(n << 20, np.uint8) for n in (50, 3, 70, 33, 120, 9)]
threads = [threading.Thread(target=time.sleep, args=(5,), daemon=True) for _ in range(9)]
[thread.start() for thread in threads]
"""
MAPPED = """
from rgpu.server.device.cuda.memory.placing import Placing, _reserve
placing = Placing()
assert placing.end > placing.start > 0
{first}
with placing.still():
    one = _reserve(None, 32 << 20, 0)
{between}
with placing.still():
    two = _reserve(None, 32 << 20, 0)
assert placing.start - one == one - two == 32 << 20, (hex(placing.start), hex(one), hex(two))
print(one, two)
"""
LOADED = """
from rgpu.server.device.cuda.device import CudaDevice
PTX = b'''.version 7.0
.target sm_75
.address_size 64
.visible .global .align 4 .b8 counters[{size}];
.visible .entry nothing() {{ ret; }}
'''
device = CudaDevice(0)
device.create_context(16, 0, True)
{first}
for number, size in ((17, 64), (18, 1 << 20), (19, 4096)):  # tens of MiB: see docs/users/limits.md
    table, _ = device.load(number, PTX.replace(b"SIZE", str(size).encode()) + bytes(1), b"", False)
    print([(variable.name, variable.address) for variable in table.globals])
    {between}
""".replace("{size}", "SIZE")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120,
                          preexec_fn=lambda: ctypes.CDLL(None).personality(ADDR_NO_RANDOMIZE))
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_gaps_of_an_address_space() -> None:
    assert gaps(MAPS, 0x2000, 0xb000) == [(0x3000, 0x5000), (0x8000, 0xa000)]
    assert gaps(MAPS, 0x5800, 0x9000) == [(0x8000, 0x9000)]
    assert gaps(MAPS, 0xb000, 0xd000) == [(0xb000, 0xd000)] and gaps("", 1, 2) == [(1, 2)]
    assert highest(MAPS) == 0x8000 and highest("") == 0


def test_what_comes_between_does_not_move_what_is_placed() -> None:
    quiet = run(MAPPED.format(first="", between=""))
    assert quiet == run(MAPPED.format(first=NOISE, between="")) == run(MAPPED.format(first="", between=NOISE))


def test_the_list_of_mappings_is_read_only_when_it_has_changed() -> None:
    """What was free before is taken without a look; a hole that came since is found, also one in the midst of it."""
    run("""
import mmap
from rgpu.server.device import mapping
from rgpu.server.device.cuda.memory.placing import Placing, _reserve
placing = Placing()
def place():
    with placing.still():
        at = _reserve(None, 1 << 20, 0)
    return placing.start - at, placing.looks
assert place() == (1 << 20, 1)
assert place() == (2 << 20, 1), "nothing changed"
high = _reserve(None, 64 << 20, 0)
assert high > placing.start
assert place()[0] == 3 << 20
looks = placing.looks
assert place() == (4 << 20, looks)
mapping.take_away(high + (32 << 20), mmap.PAGESIZE)
assert place() == (5 << 20, looks + 1), "a hole of a page"
mapping.take_away(high, 64 << 20)
assert place()[0] == 6 << 20
looks = placing.looks
assert place() == (7 << 20, looks) and len(placing._gaps) < 40
""")
    assert joined([(5, 6), (1, 3), (3, 4)]) == [(1, 4), (5, 6)] and joined([]) == []


@pytest.mark.gpu
def test_a_drivers_modules_are_placed_alike() -> None:
    """A worker that mapped much before and between places its modules as one that did not."""
    quiet = run(LOADED.format(first="", between=""))
    between = "".join(f"{line}\n    " for line in NOISE.splitlines())
    assert "counters" in quiet
    assert quiet == run(LOADED.format(first=NOISE, between="")) == run(LOADED.format(first="", between=between))
