"""cuda.core: memory resources, stream-ordered allocation, pinned memory, buffers' copies, events."""

import numpy as np
from common import digest, says
from core_common import array_at, check, core, driver

device = core.Device()
device.set_current()
stream = device.create_stream()
pool = core.DeviceMemoryResource(device)
says("accessible", (pool.is_device_accessible, pool.is_host_accessible))
buffers = [pool.allocate(1 << shift, stream=stream) for shift in range(10, 24)]
source = np.arange(1 << 20, dtype=np.uint8)
array_at(buffers[-1], source, stream)
other = pool.allocate(1 << 23, stream=stream)
buffers[-1].copy_to(other, stream=stream)
digest("copied", array_at(other, np.empty(1 << 20, np.uint8), stream, back=True))
for buffer in buffers:
    buffer.close(stream)
again = pool.allocate(1 << 22, stream=stream)
check(driver.cuMemsetD8Async(int(again.handle), 9, 1 << 22, int(stream.handle)))
digest("again", array_at(again, np.empty(1 << 22, np.uint8), stream, back=True))
pinned = core.LegacyPinnedMemoryResource().allocate(1 << 16)
view = np.from_dlpack(pinned)
view[:] = 3
again.copy_to(pinned, stream=stream) if pinned.size == again.size else None
says("pinned", int(np.asarray(view[:100]).astype(np.int64).sum()))
timing = "timing_enabled" if hasattr(core.EventOptions, "timing_enabled") else "enable_timing"  # older versions
one, two = (stream.record(options=core.EventOptions(**{timing: True})) for _ in range(2))
two.sync()
says("timed", two - one >= 0)
says("done", (one.is_done, two.is_done))
