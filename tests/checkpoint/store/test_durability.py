"""What a power cut may leave of a checkpoint: at every point the newest checkpoint that counts restores.

The writes, syncs and renames of two checkpoints, of a removal and of a
collection are recorded; for every prefix of that history the disk is laid out
with nothing of what was not synced, with all of it, and with chance halves of
it, and what the registry would name then must restore.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from rgpu.checkpoint.store import collect
from rgpu.checkpoint.store.checkpoint_store import DirectoryStore
from rgpu.session.errors import RgpuError
from tests.support.checkpoint.fake_device import FakeDevice
from tests.support.checkpoint.store_helpers import BASE, PAGE, checkpoint_of, copy_of, many_pages, restores_as
from tests.support.disk.crashing_disk import Operation, Recorder, after_a_crash, lay_out

CHANCES = 12 if os.environ.get("RGPU_SWEEP") else 2


def recorded(root: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Operation], dict[str, FakeDevice]]:
    """Two checkpoints, the second built on the first, then the first removed and its leftovers collected."""
    root.mkdir()
    with monkeypatch.context() as patched:
        recorder = Recorder(root, patched)
        store, device, held = DirectoryStore(root / "store"), many_pages(4), {}
        store.blobs.pack_limit = 2 * PAGE
        checkpoint_of(store, "first", device, 7)
        recorder.mark("first")  # from here on the registry may name it
        held["first"] = copy_of(device)
        device.write(BASE + PAGE, b"changed")
        checkpoint_of(store, "second", device, 9, base="first")
        recorder.mark("second")
        held["second"] = copy_of(device)
        store.forget("first")
        collect.collect(store, grace=0)
        recorder.mark("collected")
    return recorder.history, held


def test_the_newest_checkpoint_that_counts_restores_after_any_crash(tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    history, held = recorded(tmp_path / "disk", monkeypatch)
    assert len([o for o in history if o.what == "sync"]) > 6 and any(o.what == "link" for o in history)
    states = 0
    for length in range(len(history) + 1):
        prefix = history[:length]
        marks = [o.path for o in prefix if o.what == "mark"]
        variants = [after_a_crash(prefix, None, keep) for keep in (False, True)]
        variants += [after_a_crash(prefix, random.Random(1000 * length + n)) for n in range(CHANCES)]
        for number, state in enumerate(variants):
            root = tmp_path / f"{length}-{number}"
            lay_out(state, root)
            states += 1
            _check(root, marks, held)
    assert states > 200


def _check(root: Path, marks: list[str], held: dict[str, FakeDevice]) -> None:
    store = DirectoryStore(root / "store")
    named = "second" if "second" in marks else "first" if "first" in marks else ""
    if named:
        assert restores_as(store.open(named), held[named]), f"{named} counts and does not restore"
    for info in store.ls() if (root / "store").exists() else []:
        if not info.error:  # what is whole is true, named or not
            try:
                whole = store.open(info.name)
                whole.verify()
            except RgpuError:
                assert info.name != named
                continue
            assert restores_as(whole, held.get(info.name, held[named or "first"]))
    if named:  # the pool goes on: a new checkpoint, on top of whatever the crash left
        device = copy_of(held[named])
        device.write(BASE, b"after the crash")
        checkpoint_of(store, "after", device, 11, base=named)
        store.verify("after")
        assert store.newest_good(session="demo/1").name == "after"


def test_the_model_finds_a_missing_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: with any one kind of sync left out, some crash loses a checkpoint that counts."""
    history, held = recorded(tmp_path / "disk", monkeypatch)
    for left_out in ("sync", "syncdir"):
        lazy = [o for o in history if o.what != left_out]
        end = next(i for i, o in enumerate(lazy) if o.path == "second") + 1
        root = tmp_path / left_out
        lay_out(after_a_crash(lazy[:end], None, keep=False), root)
        with pytest.raises(RgpuError):
            DirectoryStore(root / "store").verify("second")


def test_packs_are_durable_before_any_manifest_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history, _ = recorded(tmp_path / "disk", monkeypatch)
    first = next(i for i, o in enumerate(history) if o.what == "link" and o.other.endswith("first.image"))
    renames = [i for i, o in enumerate(history) if o.what == "rename" and o.other.endswith(".pack") and i < first]
    assert renames and all(any(o.what == "syncdir" and o.path.endswith("packs") for o in history[i:first])
                           for i in renames)
