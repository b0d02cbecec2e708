"""Stream capture and graph launch."""

import cupy as cp
from common import digest, says

stream = cp.cuda.Stream(non_blocking=True)
x = cp.arange(10000, dtype=cp.int64)
cp.cuda.Device().synchronize()
with stream:
    x *= 1  # compiled before the capture
    x += 1
    stream.synchronize()
    stream.begin_capture()
    says("capturing", stream.is_capturing())
    x *= 3
    x += 7
    graph = stream.end_capture()
    says("capturing_after", stream.is_capturing())
    digest("not-yet", x)
    for _ in range(10):
        graph.launch(stream)
    stream.synchronize()
digest("launched", x)
