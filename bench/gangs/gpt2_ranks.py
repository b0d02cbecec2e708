#!/usr/bin/env python3
"""A data-parallel training by torch.distributed, one rank of it; `torchrun` starts it. It knows nothing of rgpu.

    torchrun --nproc-per-node 2 gpt2_ranks.py [--kind ddp|fsdp|copies] [--steps N] [--size N]

Each rank prints `rank R step N SECONDS` after each step (all of its work is complete), and at its end
`rank R digest HEX` of the parameters. ``copies`` launches no kernel: collectives of parameters that the CPU changes,
for devices that have no kernels of PyTorch's.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with it
RANK, RANKS, LOCAL = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
if os.environ.get("ONE_GPU"):  # natively, ranks that share a GPU: NCCL takes them to be hosts of their own
    os.environ |= {"NCCL_HOSTID": f"host-{RANK}", "NCCL_SOCKET_IFNAME": "lo"}
    LOCAL = 0

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "gpu" / "programs"))

Step = Callable[[int], None]
BUCKET = 25 * (1 << 20) // 4  #: parameters that `copies` sums at once, as DistributedDataParallel does


def say(what: str) -> None:
    """In one piece: all ranks write to one pipe."""
    os.write(1, f"rank {RANK} {what}\n".encode())


def trained(kind: str) -> tuple[Step, Callable[[], list[torch.Tensor]]]:
    """A step of GPT-2 124M, batch 8 × 512 for each rank, bfloat16 autocast, and what its parameters are."""
    from models import Gpt2

    torch.manual_seed(2)
    torch.use_deterministic_algorithms(True)
    model = Gpt2().cuda()
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
        whole = model
    else:
        whole = torch.nn.parallel.DistributedDataParallel(model, device_ids=[LOCAL])
    optimizer = torch.optim.AdamW(whole.parameters(), lr=3e-4, fused=True)
    batches = torch.randint(0, model.tokens, (16, RANKS, 8, 513), generator=torch.Generator().manual_seed(3))

    def step(number: int) -> None:
        tokens = batches[number % len(batches), RANK].cuda()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            logits = whole(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()

    return step, lambda: [getattr(one, "full_tensor", lambda one=one: one)().detach() for one in model.parameters()]


def copied(size: int) -> tuple[Step, Callable[[], list[torch.Tensor]]]:
    """A step of a model whose arithmetic is the CPU's: its gradients are summed by the devices."""
    weights = torch.zeros(size)

    def step(number: int) -> None:
        noise = torch.randn(size, generator=torch.Generator().manual_seed(number * RANKS + RANK))
        gradient = (weights * 0.01 + noise).cuda()
        for bucket in gradient.split(BUCKET):
            dist.all_reduce(bucket)
        weights.sub_(0.1 * gradient.cpu())

    return step, lambda: [weights]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=("ddp", "fsdp", "copies"), default="ddp")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--size", type=int, default=1 << 16, help="parameters of `copies`")
    options = parser.parse_args()
    torch.cuda.set_device(LOCAL)
    dist.init_process_group("nccl")
    step, parameters = copied(options.size) if options.kind == "copies" else trained(options.kind)
    for number in range(options.steps):
        began = time.monotonic()
        step(number)
        torch.cuda.synchronize()
        say(f"step {number} {time.monotonic() - began:.4f}")
    digest = hashlib.sha256()
    for parameter in parameters():
        digest.update(parameter.cpu().numpy().tobytes())
    say(f"digest {digest.hexdigest()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
