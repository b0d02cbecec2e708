"""A training step of a small CNN, batch 64 of 32 × 32 images, each batch copied from pinned memory."""

import sys
from pathlib import Path

import torch
from common import DEVICE, QUICK, counted, measured, milli

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "gpu" / "programs"))
from models import Cnn, cnn_batch  # noqa: E402

torch.manual_seed(1)
model = Cnn().to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
batches = [tuple(part.pin_memory() if DEVICE == "cuda" else part for part in cnn_batch(seed=i)) for i in range(4)]
turn = 0


def step() -> None:
    global turn
    images, classes = (part.to(DEVICE, non_blocking=True) for part in batches[turn % 4])
    turn += 1
    optimizer.zero_grad(set_to_none=True)
    torch.nn.functional.cross_entropy(model(images), classes).backward()
    optimizer.step()


for _ in range(20):
    step()
measured("CNN training step", "ms", step, (100 if QUICK else 200) if DEVICE == "cuda" else 2, milli)
counted("CNN training step", step, 100)
