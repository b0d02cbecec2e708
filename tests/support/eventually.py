"""Waiting for what other threads and processes bring about."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(condition: Callable[[], T], what: str = "it never happened", within: float = 60.0) -> T:
    """Return the first true value of ``condition``, which is asked again and again for ``within`` seconds.

    :raises AssertionError: with ``what``, when the time is over and the value is still false
    """
    deadline = time.monotonic() + within
    while not (value := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.005)
    return value
