"""The pinned pool, asynchronous copies both ways, the memory pool."""

import cupy as cp
import cupyx
import numpy as np
from common import digest, note, says

pinned = cupyx.empty_pinned(1 << 20, dtype=np.int32)
pinned[:] = np.arange(1 << 20)
stream = cp.cuda.Stream(non_blocking=True)
device = cp.empty(1 << 20, dtype=cp.int32)
back = cupyx.zeros_pinned(1 << 20, dtype=np.int32)
for turn in range(20):
    with stream:
        device.set(pinned, stream=stream)
        device *= 3
        device += turn
        device.get(stream=stream, out=back)
    stream.synchronize()
    pinned[:] = back
digest("turns", back.copy())
pool, pinned_pool = cp.get_default_memory_pool(), cp.get_default_pinned_memory_pool()
x = [cp.zeros(1000 * i, dtype=cp.uint8) for i in range(1, 50)]
says("used", pool.used_bytes() > 0)
del x
pool.free_all_blocks()
pinned_pool.free_all_blocks()
note("held", pool.total_bytes())
with cp.cuda.using_allocator(cp.cuda.MemoryAsyncPool().malloc):
    y = cp.arange(100_000) * 2
    digest("async-pool", y)
    del y
says("memset", int(cp.full(1000, 7).sum()))
