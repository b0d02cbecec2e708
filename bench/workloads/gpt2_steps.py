#!/usr/bin/env python3
"""GPT-2 124M training in bf16, deterministic: a line `step N TIME LOSS` for each step, then `digest HEX`.

    python gpt2_steps.py --steps 600 [--small]

TIME is the wall clock in seconds as the step's loss has arrived; LOSS is the bits of the fp32 value in hex.
For `bench/checkpoint/recovery.py`. `--small` is a model of some thousand parameters, for a machine without
PyTorch's GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import struct
import sys
import time
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with it

import torch  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "gpu" / "programs"))
from models import Gpt2, small  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(2)
    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda")
    model = (small(97) if options.small else Gpt2()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    rows, length = (2, 16) if options.small else (8, 512)
    tokens = torch.randint(0, model.tokens, (16, rows, length + 1)).to(device)
    for step in range(options.steps):
        batch = tokens[step % len(tokens)]
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model.loss(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        print(f"step {step} {time.time():.6f} {struct.pack('<f', loss.item()).hex()}", flush=True)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    print(f"digest {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
