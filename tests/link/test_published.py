"""What PING and PONG say of the program: both protocols' bodies, and no others."""

from __future__ import annotations

import struct

import pytest

from rgpu.link.data.published import Clocks, Issued, Ping, pong, read_pong
from rgpu.session.errors import Corrupt


def test_both_ways() -> None:
    ping = Ping(7, 12, 3, 1 << 50, True)
    assert Ping.unpack(ping.pack()) == ping
    assert read_pong(pong(7, 3)) == (7, 3)


def test_protocol_1_says_the_position_alone_and_understands_what_is_new() -> None:
    assert Ping.unpack(struct.pack("<Q", 7)) == Ping(7) and Ping(7).published is None
    assert read_pong(bytes(8)) == (0, None)
    ping = Ping(7, 12, 3, 5).pack()
    assert struct.unpack_from("<Q", ping)[0] == 7, "where protocol 1 reads the position"
    assert read_pong(ping) == (7, None), "which gives a PING back as it came"
    assert struct.unpack_from("<Q", pong(7, 3))[0] == 7


@pytest.mark.parametrize("size", [0, 7, 9, 35])
def test_others_are_refused(size: int) -> None:
    with pytest.raises(Corrupt):
        Ping.unpack(bytes(size))
    if size < 8:
        with pytest.raises(Corrupt):
            read_pong(bytes(size))


def test_issued_both_ways_and_what_is_none() -> None:
    issued = Issued(1 << 50, (1 << 50) - 5, 12)
    assert Issued.unpack(issued.pack()) == issued
    for body in (b"", bytes(23), bytes(25), Issued(4, 5, 1).pack()):
        with pytest.raises(Corrupt):
            Issued.unpack(body)


def test_a_message_is_late_beyond_the_quickest_of_the_last_seconds() -> None:
    """Whatever the two clocks show, and however they drift."""
    second, clocks, offset = 10 ** 9, Clocks(), 77 * 10 ** 12
    here = 5 * second
    for number in range(1000):  # 20 µs a second apart, 100 s
        here += second // 10
        there = here - offset - 2000 * number  # it falls behind
        assert clocks.late(here, there - 300_000) <= 2000 * 101 + 1, "drift is no lateness"
        assert 4_700_000 <= clocks.late(here, there - 5_300_000) <= 5_300_000
