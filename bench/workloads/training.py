#!/usr/bin/env python3
"""An ordinary PyTorch training whose last line is a digest of its parameters: the same in every run.

    python training.py [--steps 4000] [--width 2048]

For `bench/pool/make_room.py`: it runs long enough to be moved, and prints a line each hundred steps.
"""

from __future__ import annotations

import argparse
import hashlib
import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with it

import torch  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--width", type=int, default=2048)
    options = parser.parse_args()
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda")
    model = torch.nn.Sequential(torch.nn.Linear(256, options.width), torch.nn.GELU(),
                                torch.nn.Linear(options.width, options.width), torch.nn.GELU(),
                                torch.nn.Linear(options.width, 16)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.randn(64, 512, 256).to(device)
    target = torch.randint(0, 16, (64, 512)).to(device)
    for step in range(options.steps):
        batch = step % 64
        loss = torch.nn.functional.cross_entropy(model(data[batch]), target[batch])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 100 == 99:
            print(f"step {step + 1} loss {loss.item():.6f}", flush=True)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    print(f"digest {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
