#!/usr/bin/env python3
"""How much of the fragmentation that rebalancing leaves could be had by moving more?

    python bench/repack.py --nodes CSV --tasks CSV [--load 0.9] [--hours 2] [--seeds 5]

Plays `rgpu simulate --policy fgd --rebalance on`, takes the pool as it is at the end, and packs all sessions that
share a GPU anew, as if all could be moved at once and no host had too little CPU: the largest first, and with each
what fills its GPU best. Prints, for each seed, GPUs' worth: fragmented as it is; what of that requests without GPU
account for, which no move changes; free on GPUs in use, as it is and packed anew; and what would be fragmented then.
A good packing, not proven to be the best.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rgpu.migrate.scheduling.mix import Mix  # noqa: E402
from rgpu.migrate.scheduling.snapshot import WHOLE  # noqa: E402
from rgpu.migrate.simulation import arrivals, trace  # noqa: E402
from rgpu.migrate.simulation.run import Options, Run  # noqa: E402


def packed(shares: Iterable[int]) -> list[int]:
    """What is free on each GPU (per cent) when these are packed anew."""
    left, free = Counter(shares), []
    while left:
        largest = max(left)
        left = left - Counter([largest])
        filling = best_filling(left, WHOLE - largest)
        left = left - Counter(filling)
        free.append(WHOLE - largest - sum(filling))
    return free


def best_filling(left: Counter[int], room: int) -> tuple[int, ...]:
    """Of these shares, those that fill ``room`` best."""
    sums: dict[int, tuple[int, ...]] = {0: ()}
    for share in sorted(left, reverse=True):
        for _ in range(min(left[share], room // share)):
            for total, chosen in list(sums.items()):
                if total + share <= room and total + share not in sums and chosen.count(share) < left[share]:
                    sums[total + share] = (*chosen, share)
    return sums[max(sums)]


def unusable(pieces: Iterable[int], mix: Mix) -> float:
    """GPUs' worth of these free pieces that a random next request cannot use, where CPU is plenty."""
    return sum(piece * (1 - float(mix.single[-1, piece])) for piece in pieces) / WHOLE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--nodes", type=Path, required=True)
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    nodes, tasks = trace.read_nodes(args.nodes), trace.read_tasks(args.tasks)
    gpus = sum(len(node.devices) for node in nodes)
    for seed in range(args.seeds):
        run = Run(nodes, tasks, arrivals.churn(tasks, gpus, args.load, seed, args.hours * 3600),
                  Options("fgd", True, seed))
        run.go()
        index = run.index
        now = index.free()[index.exists & (index.free() < WHOLE)].tolist()
        then = packed(placed.demand.compute for placed in [*run.sessions.values(), *run.leaving.values()]
                      if placed.demand.gpus == 1 and 0 < placed.demand.compute < WHOLE)
        fragmented = index.fragmentation()
        change = unusable(then, index.mix) - unusable(now, index.mix)
        # GPUs that become wholly free are worth what a free GPU is to the mix.
        emptied = (sum(then) - sum(now)) / WHOLE
        change -= emptied * (1 - float(index.mix.single[-1, WHOLE]))
        print(f"seed {seed}: {fragmented:.1f} fragmented, {run.result.samples[-1].gpuless:.1f} of it for requests "
              f"without GPU; free on GPUs in use {sum(now) / WHOLE:.1f}, packed anew {sum(then) / WHOLE:.1f}; "
              f"fragmented then about {fragmented + change:.1f}", flush=True)


if __name__ == "__main__":
    main()
