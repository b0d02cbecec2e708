"""PyTorch, eager: batches are copied ahead on a side stream, with and without record_stream.

usage: torch_side.py STEPS SECONDS [--record]. With --record the caching allocator orders the reuse of a batch's memory:
free of races. Without it, as many real programs are written, the next-but-one copy may overwrite a batch that is still
read; natively this never shows, because the GPU is ahead of the CPU.
"""

import os
import sys

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
from common import Steps, last_of_burst, torch_setup

torch = torch_setup()
record = "--record" in sys.argv


class Block(torch.nn.Module):
    def __init__(self, width: int = 384) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):  # noqa: ANN001, ANN201
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


model = torch.nn.Sequential(*[Block() for _ in range(4)], torch.nn.Linear(384, 16)).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
batches = [torch.randn(256, 384).pin_memory() for _ in range(8)]
out = torch.empty(1).pin_memory()
side = torch.cuda.Stream()
steps = Steps()
for number in steps:
    with torch.cuda.stream(side):
        x = batches[number % 8].to("cuda", non_blocking=True)
    torch.cuda.current_stream().wait_stream(side)
    if record:
        x.record_stream(torch.cuda.current_stream())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x).float().pow(2).mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if last_of_burst(number):
        out.copy_(loss.detach().reshape(1), non_blocking=True)
        torch.cuda.synchronize()
        steps.saw(out)
steps.end(*model.parameters())
