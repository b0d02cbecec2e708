"""What a resident's surroundings are, and what is told apart by them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rgpu.cli.resident import surroundings


def test_they_are_the_same_at_any_time_and_in_a_child() -> None:
    text = surroundings.describe(None)
    assert text == surroundings.describe(None) and surroundings.socket_path(text) == surroundings.socket_path(text)
    child = os.fork()
    if child == 0:
        os.setsid()
        os._exit(0 if surroundings.describe(None) == text else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("name", ["RGPU_POOL", "RGPU_CONTEXT", "HOME", "PYTHONPATH", "LD_PRELOAD", "LC_ALL", "TZ"])
def test_a_variable_that_is_read_early_tells_apart(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = surroundings.describe(None)
    monkeypatch.setenv(name, "/other")
    assert surroundings.describe(None) != before
    assert surroundings.kept()[name] == "/other"


def test_other_variables_do_not_and_the_option_does(monkeypatch: pytest.MonkeyPatch) -> None:
    before = surroundings.describe(None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("RGPU_MEMORY", "1GiB")
    assert surroundings.describe(None) == before != surroundings.describe("there")
    assert not {"CUDA_VISIBLE_DEVICES", "RGPU_MEMORY"} & set(surroundings.kept())


def test_a_traced_process_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = surroundings._read
    monkeypatch.setattr(surroundings, "_read", lambda path: plain(path).replace(b"TracerPid:\t0", b"TracerPid:\t7"))
    with pytest.raises(OSError, match="traced"):
        surroundings.describe(None)


def test_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert surroundings.folder() == str(tmp_path / "rgpu-residents")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "not/absolute")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert surroundings.folder() == str(tmp_path / f"rgpu-residents-{os.geteuid()}")
    monkeypatch.setenv("TMPDIR", str(tmp_path / ("long" * 30)))
    with pytest.raises(OSError, match="too long"):
        surroundings.socket_path(b"")


def test_what_can_be_used(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    assert not surroundings.usable(str(path))
    path.mkdir(mode=0o700)
    assert surroundings.usable(str(path))
    for mode in (0o750, 0o701, 0o707):
        path.chmod(mode)
        with pytest.raises(PermissionError):
            surroundings.usable(str(path))
    path.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(path)
    for other in (link, Path("/etc/hostname"), Path("/etc")):
        with pytest.raises(PermissionError):
            surroundings.usable(str(other))


def test_what_a_process_inherits_is_told() -> None:
    """Of two processes that differ in a limit, the texts differ in that line only."""
    code = [sys.executable, "-c", "import sys; from rgpu.cli.resident import surroundings as s; "
            "sys.stdout.buffer.write(s.describe(None))"]
    texts = [subprocess.run(["sh", "-c", f'{before} exec "$@"', "sh", *code], capture_output=True, timeout=60,
                            check=True).stdout.splitlines() for before in ("", "ulimit -n 99;")]
    assert [one for one in texts[1] if one not in texts[0]] == [
        line for line in texts[1] if line.startswith(b"Max open files")]
