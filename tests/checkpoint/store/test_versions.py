"""What the previous version wrote stays readable: a small corpus of it is kept here, written by that version.

It is never rewritten; a new version of a format adds a folder beside it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from rgpu.checkpoint.blobs.base import DirectoryBlobs
from rgpu.checkpoint.manifest.state import SessionState
from rgpu.checkpoint.store import collect
from rgpu.checkpoint.store.checkpoint_store import DirectoryStore, user_key, user_tag
from rgpu.checkpoint.store.grants import UserCheckpoints
from rgpu.migrate.records import schema as records
from tests.support.checkpoint.samples import BASE, sample_device, taken
from tests.support.checkpoint.store_helpers import checkpoint_of, restores_as

V1 = Path(__file__).parents[1] / "corpus" / "v1"
FIRST, SECOND = "demo@1-e3-p7-1", "demo@1-e3-p9-2"


def origin():  # type: ignore[no-untyped-def]
    """The device that the corpus was taken of."""
    device = sample_device(seed=7, pages=5)
    device.memory.pop(max(device.memory))
    return device


def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(V1 / "store", tmp_path / "store"))


def test_checkpoints_of_version_1(tmp_path: Path) -> None:
    root, device = copied(tmp_path), origin()
    store = DirectoryStore(root)
    assert {info.name: info.position for info in store.ls()} == {FIRST: 7, SECOND: 9}
    for name in (FIRST, SECOND):
        store.verify(name)
    assert restores_as(store.open(FIRST), device)
    device.write(BASE + 65536, b"second image")
    assert restores_as(store.open(SECOND), device)
    assert store.open(SECOND).state == taken(device, 9)


def test_a_user_s_view_holds_them_and_new_checkpoints_beside(tmp_path: Path) -> None:
    root, device, tag = copied(tmp_path), origin(), user_tag("somebody")
    checkpoints = UserCheckpoints(DirectoryBlobs(root), tag, user_key(bytes(32), tag))
    assert checkpoints.open(SECOND).state.position == 9
    checkpoint_of(checkpoints.own, "new", device, 12)
    assert restores_as(checkpoints.open("new"), device)
    checkpoints.earlier.forget(FIRST)
    assert collect.collect(checkpoints.earlier, grace=0).removed == [], "the second checkpoint needs its pack"
    checkpoints.earlier.verify(SECOND)
    checkpoints.own.verify("new")


def test_a_new_checkpoint_builds_on_packs_of_version_1(tmp_path: Path) -> None:
    store, device = DirectoryStore(copied(tmp_path)), origin()
    device.write(BASE + 65536, b"second image")
    device.write(BASE, b"third")
    facts = checkpoint_of(store, "third", device, 11, base=SECOND)
    assert facts["unchanged_pages"] > 0
    store.verify("third")
    assert restores_as(store.open("third"), device)


def test_states_and_records_of_version_1() -> None:
    device = origin()
    device.write(BASE + 65536, b"second image")
    assert SessionState.decode((V1 / "state").read_bytes()) == taken(device, 9)
    record = records.decode((V1 / "session.record").read_bytes(), records.SessionRecord, "sessions/demo/1")
    assert record.checkpoint is not None and record.checkpoint.name == SECOND
    assert record.older == [] and record.journal_from == 9 and record.usable_checkpoints == [record.checkpoint]
