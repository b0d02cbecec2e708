"""What stands where after a replay is compared with what stood there: by name, whatever the driver's order."""

from __future__ import annotations

import pytest

from rgpu.checkpoint.device import Region
from rgpu.checkpoint.manifest.state import RegionState, SessionState
from rgpu.checkpoint.session.restore import compare_regions
from rgpu.session.errors import RecoveryFailed

STRINGS = [Region(0x7000_0000 + 256 * n, 15 - n % 2, "global", 17, name) for n, name in enumerate("aabbc")]


def state_of(regions: list[Region]) -> SessionState:
    return SessionState(session="demo/1", epoch=1, position=1, hash_key=bytes(32), regions=[
        RegionState(r.address, r.size, r.kind, r.owner, r.name) for r in regions])


def test_the_order_of_a_modules_variables_is_the_drivers_choice() -> None:
    compare_regions(STRINGS[::-1], state_of(STRINGS))


def test_a_checkpoint_without_names_is_compared_by_places() -> None:
    unnamed = [Region(r.address, r.size, r.kind, r.owner) for r in STRINGS]
    compare_regions(STRINGS, state_of(unnamed[::-1]))
    with pytest.raises(RecoveryFailed, match="module 17"):
        compare_regions(STRINGS[1:], state_of(unnamed))


def test_two_variables_that_changed_places_are_told_apart() -> None:
    first, *middle, last = STRINGS
    moved = [Region(last.address, first.size, "global", 17, first.name), *middle,
             Region(first.address, last.size, "global", 17, last.name)]
    with pytest.raises(RecoveryFailed, match="global 'a' of module 17 is at"):
        compare_regions(moved, state_of(STRINGS))
