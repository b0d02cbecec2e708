"""The shape of GPT-2 124M: training steps (batch 8 × 512) in fp32 and bf16, generation of one token (batch 1, bf16)."""

import sys
from pathlib import Path

import torch
from common import DEVICE, QUICK, chosen, counted, measured, milli

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "gpu" / "programs"))
from models import Gpt2, small  # noqa: E402

torch.manual_seed(2)
real = DEVICE == "cuda"


def training(name: str, dtype: torch.dtype | None, count: int) -> None:
    model = (Gpt2() if real else small(97)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=real)
    tokens = torch.randint(0, model.tokens, (8, 513) if real else (2, 17), device=DEVICE)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE, dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()

    for _ in range(3):
        step()
    measured(name, "ms", step, count, milli, repeats=5)
    counted(name, step, 5)


def generation() -> None:
    model = (Gpt2() if real else small(97)).to(DEVICE, torch.bfloat16).eval()
    prompt = torch.randint(0, model.tokens, (1, 32), device=DEVICE)
    count = 64 if real else 4

    def generate() -> None:
        model.generate(prompt, count).cpu()

    generate()
    measured("GPT-2 generation, a token", "ms", generate, 1, lambda s: milli(s) / count, repeats=5)
    counted("GPT-2 generation, a token", lambda: model.generate(prompt, 1).cpu(), count)


if chosen("GPT-2 training step, bf16"):
    training("GPT-2 training step, bf16", torch.bfloat16, (5 if QUICK else 15) if real else 1)
if chosen("GPT-2 training step, fp32"):
    training("GPT-2 training step, fp32", None, (3 if QUICK else 6) if real else 1)
if chosen("GPT-2 generation"):
    generation()
