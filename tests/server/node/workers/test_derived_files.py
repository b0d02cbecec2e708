"""One derived file for each user; all of them are bounded together."""

from __future__ import annotations

import os
from pathlib import Path

from rgpu.server.derived import Derived
from rgpu.server.derived_format import COMPILED, key
from rgpu.server.node.workers.derived_files import DerivedFiles


def test_users_see_nothing_of_each_other(tmp_path: Path) -> None:
    files = DerivedFiles(tmp_path, 1 << 20)
    for tag in ("anna", "bert"):
        descriptor = files.open(tag)
        assert descriptor is not None
        derived = Derived(descriptor)
        assert derived.get(COMPILED, key(b"a")) is None
        derived.keep(COMPILED, key(b"a"), tag.encode())
        assert derived.flush(10)
    for tag in ("anna", "bert"):
        descriptor = files.open(tag)
        assert descriptor is not None and Derived(descriptor).get(COMPILED, key(b"a")) == tag.encode()
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "derived").iterdir()} == {0o600}


def test_the_least_recently_used_file_goes_first(tmp_path: Path) -> None:
    files = DerivedFiles(tmp_path, 1000)
    for number, tag in enumerate(("old", "new")):
        descriptor = files.open(tag)
        assert descriptor is not None
        os.write(descriptor, bytes(600))
        os.utime(descriptor, (number, number))
        os.close(descriptor)
    os.close(files.open("new") or -1)
    assert [path.name for path in (tmp_path / "derived").iterdir()] == ["new.1"]


def test_nothing_is_kept_where_nothing_may_be_or_nothing_can(tmp_path: Path) -> None:
    assert DerivedFiles(tmp_path, 0).open("a") is None and not (tmp_path / "derived").exists()
    (tmp_path / "derived").write_text("in the way")
    assert DerivedFiles(tmp_path, 1 << 20).open("a") is None
