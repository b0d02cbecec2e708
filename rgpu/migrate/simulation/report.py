"""Results of runs over several seeds, as the documented JSON and as the rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from rgpu.migrate.scheduling.snapshot import Node
from rgpu.migrate.simulation.arrivals import churn, filling
from rgpu.migrate.simulation.run import Options, Result, Run
from rgpu.migrate.simulation.trace import Task

#: Figures of every seed and of the mean, described in docs/developers/simulation.md.
FIGURES = ("allocated_share", "fragmented_gpus", "fragmented_gpuless", "refused", "moves", "moves_per_hour",
           "moved_gib", "move_gpu_s", "waiting_s", "decision_us", "decision_p99_us", "sessions",
           "spread")
SETTLED = 0.5  #: part of a churn run after which its figures are averaged


def simulate(nodes: Sequence[Node], tasks: Sequence[Task], load: float, seeds: int, hours: float | None,
             options: Callable[[int], Options], progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Run every seed. ``hours`` None: filling, else churn for so long. Raises :class:`UsageError`."""
    gpus = sum(len(node.devices) for node in nodes)
    results: list[dict[str, Any]] = []
    for seed in range(seeds):
        arrivals = (filling(tasks, gpus, load, seed) if hours is None
                    else churn(tasks, gpus, load, seed, hours * 3600))
        result = Run(nodes, tasks, arrivals, options(seed)).go()
        results.append({"seed": seed, **figures(result, hours is not None), "series": series(result)})
        progress(f"seed {seed}: {results[-1]['allocated_share']:.4f} allocated, "
                 f"{results[-1]['fragmented_gpus']:.1f} GPUs fragmented")
    chosen = options(0)
    return {"policy": chosen.policy, "rebalance": chosen.rebalance, "gangs": chosen.gangs, "load": load, "gpus": gpus,
            "nodes": len(nodes), "churn_hours": hours, "seeds": results,
            "mean": {name: round(fmean(result[name] for result in results), 4) for name in FIGURES}}


def figures(result: Result, settled: bool) -> dict[str, float]:
    """Return a run's figures: at its end, or (``settled``) the mean over its second half."""
    samples = result.samples[int(len(result.samples) * SETTLED):] if settled else result.samples[-1:]
    times = sorted(result.decision_us) or [0.0]
    hours = max(result.samples[-1].at / 3600, 1e-9)
    return {
        "allocated_share": round(fmean(s.allocated for s in samples), 4),
        "fragmented_gpus": round(fmean(s.fragmented for s in samples), 1),
        "fragmented_gpuless": round(fmean(s.gpuless for s in samples), 1),
        "refused": result.refused, "moves": result.moves, "moves_per_hour": round(result.moves / hours, 1),
        "moved_gib": round(result.moved_mib / 1024, 1), "move_gpu_s": round(result.move_gpu_s, 1),
        "waiting_s": round(fmean(result.waits), 1) if result.waits else 0.0,
        "decision_us": round(fmean(times), 1), "decision_p99_us": round(times[int(0.99 * (len(times) - 1))], 1),
        "sessions": result.sessions, "spread": result.spread,
    }


def series(result: Result, most: int = 200) -> dict[str, list[float]]:
    """Return the series for the plots, thinned to about ``most`` points."""
    samples = result.samples[::max(1, len(result.samples) // most)]
    return {"at": [s.at for s in samples], "allocated": [round(s.allocated, 4) for s in samples],
            "fragmented": [round(s.fragmented, 1) for s in samples], "refused": [s.refused for s in samples],
            "moves": [s.moves for s in samples], "waiting": [round(s.waiting, 1) for s in samples]}
