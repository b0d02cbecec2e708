"""What a power cut of the client host may leave of a spilled journal: what was said to be written, nothing false."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from rgpu.session.errors import Corrupt
from rgpu.session.journal.journal_file import JournalFileReader, verify
from rgpu.session.journal.record import pack_record
from rgpu.session.journal.recording import Recording
from tests.durability import spill_program
from tests.support.disk.crashing_disk import Operation, after_a_crash, lay_out
from tests.support.disk.preloaded import compiler, record

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
CHANCES = 20 if os.environ.get("RGPU_SWEEP") else 4
CALLS = spill_program.RUNS * spill_program.CALLS


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> list[Operation]:
    return record("tests.durability.spill_program", tmp_path_factory.mktemp("spill"))


def name(number: int) -> str:
    return f"{1 + number * CALLS:016d}-{(number + 1) * CALLS:016d}.rgpuj"


def check(folder: Path, marks: list[str]) -> None:
    present = {path.name for path in folder.glob("*.rgpuj")}
    written = {name(int(mark.split()[1])) for mark in marks if mark.startswith("spilled")}
    cut = {name(int(mark.split()[1])) for mark in marks if mark.startswith("cut")}
    assert written - cut <= present, "what was said to be written is there"
    for each in sorted(present):
        report = verify(folder / each)
        assert report.complete and report.records == CALLS, f"{each} is there and not whole"
        with JournalFileReader(folder / each) as reader:
            for seen in reader:
                assert pack_record(seen) == spill_program.call(seen.seq)
    if written - cut:
        assert Recording(folder).verify().last_seq >= max(int(each[17:33]) for each in written - cut)


def states(history: list[Operation], tmp_path: Path) -> int:
    count = 0
    for length in range(len(history) + 1):
        prefix = history[:length]
        marks = [o.path for o in prefix if o.what == "mark"]
        if not marks and not any(o.what == "create" for o in prefix):
            continue
        for number, chance in enumerate([None, None, *(random.Random(1000 * length + n) for n in range(CHANCES))]):
            root = tmp_path / f"{length}-{number}"
            lay_out(after_a_crash(prefix, chance, keep=number == 1), root)
            if marks or (root / "journal").is_dir():
                check(root / "journal", marks)
            count += 1
    return count


def test_a_spilled_journal_after_any_crash(history: list[Operation], tmp_path: Path) -> None:
    # The agent's own folder was there before.
    history = [Operation("mkdir", "journal"), Operation("syncdir", ".")] + [o for o in history if o.what != "mkdir"]
    assert len([o for o in history if o.what == "mark"]) == spill_program.FILES + 1
    count = states(history, tmp_path)
    print(f"{count} states of {len(history)} operations")
    assert count > 100


@pytest.mark.parametrize("left_out", ["sync", "syncdir"])
def test_the_model_finds_what_is_missing(history: list[Operation], tmp_path: Path, left_out: str) -> None:
    lazy = [Operation("mkdir", "journal"), Operation("syncdir", ".")] + [
        o for o in history if o.what not in ("mkdir", left_out)]
    with pytest.raises((AssertionError, Corrupt)):
        states(lazy, tmp_path)
