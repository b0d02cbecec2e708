"""The derived file: entries come back whole or not at all, whoever wrote beside, crashed or damaged it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rgpu.server.derived import Derived
from rgpu.server.derived_format import (
    COMPILED,
    DESCRIPTION,
    ENTRY,
    HEADER,
    key,
    pack_entry,
    pack_header,
    read_entry,
    read_generation,
)
from rgpu.session.errors import Corrupt

LIMIT = 64 << 10


def opened(path: Path, limit: int = LIMIT) -> Derived:
    return Derived(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), limit)


def keep(derived: Derived, *entries: tuple[bytes, bytes]) -> None:
    for name, payload in entries:
        derived.keep(COMPILED, key(name), payload)
    assert derived.flush(10)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "derived"


def test_two_workers_share_what_each_made(path: Path) -> None:
    one, two = opened(path), opened(path)
    assert one.get(COMPILED, key(b"a")) is None
    keep(one, (b"a", b"alpha"), (b"empty", b""))
    assert two.get(COMPILED, key(b"a")) == b"alpha" and two.get(COMPILED, key(b"empty")) == b""
    assert two.get(DESCRIPTION, key(b"a")) is None  # another kind
    keep(two, (b"a", b"alpha"), (b"b", b"beta"))
    assert one.get(COMPILED, key(b"b")) == b"beta" and two.counters.stored == 1
    keep(two, (b"a", b"another"))
    assert one.get(COMPILED, key(b"a")) == b"another"
    assert opened(path).get(COMPILED, key(b"a")) == b"another"


def test_keys_tell_their_parts_apart() -> None:
    assert key(b"ab", b"c") != key(b"a", b"bc") != key(b"abc")


def test_the_bytes_on_disk() -> None:
    """As docs/developers/modules.md says."""
    header, entry = pack_header(5), pack_entry(2, bytes(range(32)), b"payload")
    assert (len(header), header[:10], header[16:24]) == (32, b"RGPUDRVD\1\0", (5).to_bytes(8, "little"))
    assert (entry[:8], entry[8:40], entry[40:48], entry[80:]) == (
        b"RGDE\1\0\2\0", bytes(range(32)), (7).to_bytes(8, "little"), b"payload")
    assert read_generation(header) == 5 and read_entry(entry).holds(b"payload")
    assert not read_entry(entry).holds(b"Payload")


def test_a_full_file_keeps_the_newest(path: Path) -> None:
    derived, reader = opened(path), opened(path)
    for number in range(40):
        keep(derived, (b"%d" % number, bytes([number]) * 4000))
        assert reader.get(COMPILED, key(b"%d" % number)) == bytes([number]) * 4000
        assert path.stat().st_size <= LIMIT
    assert [number for number in range(40) if reader.get(COMPILED, key(b"%d" % number))][-5:] == [35, 36, 37, 38, 39]
    keep(derived, (b"large", bytes(LIMIT // 2)))
    assert derived.get(COMPILED, key(b"large")) is None and derived.get(COMPILED, key(b"39"))


def test_what_a_crash_left_is_cut_off(path: Path) -> None:
    keep(opened(path), (b"a", b"alpha"))
    whole = path.read_bytes()
    for cut in (1, ENTRY - 1, ENTRY + 2):
        path.write_bytes(whole + pack_entry(COMPILED, key(b"b"), b"beta")[:cut])
        derived = opened(path)
        assert derived.get(COMPILED, key(b"a")) == b"alpha" and derived.get(COMPILED, key(b"b")) is None
        keep(derived, (b"c", b"gamma"))
        again = opened(path)
        assert again.get(COMPILED, key(b"a")) == b"alpha" and again.get(COMPILED, key(b"c")) == b"gamma"
        assert again.counters.damaged == 0


@pytest.mark.parametrize("begin", [
    b"", b"RGPU", bytes(32), b"x" * 500, pack_header(1)[:8] + b"\2" + pack_header(1)[9:]])
def test_another_header_begins_it_anew(path: Path, begin: bytes) -> None:
    path.write_bytes(begin)
    derived = opened(path)
    assert derived.get(COMPILED, key(b"a")) is None
    keep(derived, (b"a", b"alpha"))
    assert derived.get(COMPILED, key(b"a")) == b"alpha" and derived.counters.begun_anew == bool(begin)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_gives_another_payload(path: Path, data: st.DataObject) -> None:
    path.unlink(missing_ok=True)
    contents = {b"%d" % number: bytes([number]) * (number * 37) for number in range(6)}
    keep(opened(path), *contents.items())
    damaged = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(damaged[:data.draw(st.integers(0, len(damaged)))])
    derived = opened(path)
    for name, payload in contents.items():
        assert derived.get(COMPILED, key(name)) in (None, payload)
    keep(derived, *contents.items())
    for name, payload in contents.items():
        assert derived.get(COMPILED, key(name)) == payload
        assert opened(path).get(COMPILED, key(name)) == payload


def test_many_writers_and_readers_at_once(path: Path) -> None:
    """While the file is written anew again and again, a reader gets an entry's own bytes or nothing."""
    wrong: list[object] = []

    def work(worker: int) -> None:
        derived = opened(path)
        for number in range(60):
            name = b"%d" % (number * 7 % 20)
            payload = name * 1500
            derived.keep(COMPILED, key(name), payload)
            for other in range(20):
                found = derived.get(COMPILED, key(b"%d" % other))
                if found not in (None, b"%d" % other * 1500):
                    wrong.append((worker, other, found))
        if not derived.flush(30) or derived.counters.damaged:
            wrong.append(derived.counters)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_bytes_that_are_none() -> None:
    for damaged in (b"", bytes(ENTRY), pack_entry(1, bytes(32), b"")[:ENTRY - 1]):
        with pytest.raises(Corrupt):
            read_entry(damaged)
    with pytest.raises(Corrupt):
        read_generation(bytes(HEADER.size))
    with pytest.raises(ValueError, match="key of 3"):
        pack_entry(1, b"abc", b"")


def test_without_a_file() -> None:
    derived = Derived()
    derived.keep(COMPILED, key(b"a"), b"alpha")
    assert derived.get(COMPILED, key(b"a")) is None and derived.flush(0) and not derived.keeps
