"""Shell completion, as a shell asks for it; and the unit that runs a node."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def complete(words: str, count: int, tmp_path: Path) -> list[str]:
    environment = {**os.environ, "_RGPU_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(count),
                   "RGPU_POOL": str(tmp_path / "none"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", "from rgpu.cli.main import main; main()"], env=environment,
                          capture_output=True, text=True, timeout=60)
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


def test_verbs_and_options_are_completed(tmp_path: Path) -> None:
    assert complete("rgpu dr", 1, tmp_path) == ["drain"]
    assert "--no-wait" in complete("rgpu drain --n", 2, tmp_path)
    assert {"status", "pause", "resume"} <= set(complete("rgpu pool ", 2, tmp_path))
    assert complete("rgpu drain x", 2, tmp_path) == [], "no pool: no names, no error"


@pytest.mark.parametrize("shell, needs", [("bash", "complete -o"), ("zsh", "#compdef rgpu"), ("fish", "complete ")])
def test_scripts(shell: str, needs: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "rgpu.cli.main", "completion", shell], cwd=ROOT, capture_output=True,
                          text=True, timeout=60)
    assert needs in done.stdout and "_RGPU_COMPLETE" in done.stdout, done.stderr
    program = shutil.which(shell)
    if program is not None:
        script = tmp_path / "script"
        script.write_text(done.stdout)
        subprocess.run([program, "-n", str(script)], check=True, timeout=30)


def test_the_unit_lets_workers_outlive_the_daemon(tmp_path: Path) -> None:
    text = (ROOT / "packaging" / "rgpu-node.service").read_text()
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(text)
    service = unit["Service"]
    assert service["KillMode"] == "process" and service["Restart"] == "always"
    assert not {"LockPersonality", "MemoryDenyWriteExecute", "PrivateDevices"} & set(service)
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        return
    copy = tmp_path / "rgpu-node.service"
    copy.write_text(text.replace("/opt/rgpu/bin/rgpu", "/bin/true").replace("User=rgpu\nGroup=rgpu\n", ""))
    done = subprocess.run([analyze, "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=60)
    assert "rgpu-node.service:" not in done.stderr, done.stderr
