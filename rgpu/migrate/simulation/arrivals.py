"""Arrivals of one simulated run, drawn from a task list with a seed.

*Filling* (the published experiment): every task of the list once, in an order drawn with the seed,
and from then on tasks drawn with replacement, arrive a second apart until their demand is ``load``
times the pool's GPUs; none ends. *Churn*: the pool begins with sessions whose
demand is ``load`` times its GPUs, drawn with probabilities proportional to their lifetimes, the oldest
placed first; then tasks arrive at random at the rate that keeps up that load, and end after their
recorded lifetimes. Tasks that never ran have no lifetime, and are used in filled pools only.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from rgpu.migrate.scheduling.snapshot import Request
from rgpu.migrate.simulation.trace import Task
from rgpu.session.errors import UsageError

FOREVER = float("inf")
SHORTEST = 1.0  #: least lifetime of a task, seconds


@dataclass(frozen=True, slots=True)
class Arrival:
    """Arrival of a task. ``at`` is 0 for the sessions that a run begins with; their age is in their request
    (``arrived`` < 0).
    """

    at: float
    request: Request
    ends: float


def filling(tasks: Sequence[Task], gpus: int, load: float, seed: int) -> list[Arrival]:
    """Draw arrivals that fill the pool. Raises :class:`UsageError` for a list in which no task asks for a GPU."""
    _check(tasks)
    arrivals: list[Arrival] = []
    draw, demanded = random.Random(seed), 0.0
    once = list(tasks)
    draw.shuffle(once)
    while demanded < load * gpus:
        task = once[len(arrivals)] if len(arrivals) < len(once) else draw.choice(tasks)
        at = float(len(arrivals) + 1)
        arrivals.append(Arrival(at, Request(f"t{len(arrivals)}", task.demand, arrived=at), FOREVER))
        demanded += task.demand.gpu_share
    return arrivals


def churn(tasks: Sequence[Task], gpus: int, load: float, seed: int, seconds: float) -> list[Arrival]:
    """Draw arrivals of a churn. Raises :class:`UsageError` for a list in which no task asks for a GPU."""
    _check(tasks)
    draw = random.Random(seed)
    ran = [(task, max(task.life, SHORTEST)) for task in tasks if task.life is not None]
    _check([task for task, _ in ran])
    bounds = list(accumulate(life for _, life in ran))
    begun: list[tuple[float, float, Task]] = []
    demanded = 0.0
    while demanded < load * gpus:
        task, life = draw.choices(ran, cum_weights=bounds)[0]
        age = draw.random() * life
        begun.append((-age, life - age, task))
        demanded += task.demand.gpu_share
    begun.sort(key=lambda item: item[:2])
    arrivals = [Arrival(0.0, Request(f"t{n}", task.demand, arrived=born), left)
                for n, (born, left, task) in enumerate(begun)]
    work = sum(task.demand.gpu_share * life for task, life in ran) / len(ran)
    rate, at = load * gpus / work, 0.0
    while (at := at + draw.expovariate(rate)) < seconds:
        task, life = draw.choice(ran)
        arrivals.append(Arrival(at, Request(f"t{len(arrivals)}", task.demand, arrived=at), at + life))
    return arrivals


def _check(tasks: Sequence[Task]) -> None:
    if not any(task.demand.gpu_share > 0 for task in tasks):
        raise UsageError("no task of the list asks for a GPU")
