"""What `rgpu doctor` makes of what it sees: each judgement, good and bad; and the keys of a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rgpu.cli.helpers import doctor_pool as doctor
from rgpu.link import versions
from rgpu.link.keys import PoolFiles

DEVICE = {"device": "cuda:0", "healthy": True, "compute_capability": [9, 0], "driver_version": 13000}


def node(host: str, **values: Any) -> dict[str, Any]:
    return {"host": host, "state": "ready", "reason": "", "answers": True, "devices": [dict(DEVICE)], **values}


STATUS = {"leader": "a", "paused": False, "away": []}


def judged(status: dict[str, Any], nodes: list[dict[str, Any]]) -> dict[str, tuple[bool, str]]:
    return {finding.check: (finding.ok, finding.found) for finding in doctor.judge_pool(status, nodes)}


def test_a_good_pool() -> None:
    found = judged(STATUS, [node("a"), node("b", state="cordoned")])
    assert all(ok for ok, _ in found.values()) and "b is cordoned" in found["nodes"][1]


@pytest.mark.parametrize("status, nodes, check, says", [
    ({**STATUS, "leader": None}, [node("a")], "coordinator", "nobody leads"),
    ({**STATUS, "paused": True, "paused_reason": "looking"}, [node("a")], "automation", "looking"),
    (STATUS, [node("a", answers=False)], "nodes", "a is silent"),
    (STATUS, [node("a", state="unhealthy", reason="ECC")], "nodes", r"a is unhealthy \(ECC\)"),
    (STATUS, [node("a", devices=[{**DEVICE, "healthy": False}])], "nodes", "cuda:0 of a is unhealthy"),
    (STATUS, [], "nodes", "0 in the pool"),
])
def test_what_needs_mending(status: dict[str, Any], nodes: list[dict[str, Any]], check: str, says: str) -> None:
    import re

    ok, found = judged(status, nodes)[check]
    assert not ok and re.search(says, found), found


def test_clocks_versions_and_reach() -> None:
    good = {"offset": 0.3, "error": 0.01, "versions": versions.ours(), "version": "0.1.0"}
    assert doctor.judge_clocks({"a": good}).ok and doctor.judge_versions({"a": good}).ok
    late = doctor.judge_clocks({"a": good, "b": {**good, "offset": -42.0}})
    assert not late.ok and late.found == "b is -42.0 s off"
    assert doctor.judge_clocks({"b": {**good, "offset": 12.0, "error": 3.0}}).ok, "a slow answer proves nothing"
    ours = versions.ours()
    other = doctor.judge_versions({"a": {**good, "versions": {**ours, "control": ours["control"] + 2}}})
    assert not other.ok and "protocols do not fit" in other.found
    silent = doctor.judge_reach({"a": good, "b": "tcp://b:1 does not answer"})
    assert not silent.ok and silent.found == "b: tcp://b:1 does not answer"


def test_a_device_of_its_own_kind_is_named() -> None:
    old = node("b", devices=[{**DEVICE, "compute_capability": [8, 0]}])
    finding = doctor.judge_drivers([node("a"), old, node("c")])
    assert finding.ok and "b alone has cuda 8.0" in finding.found and "a alone" not in finding.found


def test_a_damaged_result_of_a_compiler_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "rgpu-nvrtc"
    told = []
    for content in (None, b"", b"RGPUNVC1" + bytes(24)):
        if content is not None:
            folder.mkdir(exist_ok=True)
            (folder / "result").write_bytes(content)
        done = subprocess.run([sys.executable, "-m", "rgpu.cli.main", "doctor", "-o", "json", "--pool", str(tmp_path)],
                              env={**os.environ, "CUDA_CACHE_PATH": str(tmp_path)}, capture_output=True, text=True)
        told += [(one["ok"], one["found"]) for one in json.loads(done.stdout) if one["check"] == "compile cache"]
    assert told[0] == (True, f"none yet in {folder}")
    assert told[1] == (False, f"{folder / 'result'} is damaged: 0 bytes, fewer than its header")
    assert told[2] == (False, f"{folder / 'result'} is damaged: version 0, not 1")


def test_keys(tmp_path: Path) -> None:
    files = PoolFiles(tmp_path / "pool")
    files.create()
    files.add_node("a")
    assert doctor.keys(files).ok, doctor.keys(files)
    files.key_path("user").chmod(0o644)
    assert "can be read by others" in doctor.keys(files).found
    files.key_path("user").chmod(0o600)
    (files.root / "secret").write_bytes(b"short")
    assert "not 32" in doctor.keys(files).found
    (files.root / "keys" / "authorized" / "x.pub").write_text("rubbish")
    assert "cannot be read as a key" in doctor.keys(files).found
    (files.root / "keys" / "authorized").chmod(0o777)
    assert "written by others" in doctor.keys(files).found and not doctor.keys(files).ok
