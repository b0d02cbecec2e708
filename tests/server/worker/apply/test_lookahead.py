"""Looking ahead in a stream of records for functions that have returned."""

from __future__ import annotations

import random
import struct

from hypothesis import given
from hypothesis import strategies as st

from rgpu.server.worker.apply.lookahead import DoneScanner
from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_NAME
from rgpu.session.journal.record import HEADER_SIZE, pack


def record(seq: int, name: str, payload: bytes = b"", **args: object) -> bytes:
    return pack(seq, BY_NAME[name].id, decoders.encode_args(name, **args), payload)


def stream(start: int = 11) -> bytes:
    return b"".join([
        record(start, "memcpy_h2d", bytes(range(256)) * 3 + b"abc", destination=1 << 40, stream=18),
        record(start + 1, "host_function_done", call=7),
        record(start + 2, "completed", observed=9),
        record(start + 3, "session_open", version=1, pid=1, environment=b"A=1\0"),
        record(start + 4, "stream_synchronize", stream=18),
        record(start + 5, "host_function_done", call=8)])


@given(seed=st.integers(0, 1 << 32), longest=st.sampled_from([1, 3, 40, 200, 5000]))
def test_however_the_stream_is_cut(seed: int, longest: int) -> None:
    rng, scanner, found = random.Random(seed), DoneScanner(10), []
    data, at = stream(), 0
    while at < len(data):
        size = rng.randint(1, longest)
        found += scanner.feed(data[at:at + size])
        at += size
    assert found == [7, 8] and not scanner.ended


def test_it_ends_at_an_observation_of_the_call_that_waits() -> None:
    """In a replay: what stands in front of the observation had been applied before the function returned."""
    scanner = DoneScanner(10)
    data = record(11, "host_function_done", call=6) + record(12, "completed", observed=10)
    assert scanner.feed(data + stream(13)) == [6] and scanner.ended
    assert scanner.feed(stream(19)) == []


def test_it_waits_at_an_observation_of_a_call_that_is_not_complete() -> None:
    """The function behind it may have returned because the program had seen that call complete."""
    complete: set[int] = set()
    scanner = DoneScanner(10, complete=complete.__contains__)
    data = record(11, "host_function_done", call=6) + record(12, "completed", observed=9) + stream(13)
    assert scanner.feed(data[:-20]) == [6] and scanner.waits
    assert scanner.feed(data[-20:]) == [] and scanner.waits and not scanner.ended
    complete.add(9)
    assert scanner.feed(b"") == [7, 8] and not scanner.waits


@given(bit=st.integers(0, 8 * (HEADER_SIZE + 8) - 1))
def test_a_damaged_record_releases_nothing(bit: int) -> None:
    """Or it is passed over as another call: whatever it says, its stream is not let go by it."""
    data = bytearray(record(11, "host_function_done", call=7))
    data[bit // 8] ^= 1 << bit % 8
    assert DoneScanner(10).feed(bytes(data)) == []


def test_nobody_returns_from_a_function_of_the_future() -> None:
    data = record(11, "host_function_done", call=12)
    assert DoneScanner(10).feed(data) == [] and struct.unpack_from("<Q", data, 8) == (11,)
