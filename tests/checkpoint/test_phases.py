"""Phases of something that takes time."""

from __future__ import annotations

import pytest

from rgpu.checkpoint.phases import Phases


def test_phases_are_told_in_order_and_add_up() -> None:
    now = [10.0]
    phases = Phases(lambda: now[0])
    with phases.phase("outer"):
        now[0] += 1.0
        with phases.phase("inner"):
            now[0] += 0.25
    with pytest.raises(ValueError), phases.phase("inner"):
        now[0] += 0.5
        raise ValueError
    phases.add("told", 0.002)
    assert list(phases.ms("send.").items()) == [("send.outer", 1250.0), ("send.inner", 750.0), ("send.told", 2.0)]
