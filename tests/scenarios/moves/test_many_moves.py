"""A session that trains all the while goes to and fro: 200 moves in `make sweep`, 6 in `make test`. See to_and_fro."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pools.growth import Growth, Held, every
from tests.support.pools.sweep import SWEEP
from tests.support.pools.to_and_fro import to_and_fro

MOVES = 200 if SWEEP else 6


@pytest.mark.timeout(3600 if SWEEP else 300)
def test_to_and_fro(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to_and_fro(tmp_path, capsys, MOVES)


def test_growth_is_seen_and_noise_is_not() -> None:
    """What the assertion above would say of a leak, of one outlier, and of a process that only warms up."""
    def series(values: list[float], pieces: list[int]) -> Growth:
        return Growth([Held(mib, piece, 5) for mib, piece in zip(values, pieces, strict=True)])

    flat = series([100.0 + n % 3 for n in range(200)], [40] * 200)
    assert flat.grown(0.15, 12.0, 6) == []
    spiky = series([100.0 if n != 180 else 900.0 for n in range(200)], [40] * 200)
    assert spiky.grown(0.15, 12.0, 6) == []
    warming = series([min(50.0 + 5 * n, 110.0) for n in range(200)], [min(20 + n, 40) for n in range(200)])
    assert warming.grown(0.15, 12.0, 6) == []
    leaking = series([100.0 + 0.4 * n for n in range(200)], [40 + n // 10 for n in range(200)])
    assert [text.split()[0] for text in leaking.grown(0.15, 12.0, 6)] == ["resident_mib", "descriptors"]
    assert len(every([str(n) for n in range(200)], 12)) == 12 and every(["a"], 12) == ["a"]
