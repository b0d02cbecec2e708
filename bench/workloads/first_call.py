"""Import and the first call, from the start of the process."""

import time
from pathlib import Path

began = time.clock_gettime(time.CLOCK_BOOTTIME)
import torch  # noqa: E402
from common import DEVICE, row  # noqa: E402

imported = time.clock_gettime(time.CLOCK_BOOTTIME)
x = torch.zeros(16, device=DEVICE)
x.add_(1).sum().item()
called = time.clock_gettime(time.CLOCK_BOOTTIME)
ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
import os  # noqa: E402

row("import torch", "s", imported - began, 1)
row("first call", "s", called - imported, 1)
row("process start to first result", "s", called - ticks / os.sysconf("SC_CLK_TCK"), 1)
