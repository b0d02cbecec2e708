"""Streams and events: order between them, waits, timing, host functions."""

import cupy as cp
from common import digest, says

a, b = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)
x = cp.zeros(1 << 18, dtype=cp.int64)
cp.cuda.Device().synchronize()
last = None
for turn in range(100):
    with a:
        if last is not None:
            a.wait_event(last)
        x *= 3
        x += turn
        done = a.record()
    with b:
        b.wait_event(done)
        x ^= turn * 7919
        last = b.record()
a.synchronize()
b.synchronize()
digest("ordered", x)
begin, end = cp.cuda.Event(), cp.cuda.Event()
begin.record()
y = cp.arange(1 << 22).sum()
end.record()
end.synchronize()
says("timed", cp.cuda.get_elapsed_time(begin, end) > 0)
says("sum", int(y))
calls = []
with a:
    for number in range(5):
        x += 1
        a.launch_host_func(calls.append, number)
a.synchronize()
says("host_functions", calls)
says("done", (a.done, end.done))
digest("after", x)
