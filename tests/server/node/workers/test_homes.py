"""Folders of workers: what goes with a worker, and what stays."""

from __future__ import annotations

import os
from pathlib import Path

from rgpu.server import ended_mark
from rgpu.server.node.workers import homes


def session(directory: Path, name: str, when: int) -> Path:
    folder = directory / "workers" / name
    folder.mkdir(parents=True)
    (folder / "worker.log").write_text("it ran")
    os.utime(folder, (when, when))
    return folder


def test_logs_of_the_newest_sessions_are_kept_and_those_of_living_ones(tmp_path: Path) -> None:
    folders = [session(tmp_path, f"s{number}", number) for number in range(8)]
    homes.link(homes.make(tmp_path), folders[0], 1)
    (folders[1] / "1.over").write_text("the leader was not told yet")
    for number in (0, 1):
        os.utime(folders[number], (number, number))
    homes.forget_old(tmp_path / "workers", keep=3)
    assert sorted(path.name for path in (tmp_path / "workers").iterdir()) == ["s0", "s1", "s5", "s6", "s7"]


def test_the_mark_of_an_ended_program_outlives_the_worker_until_the_leader_was_told(tmp_path: Path) -> None:
    folder, home = session(tmp_path, "s", 1), homes.make(tmp_path)
    homes.link(home, folder, 3)
    ended_mark.write(home.path, 3, "the program ended")
    (home.path / "w.sock").touch()
    (home.path / "left").mkdir()
    home.clear()
    homes.prune(folder)
    assert ended_mark.read(tmp_path / "workers") == {folder: "the program ended"}
    assert [path.name for path in home.path.iterdir()] == ["3.over"] and home.token() == ""
    ended_mark.clear(folder)
    assert not home.path.exists() and [path.name for path in folder.iterdir()] == ["worker.log"]


def test_nothing_in_a_worker_s_folder_makes_a_daemon_read_elsewhere_or_wait(tmp_path: Path) -> None:
    """A worker may put there what it likes."""
    folder, home = session(tmp_path, "s", 1), homes.make(tmp_path)
    homes.link(home, folder, 3)
    (tmp_path / "secret").write_text("of the pool")
    (home.path / "3.over").symlink_to(tmp_path / "secret")
    os.mkfifo(home.path / "4.over")
    (home.path / "5.over").write_text("x" * 100_000)
    found = ended_mark.read(tmp_path / "workers")
    assert found == {folder: "x" * ended_mark.LIMIT}
