"""bench/pool/pool_scale.py runs, small: what it measures is there, and nothing of it is lost or failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.pool import pool_scale
from tests.support.registry.etcd_cluster import needs_etcd


@needs_etcd
@pytest.mark.timeout(170)
def test_a_small_pool_is_measured(tmp_path: Path) -> None:
    output = tmp_path / "scale.json"
    figures = pool_scale.main(["--nodes", "6", "--sessions", "60", "--processes", "2", "--seconds", "3", "--rates",
                               "0,20", "--output", str(output)])
    assert json.loads(output.read_text()) == figures
    idle, busy = figures["steady"]
    assert idle["changes_per_s"] == 0 and busy["changes_per_s"] > 5 and busy["change_p50_ms"] > 0
    assert idle["seen"] >= 6 and idle["watch_lag_p50_ms"] is not None, "every node's watch brings the probe"
    assert idle["leases_lost"] == busy["leases_lost"] == 0 and idle["keepalives_per_s"] > 0
    leading = figures["leading"]
    assert leading["looks"] >= 2 and leading["failed"] == "" and leading["commands"] == 0, leading
