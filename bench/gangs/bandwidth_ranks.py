#!/usr/bin/env python3
"""Collectives of torch.distributed and their bandwidth, one rank of it; `torchrun` starts it. It knows nothing of rgpu.

    torchrun --nproc-per-node 2 bandwidth_ranks.py [--mib 0.25,25,256] [--times 20] [--rounds 3]

Rank 0 prints `KIND MIB GB_PER_SECOND` for each: bytes of the larger buffer of a rank, divided by the time of one of
``times`` collectives in a row on one stream (the algorithm bandwidth of nccl-tests), the median of ``rounds``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

RANK, RANKS, LOCAL = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
if os.environ.get("ONE_GPU"):  # natively, ranks that share a GPU: NCCL takes them to be hosts of their own
    os.environ |= {"NCCL_HOSTID": f"host-{RANK}", "NCCL_SOCKET_IFNAME": "lo"}
    LOCAL = 0

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


def rate(call: Callable[[], object], size: int, times: int, rounds: int) -> float:
    """Return GB/s."""
    found = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            call()
        torch.cuda.synchronize()
        found.append(size * times / (time.perf_counter() - began) / 1e9)
    return statistics.median(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", default="0.25,25,256")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.cuda.set_device(LOCAL)
    dist.init_process_group("nccl", device_id=torch.device("cuda", LOCAL))
    for mib in map(float, options.mib.split(",")):
        size = int(mib * (1 << 20)) // 4 // RANKS * RANKS
        whole = torch.full((size,), RANK + 1.0, device="cuda")
        part = torch.full((size // RANKS,), RANK + 1.0, device="cuda")
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda whole=whole: dist.all_reduce(whole),
            "all_gather": lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part),
            "reduce_scatter": lambda whole=whole, part=part: dist.reduce_scatter_tensor(part, whole)}
        for kind, call in calls.items():
            found = rate(call, size * 4, options.times, options.rounds)
            if not RANK:
                print(kind, mib, f"{found:.3f}", flush=True)
        whole.fill_(RANK + 1.0)
        dist.all_reduce(whole)
        assert bool((whole == RANKS * (RANKS + 1) / 2).all()), "the sum is wrong"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
