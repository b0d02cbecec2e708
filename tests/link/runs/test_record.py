"""The record of a detached run: hostile ones are refused, and what is true of a run is told by a table."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rgpu.link.local.processes import boot_id
from rgpu.link.runs import record as records
from rgpu.link.runs.folder import Runs, process, this_host
from rgpu.link.runs.record import Facts, RunRecord, standing
from rgpu.session.errors import AlreadyExists, Corrupt, NotFound, RgpuError, UnknownOutcome, UsageError, VersionMismatch

GOOD = RunRecord(name="train", command="python train.py", host=this_host(), boot=boot_id(), begun=1.0)


def test_a_record_is_read_as_it_was_written() -> None:
    assert records.decode(records.encode(GOOD), "run.json") == GOOD


@pytest.mark.parametrize(("change", "error"), [
    ({"rgpu_run": 2}, VersionMismatch), ({"rgpu_run": "1"}, VersionMismatch), ({"rgpu_run": None}, VersionMismatch),
    ({"name": ""}, Corrupt), ({"name": "x" * 64}, Corrupt), ({"exit_code": 256}, Corrupt), ({"exit_code": -1}, Corrupt),
    ({"exit_code": "0"}, Corrupt), ({"program": {"pid": -1}}, Corrupt), ({"program": 7}, Corrupt),
    ({"begun": "now"}, Corrupt), ({"reason": "x" * 5000}, Corrupt), ({"ended": -5}, Corrupt),
])
def test_other_records_are_refused(change: dict[str, object], error: type[RgpuError]) -> None:
    data = json.dumps({**json.loads(records.encode(GOOD)), **change}).encode()
    with pytest.raises(error, match=r"run\.json"):
        records.decode(data, "run.json")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"{}", b"\xff\xfe", b"[" * 70000, b'{"a": 1}'])
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(Corrupt):
        records.decode(data, "run.json")


@given(st.integers(0, 2**16), st.binary(min_size=1, max_size=8))
def test_a_damaged_record_is_read_or_refused(at: int, damage: bytes) -> None:
    data = bytearray(records.encode(GOOD))
    data[at % len(data):at % len(data) + len(damage)] = damage
    try:
        records.decode(bytes(data), "run.json")
    except (Corrupt, VersionMismatch):
        pass


@pytest.mark.parametrize("facts", [Facts(*bits) for bits in itertools.product([False, True], repeat=5)])
def test_every_standing_has_a_reason_and_never_calls_an_unknown_end_known(facts: Facts) -> None:
    now = standing(GOOD, facts)
    assert now.state in ("running", "unknown")
    if facts.here and facts.same_boot:
        assert (now.state == "running") == (facts.kept or facts.agent or facts.program)
    else:
        assert now.state == "unknown"
    assert now.reason or facts.kept
    over = msgspec.structs.replace(GOOD, ended=2.0, exit_code=0, reason="done", trouble="its supervisor died")
    assert standing(over, facts) == records.Standing("ended", "done (its supervisor died)")


def put(runs: Runs, record: RunRecord) -> None:
    lock = runs.claim(record.name)
    runs.put(record)
    os.close(lock)


def test_a_name_is_one_runs(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "runs")
    lock = runs.claim("train")
    assert (tmp_path / "runs").stat().st_mode & 0o777 == 0o700
    with pytest.raises(AlreadyExists, match="rgpu signal train TERM"):
        Runs(tmp_path / "runs").claim("train")
    runs.put(GOOD)
    assert runs.run("train").look()[1].state == "running"
    os.close(lock)
    record, now = runs.run("train").look()
    assert now.state == "unknown" and "its supervisor died" in now.reason
    with pytest.raises(UnknownOutcome, match="how is not known"):
        runs.run("train").wait(0.0 + 10)
    with pytest.raises(NotFound):
        runs.run("other")
    for name in ("../train", "", "a/b", "x" * 64):
        with pytest.raises(UsageError):
            runs.run(name)


def test_a_host_that_was_restarted_is_told(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    put(runs, msgspec.structs.replace(GOOD, boot="another", program=process(os.getpid())))
    assert "restarted" in runs.run("train").look()[1].reason
    put(runs, msgspec.structs.replace(GOOD, host="elsewhere"))
    assert "elsewhere: ask there" in runs.run("train").look()[1].reason


def test_a_program_whose_keepers_died_is_told(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    put(runs, msgspec.structs.replace(GOOD, program=process(os.getpid())))
    now = runs.run("train").look()[1]
    assert now.state == "running" and "without GPU and without output" in now.reason
    put(runs, msgspec.structs.replace(GOOD, program=records.Process(pid=os.getpid(), started="1")))  # a later process
    assert runs.run("train").look()[1].state == "unknown"


@pytest.mark.parametrize("what", ["link", "other name", "folder", "fifo"])
def test_records_that_are_not_the_runs_own_are_refused(tmp_path: Path, what: str) -> None:
    runs = Runs(tmp_path)
    put(runs, GOOD)
    path = tmp_path / "train" / "run.json"
    path.unlink()
    if what == "link":
        path.symlink_to("/etc/passwd")
    elif what == "folder":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path)
    else:
        path.write_bytes(records.encode(msgspec.structs.replace(GOOD, name="other")))
    with pytest.raises(Corrupt):
        runs.run("train").look()
    assert runs.known() == []  # one such does not hide the others


def test_only_the_newest_ended_runs_stay(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    for number in range(5):
        put(runs, msgspec.structs.replace(GOOD, name=f"r{number}", begun=float(number), ended=9.0, exit_code=0))
    lock = runs.claim("kept")
    runs.put(msgspec.structs.replace(GOOD, name="kept", begun=0.0))
    runs.forget_old(2)
    assert runs.names() == ["kept", "r3", "r4"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "kept.lock", "r3", "r3.lock", "r4", "r4.lock"]
    os.close(lock)
