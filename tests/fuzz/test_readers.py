"""Every reader of outside bytes on its seeds, on kept findings, and on what hypothesis makes of them.

``make fuzz`` gives each ten minutes of coverage-guided fuzzing (:mod:`tests.fuzz.run`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.readers import MAX_INPUT, TARGETS

CORPUS = Path(__file__).parent / "corpus"


def kept(name: str) -> list[bytes]:
    """What fuzzing found worth keeping."""
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_findings(name: str) -> None:
    function, seeds = TARGETS[name]
    for data in [b"", *seeds(), *kept(name)]:
        function(data)


def test_there_are_seeds() -> None:
    assert all(seeds() for _, seeds in TARGETS.values())
    assert {path.name for path in CORPUS.iterdir()} <= set(TARGETS)


#: Replace, cut out, repeat, put in: what a few edits make of a seed.
EDITS = st.lists(st.tuples(st.sampled_from(["set", "cut", "repeat", "insert", "flip"]), st.integers(0, MAX_INPUT),
                           st.integers(0, 64), st.binary(max_size=16)), max_size=4)


def edited(data: bytes, edits: list[tuple[str, int, int, bytes]]) -> bytes:
    for what, at, length, piece in edits:
        at %= len(data) + 1
        if what == "set":
            data = data[:at] + piece + data[at + len(piece):]
        elif what == "cut":
            data = data[:at] + data[at + length:]
        elif what == "repeat":
            data = data[:at + length] + data[at:]
        elif what == "insert":
            data = data[:at] + piece + data[at:]
        elif at < len(data):
            data = data[:at] + bytes([data[at] ^ 1 << length % 8]) + data[at + 1:]
    return data


@pytest.mark.parametrize("name", TARGETS)
def test_edited_seeds(name: str) -> None:
    function, seeds = TARGETS[name]
    known = seeds() + kept(name)

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.integers(0, len(known) - 1), EDITS)
    def check(index: int, edits: list[tuple[str, int, int, bytes]]) -> None:
        function(edited(known[index], edits))

    check()


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.binary(max_size=512))
def test_any_bytes(name: str, data: bytes) -> None:
    TARGETS[name][0](data)
