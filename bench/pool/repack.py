#!/usr/bin/env python3
"""How much of the fragmentation that rebalancing leaves could be had by moving more?

    python bench/pool/repack.py --nodes CSV --tasks CSV [--load 0.9] [--hours 2] [--seeds 5] [--bound]

Plays `rgpu simulate --policy fgd --rebalance on`, takes the pool as it is at the end, and packs all sessions that
share a GPU anew, as if all could be moved at once and no host had too little CPU: the largest first, and with each
what fills its GPU best. Prints, for each seed, GPUs' worth: fragmented as it is; what of that requests without GPU
account for, which no move changes; free on GPUs in use, as it is and packed anew; and what would be fragmented then.
A good packing, not proven to be the best; `--bound` (needs scipy) says what no packing goes below: the linear
relaxation of the cutting-stock problem (Gilmore and Gomory, Operations Research 9 (6), 1961), all patterns listed.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
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


def patterns(counts: Counter[int]) -> list[dict[int, int]]:
    """Every way to fill one GPU with shares of these that leaves no room for one more of them."""
    shares, found = sorted(counts, reverse=True), list[dict[int, int]]()

    def fill(at: int, room: int, chosen: dict[int, int]) -> None:
        if at == len(shares):
            if all(chosen.get(share, 0) == counts[share] for share in shares if share <= room):
                found.append(chosen)
            return
        share = shares[at]
        for number in range(min(room // share, counts[share]) + 1):
            fill(at + 1, room - number * share, {**chosen, share: number} if number else chosen)

    fill(0, WHOLE, {})
    return found


def least_gpus(shares: Iterable[int]) -> float:
    """A number of GPUs below which no packing of these shares goes."""
    from scipy.optimize import linprog
    from scipy.sparse import lil_matrix
    counts = Counter(shares)
    rows, ways = {share: row for row, share in enumerate(sorted(counts))}, patterns(counts)
    held = lil_matrix((len(rows), len(ways)))
    for column, way in enumerate(ways):
        for share, number in way.items():
            held[rows[share], column] = -number
    result = linprog([1.0] * len(ways), A_ub=held.tocsr(), b_ub=[-counts[share] for share in sorted(counts)])
    if not result.success:
        sys.exit(f"the bound was not found: {result.message}")
    return float(result.fun)


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
    parser.add_argument("--bound", action="store_true", help="what no packing goes below")
    args = parser.parse_args()
    nodes, tasks = trace.read_nodes(args.nodes), trace.read_tasks(args.tasks)
    gpus = sum(len(node.devices) for node in nodes)
    for seed in range(args.seeds):
        run = Run(nodes, tasks, arrivals.churn(tasks, gpus, args.load, seed, args.hours * 3600),
                  Options("fgd", True, seed))
        run.go()
        index = run.index
        now = index.free()[index.exists & (index.free() < WHOLE)].tolist()
        shares = [placed.demand.compute for placed in [*run.sessions.values(), *run.leaving.values()]
                  if placed.demand.gpus == 1 and 0 < placed.demand.compute < WHOLE]
        then = packed(shares)
        fragmented = index.fragmentation()
        # GPUs that become wholly free are worth what a free GPU is to the mix.
        emptied, whole = (sum(then) - sum(now)) / WHOLE, 1 - float(index.mix.single[-1, WHOLE])
        change = unusable(then, index.mix) - unusable(now, index.mix) - emptied * whole
        line = (f"seed {seed}: {fragmented:.1f} fragmented, {run.result.samples[-1].gpuless:.1f} of it for requests "
                f"without GPU; free on GPUs in use {sum(now) / WHOLE:.1f}, packed anew {sum(then) / WHOLE:.1f}; "
                f"fragmented then about {fragmented + change:.1f}")
        if args.bound:
            line += f"; no packing leaves less than {least_gpus(shares) - sum(shares) / WHOLE:.1f} free on GPUs in use"
        print(line, flush=True)


if __name__ == "__main__":
    main()
