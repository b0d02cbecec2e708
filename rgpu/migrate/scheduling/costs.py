"""Cost and value of a move, both in GPU-seconds: pure arithmetic.

While its pages are copied a session runs and holds both places; then it is paused; with a small
probability the move fails after the copy, and its cost is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from rgpu.migrate.scheduling.snapshot import Placed


@dataclass(frozen=True, slots=True)
class Costs:
    """Cost of a move. The default rate is the slower of the link's measured directions (docs/benchmarks.md);
    the pause and the risk are assumptions, to be set by options."""

    rate_mib: float = 1900.0  #: MiB a second, one move
    pause: float = 2.0  #: seconds that the program is paused
    setup: float = 3.0  #: seconds before the first page: worker, context, modules
    risk: float = 0.01  #: probability that a move is aborted

    def seconds(self, placed: Placed) -> float:
        """Return the duration of the move in seconds."""
        return self.setup + self.bytes_mib(placed) / self.rate_mib + self.pause

    def bytes_mib(self, placed: Placed) -> int:
        """Return the least MiB that the move copies."""
        used = placed.demand.memory_mib if placed.used_mib is None else placed.used_mib
        return used * placed.demand.gpus

    def gpu_seconds(self, placed: Placed) -> float:
        """Return the cost: the share held twice while pages are copied, and lost in the pause; raised by the risk."""
        return placed.weight * (self.seconds(placed) + self.pause) * (1 + self.risk)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of automatic rebalancing. Fragmentation is a share of the pool's devices."""

    start: float = 0.02  #: fragmentation above this for ``patience`` starts moving
    stop: float = 0.01  #: below this it stops (hysteresis)
    patience: float = 60.0  #: seconds
    cooldown: float = 600.0  #: seconds between two moves of one session
    minimum_age: float = 300.0  #: seconds that a session must have run: most young ones end soon
    per_node: int = 4  #: concurrent moves from or to one host: enough to empty a GPU that four sessions share
    per_pool: int = 16  #: moves in one plan
    horizon: float = 3600.0  #: most seconds for which a gain counts
    advantage: float = 3.0  #: least ratio of gain to cost
    smallest: float = 0.02  #: devices' worth that a move must free


def remaining_life(age: float) -> float:
    """Return the expected further life of a session of that age, in seconds.

    Lifetimes are heavy-tailed: an old session lives on for about as long again.
    """
    return max(age, 60.0)
