"""``rgpu journal …`` as a user runs it, on the recordings of tests/session/corpora."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from rgpu.cli.checkpoints.journal import command

HEAT = str(Path(__file__).parents[1] / "session" / "corpora" / "heat.rgpuj")
SMALL = ("--device-memory", "64MiB")


def run(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(command, list(words))
    assert done.exit_code == code, (done.output, done.exception)
    return done.output


def test_show_filters_and_json_lines() -> None:
    text = run("show", HEAT, "--call", "memcpy_d2h", "--from", "30")
    assert text.count("memcpy_d2h(") == 3 and "*memcpy_d2h" in text and "   55  t0" in text
    rows = json.loads(output := run("show", HEAT, "-o", "json", "--limit", "5"))
    assert [row["seq"] for row in rows] == [1, 2, 3, 4, 5] and len(output.splitlines()) == 7
    assert rows[3]["call"] == "module_load" and rows[3]["payload"] > 1000 and rows[3]["awaited"]
    awaited = json.loads(run("show", HEAT, "-o", "json", "--awaited", "--to", "24"))
    assert [row["seq"] for row in awaited] == [4, 11, 24]
    assert "no wire call" in run("show", HEAT, "--call", "nothing", code=2)
    assert run("show", HEAT, "-o", "json", "--thread", "9").split() == ["[", "]"]


def test_verify_names_offset_and_reason(tmp_path: Path) -> None:
    assert json.loads(run("verify", HEAT, "-o", "json"))["answers"] == 7
    bad = tmp_path / "bad.rgpuj"
    data = bytearray(Path(HEAT).read_bytes())
    data[2000] ^= 1
    bad.write_bytes(data)
    said = json.loads(CliRunner().invoke(command, ["verify", str(bad), "-o", "json"]).stdout)
    assert said["error"] == "corrupt" and said["detail"]["offset"] > 0 and said["detail"]["reason"]
    assert "does not exist" in run("verify", str(tmp_path / "none"), code=3)


def test_replay_snapshot_checkpoint_and_diff(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    done = json.loads(run("replay", HEAT, *SMALL, "--snapshot", str(first), "--at", "23", "-o", "json"))
    assert done["error"] == 0 and done["divergences"] == [] and done["answers_compared"] == 7
    assert {path.name for path in first.iterdir()} == {"23.json", "64.json"}
    assert "equal" in run("diff", str(first / "23.json"), HEAT, *SMALL)
    run("replay", HEAT, *SMALL, "--snapshot", str(second), "--at", "38", "--image",
        f"{tmp_path}/store/end")
    assert "equal" in run("diff", f"{tmp_path}/store/end", str(second / "64.json"))
    text = run("diff", str(first / "23.json"), str(second / "38.json"), code=8)
    assert "first differing page: 0x2000000" in text and "different" in text


@pytest.mark.parametrize("words", [("diff", "nowhere/x", HEAT), ("replay", "nowhere")])
def test_what_is_not_there(words: tuple[str, ...]) -> None:
    run(*words, code=3)
