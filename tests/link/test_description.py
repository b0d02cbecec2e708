"""pool.json as members come and go: what is written, in which order, and that writers do not undo each other."""

from __future__ import annotations

import threading
from pathlib import Path

from rgpu.link import description
from rgpu.link.keys import Endpoint, KeyPair, PoolFiles

A, B, C, D = (Endpoint(f"tcp://10.0.0.{n}:7070", KeyPair.create("node", host).public, host)
              for n, host in enumerate("abcd", 1))


def test_who_lives_comes_first_and_who_is_away_stays() -> None:
    assert description.merged([A, B, C], [C, B]) == [B, C, A]
    assert description.merged([B, C, A], [A, B, C]) == [A, B, C], "back again"
    assert description.merged([A, B], []) == [A, B], "nobody is known to live: nothing is forgotten"


def test_who_left_for_good_goes() -> None:
    assert description.merged([A, B, C], [C], stays=lambda e: e is not A) == [C, B]


def test_a_new_address_or_key_takes_the_old_ones_place() -> None:
    moved, fresh = Endpoint("tcp://10.0.9.9:1", A.public, "a"), Endpoint(A.address, D.public, "a")
    assert description.merged([A, B], [moved]) == [moved, B]
    assert description.merged([A, B], [fresh]) == [fresh, B]


def test_a_daemon_of_the_folder_that_came_back_elsewhere_has_the_last_word() -> None:
    moved = Endpoint("tcp://10.0.0.1:9999", A.public, "a")
    assert description.merged([moved, B], [A, B], own_word={"a"}) == [moved, B]
    assert description.merged([Endpoint(moved.address, D.public, "a"), B], [A, B], own_word={"a"}) == [A, B], "another"


def test_a_client_keeps_as_many_as_are_worth_trying() -> None:
    assert description.merged([A, B, C], [D], most=2) == [D, A]


def test_what_is_no_endpoint_is_left_out() -> None:
    good = {"address": A.address, "public": A.public, "host": "a"}
    bad = [None, 1, {}, {**good, "address": "http://a"}, {**good, "public": "x"}, {**good, "address": 7}]
    assert description.named([*bad, good]) == [A]
    assert description.named("rubbish") == description.named(None) == []


def test_two_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    files = PoolFiles(tmp_path)
    files.create()
    members = [Endpoint(f"tcp://10.0.1.{n}:1", KeyPair.create("node", f"n{n}").public, f"n{n}") for n in range(24)]
    threads = [threading.Thread(target=description.update_endpoint, args=(files, one)) for one in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {one.host for one in files.read_description().endpoints} == {one.host for one in members}
    assert files.description_path.stat().st_mode & 0o777 == 0o600
    description.remember(files, members)
    assert not description.remember(files, members), "no news is not written"


def test_a_pool_of_a_thousand_hosts_can_be_read(tmp_path: Path) -> None:
    files = PoolFiles(tmp_path)
    files.create()
    description.remember(files, [Endpoint(f"tcp://host-{n:04d}.example.org:7070", A.public, f"host-{n:04d}")
                                 for n in range(1000)])
    assert len(files.read_description().endpoints) == 1000
