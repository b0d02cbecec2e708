"""PyTorch: a whole training step in a CUDA graph, replayed with a new batch each time.

usage: torch_graphs.py STEPS SECONDS
"""

import os

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
from common import Steps, last_of_burst, torch_setup

torch = torch_setup(2)
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 1024), torch.nn.GELU(),
                            torch.nn.Linear(1024, 32)).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
batches = [torch.randn(256, 256).pin_memory() for _ in range(6)]
x, target = torch.zeros(256, 256, device="cuda"), torch.randint(0, 32, (256,), device="cuda")


def step():  # noqa: ANN201
    optimizer.zero_grad(set_to_none=False)
    loss = torch.nn.functional.cross_entropy(model(x), target)
    loss.backward()
    optimizer.step()
    return loss


warm = torch.cuda.Stream()
warm.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(warm):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(warm)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = step()
steps = Steps()
for number in steps:
    x.copy_(batches[number % 6], non_blocking=True)
    graph.replay()
    if number % 7 == 3:
        target.copy_((target + 1) % 32)  # eager work between replays
    if last_of_burst(number):
        steps.saw(loss)
steps.end(*model.parameters())
