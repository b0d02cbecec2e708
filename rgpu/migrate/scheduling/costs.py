"""What a move costs and what it is worth, both in GPU-seconds: pure arithmetic.

A session runs while its pages are copied, at both ends of the reservation; then it stands still
for the pause; and with a small probability the move fails after the copy and is paid for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from rgpu.migrate.scheduling.snapshot import Placed


@dataclass(frozen=True, slots=True)
class Costs:
    """Defaults: the rate is the slower direction of the link's measured ones (docs/benchmarks.md);
    the pause and the risk are assumptions, to be set by options."""

    rate_mib: float = 1900.0  #: MiB a second, one move
    pause: float = 2.0  #: seconds that the program stands still
    setup: float = 3.0  #: seconds before the first page: worker, context, modules
    risk: float = 0.01  #: probability that a move is aborted

    def seconds(self, placed: Placed) -> float:
        """How long the move takes in all."""
        return self.setup + self.bytes_mib(placed) / self.rate_mib + self.pause

    def bytes_mib(self, placed: Placed) -> int:
        """What the move copies at least."""
        used = placed.demand.memory_mib if placed.used_mib is None else placed.used_mib
        return used * placed.demand.gpus

    def gpu_seconds(self, placed: Placed) -> float:
        """Share held twice while it copies, and lost while it stands still; more with the risk."""
        return placed.weight * (self.seconds(placed) + self.pause) * (1 + self.risk)


@dataclass(frozen=True, slots=True)
class Limits:
    """What automatic rebalancing may do. Fragmentation is a share of the pool's devices."""

    start: float = 0.02  #: fragmentation above this for ``patience`` starts moving
    stop: float = 0.01  #: below this it stops (hysteresis)
    patience: float = 60.0  #: seconds
    cooldown: float = 600.0  #: seconds between two moves of one session
    minimum_age: float = 300.0  #: seconds a session has to have run: young ones mostly end by themselves
    per_node: int = 4  #: moves at once from or to one host: a GPU that four share can be emptied
    per_pool: int = 16  #: moves in one plan
    horizon: float = 3600.0  #: seconds for which a gain counts at most
    advantage: float = 3.0  #: the gain must be so many times the cost
    smallest: float = 0.02  #: devices' worth that a move must free


def remaining_life(age: float) -> float:
    """Expected further life of a session of that age, in seconds.

    Lifetimes are heavy-tailed: what has lived long lives on about as long again.
    """
    return max(age, 60.0)
