"""Training that is moved while everything a driver can hold is alive. usage: torch_moving.py FOLDER

A captured training step (CUDA graph) runs in one stream and a consumer of its results in another, ordered by events
across the streams in both directions. A kernel of our own adds to pinned host memory through its device pointer at
every step, and the host reads it and writes to it. At steps 20 and 40 it says ``gate N`` with work, events and a graph
launch still under way, and goes on when FOLDER/N is there. Digests at the end: parameters, momentum, the consumer's
memory, the pinned buffer as the host sees it, losses, and whether event times are sane.
"""

import sys
import time
from pathlib import Path

import numpy as np
from common import digest, says, torch_setup
from cuda.bindings import driver

torch = torch_setup(21)
from models import Cnn, cnn_batch  # noqa: E402

STEPS, GATES = 60, (20, 40)
PTX = rb"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry add_mapped(.param .u64 mapped, .param .u64 weights, .param .u32 step)
{
    .reg .b32 %r<8>; .reg .b64 %d<6>;
    ld.param.u64 %d1, [mapped]; ld.param.u64 %d2, [weights]; ld.param.u32 %r1, [step];
    mov.u32 %r2, %tid.x;
    mul.wide.u32 %d3, %r2, 4;
    add.u64 %d1, %d1, %d3; add.u64 %d2, %d2, %d3;
    ld.global.u32 %r3, [%d1]; ld.global.u32 %r4, [%d2];
    mad.lo.u32 %r3, %r3, 22695477, %r4;
    add.u32 %r3, %r3, %r1;
    st.global.u32 [%d1], %r3;
    ret;
}
"""


def check(result):  # noqa: ANN001, ANN201
    error, *values = result
    assert int(error) == 0, error
    return values[0] if len(values) == 1 else values


def gate(number: int) -> None:
    print("gate", number, flush=True)
    opened, deadline = Path(sys.argv[1]) / str(number), time.monotonic() + 240
    while not opened.exists():
        assert time.monotonic() < deadline, f"gate {number} was not opened"
        time.sleep(0.005)


model = Cnn().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
images, classes = (part.cuda() for part in cnn_batch(32))
batch = torch.empty(32, 3, 32, 32, pin_memory=True)


def step():  # noqa: ANN201
    optimizer.zero_grad(set_to_none=False)
    loss = torch.nn.functional.cross_entropy(model(images), classes)
    loss.backward()
    optimizer.step()
    return loss


train, consume = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
train.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(train):
    for _ in range(3):
        step()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=train):
    loss = step()

module = check(driver.cuModuleLoadData(PTX + b"\0"))
add_mapped = check(driver.cuModuleGetFunction(module, b"add_mapped"))
mapped = torch.zeros(256, dtype=torch.int32, pin_memory=True)
device_pointer = int(check(driver.cuMemHostGetDevicePointer(mapped.data_ptr(), 0)))
weights = model.head[1].weight
seen, losses = torch.zeros(1 << 20, dtype=torch.int64, device="cuda"), torch.zeros(STEPS, device="cuda")
first, consumed = torch.cuda.Event(enable_timing=True), torch.cuda.Event()
torch.cuda.synchronize()
with torch.cuda.stream(train):
    first.record()
for number in range(STEPS):
    batch.copy_(cnn_batch(32, seed=number)[0])
    with torch.cuda.stream(train):
        if number:
            train.wait_event(consumed)
        images.copy_(batch, non_blocking=True)
        graph.replay()
        trained = torch.cuda.Event(enable_timing=True)
        trained.record()
    with torch.cuda.stream(consume):
        consume.wait_event(trained)
        losses[number].copy_(loss)
        seen.mul_(3).add_(weights.view(torch.int32).sum(dtype=torch.int64)).bitwise_xor_(number * 7919)
        values = [np.array([value], kind) for value, kind in (
            (device_pointer, np.uint64), (weights.data_ptr(), np.uint64), (number, np.uint32))]
        pointers = np.array([value.ctypes.data for value in values], np.uint64)
        check(driver.cuLaunchKernel(add_mapped, 1, 1, 1, 256, 1, 1, 0, consume.cuda_stream, pointers.ctypes.data, 0))
        consumed = torch.cuda.Event()
        consumed.record()
    if number in GATES:
        gate(number)
    consume.synchronize()  # the host looks at the mapped memory, and changes some of it
    mapped[number % 256] += int(mapped[(number + 1) % 256]) % 1000
torch.cuda.synchronize()
milliseconds = first.elapsed_time(trained)
says("elapsed_positive", milliseconds > 0)
digest("parameters", *model.state_dict().values())
digest("momentum", *(optimizer.state[p]["momentum_buffer"] for p in model.parameters()))
digest("seen", seen)
digest("mapped", mapped)
digest("losses", losses)
