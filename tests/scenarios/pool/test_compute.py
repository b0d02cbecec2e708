"""A session has its share of a device's time while others are there, and all of it when they are gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.pools.pool import LocalPool

SHARE = 0.2
LARGE = {"n": 192, "steps": 30000, "report": 1000}



@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_share_while_others_are_there(tmp_path: Path, heat_digest: Callable[..., str]) -> None:
    expected = heat_digest(**LARGE)
    with LocalPool(tmp_path, nodes=1) as pool:
        small = pool.heat("small", rest=0, options=("--compute", "20"), **LARGE)
        eventually(lambda: small.lines)
        assert pool.session("small")["compute_limit"] is None, "alone it has all of it"
        other = pool.heat("other", options=("--compute", "50"))
        eventually(lambda: other.lines)
        began = eventually(lambda: (row := pool.session("small"))["compute_limit"] == SHARE and (time.monotonic(), row))
        assert pool.session("other")["compute_limit"] == 0.5
        time.sleep(6)
        after, now = pool.session("small"), time.monotonic()
        used = (after["gpu_seconds"] - began[1]["gpu_seconds"]) / (now - began[0])
        assert 0.02 < used < SHARE + 0.1, (began, after)
        assert after["held_seconds"] > began[1]["held_seconds"] + 1.0
        other.stop()
        eventually(lambda: pool.session("small")["compute_limit"] is None)
        assert small.finish(300) == expected, "held back, and nothing else"
