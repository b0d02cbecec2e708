"""Many CNN training steps; prints how far it is, and at the end the digest of the loss curve."""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from common import DEVICE, digest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "gpu" / "programs"))
from models import Cnn, cnn_batch  # noqa: E402

steps = int(os.environ.get("BENCH_STEPS", "10000"))
torch.manual_seed(1)
torch.use_deterministic_algorithms(True)
torch.backends.cudnn.deterministic = True
model = Cnn().to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
batches = [tuple(part.pin_memory() if DEVICE == "cuda" else part for part in cnn_batch(seed=i)) for i in range(16)]
losses = torch.zeros(steps, device=DEVICE)
for step in range(steps):
    images, classes = (part.to(DEVICE, non_blocking=True) for part in batches[step % 16])
    optimizer.zero_grad(set_to_none=True)
    loss = torch.nn.functional.cross_entropy(model(images), classes)
    loss.backward()
    optimizer.step()
    losses[step] = loss.detach()
    if step % max(1, steps // 100) == 0:
        print(json.dumps({"step": step, "loss": loss.item()}), flush=True)
digest(hashlib.sha256(losses.cpu().numpy().tobytes()).hexdigest())
