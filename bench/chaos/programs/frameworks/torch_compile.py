"""PyTorch: torch.compile of forward, backward and loss of a small network (Triton kernels by Inductor).

usage: torch_compile.py STEPS SECONDS
"""

import os

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
from common import Steps, last_of_burst, skip, torch_setup

torch = torch_setup(3)
try:
    import triton  # noqa: F401
except ImportError as missing:
    skip(f"Triton cannot be imported: {missing}")


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(256, 512), torch.nn.Linear(512, 256)
        self.norm, self.last = torch.nn.LayerNorm(256), torch.nn.Linear(256, 8)

    def forward(self, x):  # noqa: ANN001, ANN201
        y = torch.nn.functional.silu(self.first(x)) * 1.5
        return self.last(self.norm(x + self.second(y))).softmax(-1)


model = Network().to("cuda")
fast = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
batches = [torch.randn(512, 256).pin_memory() for _ in range(5)]
steps = Steps()
for number in steps:
    x = batches[number % 5].to("cuda", non_blocking=True)
    optimizer.zero_grad(set_to_none=True)
    loss = -(fast(x)[:, 0] + 1e-6).log().mean()
    loss.backward()
    optimizer.step()
    if last_of_burst(number):
        steps.saw(loss)
steps.end(*model.parameters())
