"""What a user of PyTorch feels first: import, first training step and first generation of a process, then small calls.

Prints rows as the other workloads do, then waits for a line on standard input, so that its session can be looked at.
"""

import sys
import time
from pathlib import Path

began = time.perf_counter()
import torch  # noqa: E402
from common import DEVICE, row, synchronize, timed  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "gpu" / "programs"))
from models import Gpt2, small  # noqa: E402

real = DEVICE == "cuda"
large = int(sys.argv[1]) << 20


def stage(name, action):
    synchronize()
    start = time.perf_counter()
    action()
    synchronize()
    row(name, "s", time.perf_counter() - start, 1)


def median(action, count):
    return sorted(timed(action, count))[3]


row("import torch", "s", time.perf_counter() - began, 1)
stage("first tensor", lambda: torch.zeros(16, device=DEVICE).add_(1))
model = (Gpt2() if real else small(97)).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=real)
tokens = torch.randint(0, model.tokens, (8, 513) if real else (2, 17), device=DEVICE)


def step():
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    optimizer.step()


stage("first GPT-2 training step", step)
stage("second GPT-2 training step", step)
stage("33 GPT-2 training steps", lambda: [step() for _ in range(33 if real else 1)])
model = (Gpt2() if real else small(97)).to(DEVICE, torch.bfloat16).eval()
prompt = torch.randint(0, model.tokens, (1, 32), device=DEVICE)
for name, count in (("first generate(), 32 tokens", 32), ("second generate(), 32 tokens", 32),
                    ("generate(), 128 tokens", 128)):
    stage(name, lambda count=count: model.generate(prompt, count if real else 2).cpu())
row("to here", "s", time.perf_counter() - began, 1)
x = torch.zeros(64, device=DEVICE)
row(".item()", "us", median(lambda: x[0].item(), 200) * 1e6, 7)
row("launch, tiny", "us", median(lambda: x.add_(1), 2000 if real else 20) * 1e6, 7)
for size, name in ((1 << 20, "1 MB"), (large, f"{large >> 20} MiB")):
    there, count = torch.zeros(size, dtype=torch.uint8, device=DEVICE), max(1, (32 << 20) // size)
    for kind in ("pinned", "pageable"):
        here = torch.zeros(size, dtype=torch.uint8, pin_memory=kind == "pinned" and real)
        for way, to, what in (("to", there, here), ("from", here, there)):
            rate = size / median(lambda a=to, b=what: a.copy_(b), count) / 1e9
            row(f"{name} {way} the device, {kind}", "GB/s", rate, 7)
side = 8192 if real else 64
a = torch.randn(side, side, device=DEVICE, dtype=torch.bfloat16)
row(f"bf16 GEMM of {side}", "TFLOP/s", 2 * side ** 3 / median(lambda: a @ a, 10) / 1e12, 7)
print('{"end": true}', flush=True)
sys.stdin.readline()
