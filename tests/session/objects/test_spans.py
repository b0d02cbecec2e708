"""Times of a call: what is written is read, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rgpu.session.errors import Corrupt
from rgpu.session.objects.spans import COPY, KERNEL, Span, decode, encode

TIME = st.integers(0, 2**62)
THREE = st.tuples(*[st.integers(0, 2**32 - 1)] * 3)
SPANS = st.builds(Span, st.integers(0, 3), TIME, TIME, st.integers(0, 2**63), st.integers(0, 2**32 - 1), THREE, THREE,
                  st.integers(0, 2**32 - 1), st.integers(0, 2**63), st.integers(0, 2**32 - 1))


@given(st.integers(0, 2**63), TIME, TIME, st.lists(SPANS, max_size=4))
def test_round_trip(clock: int, received: int, answered: int, spans: list[Span]) -> None:
    assert decode(encode(clock, received, answered, spans)) == (clock, received, answered, spans)


def test_cut_or_longer() -> None:
    data = encode(1, 2, 3, [Span(KERNEL, 4, 5), Span(COPY, 6, 7, bytes=8)])
    assert len(data) == 32 + 2 * 88
    for wrong in (*(data[:size] for size in range(len(data))), data + b"\0"):
        with pytest.raises(Corrupt):
            decode(wrong)
