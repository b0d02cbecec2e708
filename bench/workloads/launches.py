"""Small things: a tiny launch, an item, a wait, an event, a replay of a CUDA graph."""

import torch
from common import DEVICE, chosen, counted, measured, micro, synchronize

x = torch.zeros(1024, device=DEVICE)
if chosen("tiny launch"):
    measured("tiny launch", "us", lambda: x.add_(1), 2000, micro)
    counted("tiny launch", lambda: x.add_(1), 2000)
if chosen(".item()"):
    measured(".item()", "us", lambda: x[0].item(), 100, micro)
    counted(".item()", lambda: x[0].item(), 100)
if chosen("synchronize"):
    measured("synchronize, idle", "us", synchronize, 100, micro)

    def launch_and_wait() -> None:
        x.add_(1)
        synchronize()

    measured("launch and synchronize", "us", launch_and_wait, 100, micro)
if DEVICE == "cuda" and chosen("graph"):
    y = torch.zeros(1024, device=DEVICE)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            y.mul_(2).add_(1)
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            y.mul_(2).add_(1)
    measured("graph replay, 10 kernels", "us", graph.replay, 500, micro)
    counted("graph replay, 10 kernels", graph.replay, 500)
