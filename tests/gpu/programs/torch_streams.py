"""Two streams ordered by events, a stream that waits for another, events' queries, record_stream."""

from common import digest, says, torch_setup

torch = torch_setup()
a, b = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
x = torch.zeros(1 << 20, dtype=torch.int64, device="cuda")
ready = torch.cuda.Event()
torch.cuda.synchronize()
for turn in range(200):
    with torch.cuda.stream(a):
        if turn:
            a.wait_event(ready)
        x.mul_(3).add_(turn)
        done = torch.cuda.Event()
        done.record()
    with torch.cuda.stream(b):
        b.wait_event(done)
        x.bitwise_xor_(turn * 7919)
        ready = torch.cuda.Event()
        ready.record()
torch.cuda.current_stream().wait_stream(b)
digest("ordered", x)
begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
begin.record()
y = torch.randn(2048, 2048, device="cuda")
for _ in range(10):
    y = (y @ y).tanh()
end.record()
end.synchronize()
says("done", end.query())
says("time_positive", begin.elapsed_time(end) > 0.01)
with torch.cuda.stream(a):
    z = torch.full((1 << 20,), 5, device="cuda")
    z.record_stream(b)
b.wait_stream(a)
with torch.cuda.stream(b):
    total = z.sum()
del z
torch.cuda.synchronize()
says("total", total.item())
says("queries", (a.query(), b.query()))
