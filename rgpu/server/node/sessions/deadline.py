"""The deadline until which a node may begin anything (OWNERSHIP 3, 4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rgpu.session.errors import PoolUnavailable


@dataclass(frozen=True)
class Deadline:
    """``in_time``: whether it has not passed. ``descriptor``: of the page that holds it, which workers map."""

    host: str
    in_time: Callable[[], bool] = lambda: True
    descriptor: Callable[[], int] = lambda: -1

    def check(self, what: str) -> None:
        """Check that ``what`` may begin; running work goes on past the deadline. Raises :class:`PoolUnavailable`."""
        if not self.in_time():
            raise PoolUnavailable(f"{self.host} is past its deadline: {what} waits until the registry answers")
