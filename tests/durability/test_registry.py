"""What a power cut may leave of the embedded registry: every acknowledged transaction, whole, and no half one."""

from __future__ import annotations

import os
import random
import sqlite3
from pathlib import Path

import pytest

from rgpu.migrate.registry.base import Put
from rgpu.migrate.registry.store import Store
from rgpu.session.errors import RgpuError
from tests.durability.registry_program import changes
from tests.support.disk.crashing_disk import Operation, after_a_crash, lay_out
from tests.support.disk.preloaded import compiler, record

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
EVERY = 1 if os.environ.get("RGPU_SWEEP") else 3  #: prefixes that are tried, beside all that end with a mark
CHANCES = 10 if os.environ.get("RGPU_SWEEP") else 1


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> list[Operation]:
    found = record("tests.durability.registry_program", tmp_path_factory.mktemp("registry"))
    # The index of the log is shared memory: written through a mapping, of no use after a crash, and made anew.
    shared = {operation.file for operation in found if operation.what == "create" and operation.path.endswith("-shm")}
    return [operation for operation in found if not operation.path.endswith("-shm") and operation.file not in shared]


def contents(number: int) -> dict[str, bytes]:
    """All entries behind the transaction of that number (−1: none yet)."""
    held: dict[str, bytes] = {}
    for each in range(number + 1):
        for key, value in changes(each):
            if value is None:
                del held[key]
            else:
                held[key] = value
    return held


def crashed(prefix: list[Operation], root: Path, chance: random.Random | None, keep: bool = False) -> Path:
    lay_out(after_a_crash(prefix, chance, keep), root)
    for path in root.glob("*"):
        path.chmod(0o600)
    return root / "registry.db"


def check(path: Path, marks: list[str]) -> None:
    """Open it as a daemon would after the crash."""
    acknowledged = max((int(mark) for mark in marks if mark.isdigit()), default=-1)
    store = Store(path)
    try:
        assert store._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        held = {entry.key: entry.value for entry in store.list("").entries}
        assert held in (contents(acknowledged), contents(acknowledged + 1)), \
            f"{acknowledged} was acknowledged, and {sorted(held)} is there"
        assert store.revision() in (acknowledged + 2, acknowledged + 3), "a revision for each"
        store.txn([], [Put("after the crash", b"it goes on")])
        assert store.get("after the crash") is not None
    finally:
        store.close()


def test_what_was_acknowledged_survives_any_crash(history: list[Operation], tmp_path: Path) -> None:
    assert [o.path for o in history if o.what == "mark"] == ["made", *map(str, range(12))]
    kinds = {o.what for o in history}
    assert {"create", "write", "sync", "syncdir", "unlink"} <= kinds, kinds
    states = 0
    for length in range(len(history) + 1):
        prefix = history[:length]
        if length % EVERY and prefix[-1].what != "mark":
            continue
        marks = [o.path for o in prefix if o.what == "mark"]
        for number, chance in enumerate([None, None, *(random.Random(1000 * length + n) for n in range(CHANCES))]):
            check(crashed(prefix, tmp_path / f"{length}-{number}", chance, keep=number == 1), marks)
            states += 1
    print(f"{states} states of {len(history)} operations")
    assert states > 200


def test_the_model_finds_a_missing_sync(history: list[Operation], tmp_path: Path) -> None:
    """The test above can fail: without the syncs some crash loses a transaction that was acknowledged, or more."""
    lazy = [o for o in history if o.what != "sync"]
    lost = 0
    for length in range(len(lazy) // 2, len(lazy) + 1, 5):
        prefix = lazy[:length]
        marks = [o.path for o in prefix if o.what == "mark"]
        try:
            check(crashed(prefix, tmp_path / str(length), random.Random(length)), marks)
        except (AssertionError, RgpuError, sqlite3.Error):
            lost += 1
    assert lost
