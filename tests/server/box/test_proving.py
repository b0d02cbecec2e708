"""Walls in which a device does not work are taken down, or the node does not start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rgpu.server.box import host
from rgpu.server.box.walls import Mode, Standing
from rgpu.server.node.workers import boxes as module
from rgpu.server.node.workers import proven_walls
from rgpu.server.node.workers.boxes import Boxes
from rgpu.session.errors import Refused

missing = host.missing()
pytestmark = pytest.mark.skipif("landlock" in missing or "seccomp" in missing, reason=str(missing))

#: In place of the examination: a driver that wants one file, a socket of the network, or nothing that there is.
WANTS = """
import json, socket, sys
def wanted(what):
    if what == "file":
        open({file!r}).close()
    elif what == "network":
        socket.socket(socket.AF_INET).close()
    elif what == "miracle":
        raise OSError
try:
    wanted({what!r}); worked = True
except OSError:
    worked = False
print(json.dumps({{"fault": "", "worked": worked}}))
"""


def node(folder: Path, what: str, monkeypatch: pytest.MonkeyPatch, mode: Mode = Mode.AUTO) -> Boxes:
    directory = folder / "nodes" / "a"
    directory.mkdir(parents=True)
    (folder / "wanted").touch()
    library = folder / "library"
    library.mkdir()
    (library / "examination.py").write_text(WANTS.format(file=str(folder / "wanted"), what=what))
    monkeypatch.setenv("PYTHONPATH", str(library))
    monkeypatch.setattr(module, "EXAMINE", "examination")
    boxes = Boxes.of_node(directory, Mode.AUTO)
    boxes.mode = mode
    return boxes


def test_a_driver_that_works_in_the_box_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = node(tmp_path, "nothing", monkeypatch)
    before = boxes.names
    boxes.prove("cuda:0")
    assert boxes.names == before and {"files", "syscalls"} <= set(before)


@pytest.mark.parametrize(("what", "without"), [("file", {"files"}), ("network", {"files", "syscalls", "capabilities"})])
def test_walls_that_it_does_not_bear_go_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str,
                                                     without: set[str]) -> None:
    boxes = node(tmp_path, what, monkeypatch)
    before = set(boxes.names)
    boxes.prove("cuda:0")
    assert set(boxes.names) == before - without
    reasons = {one.wall.name: one.reason for one in boxes.standing if isinstance(one, Standing) and not one.stands}
    assert {reasons[name] for name in without} == {"cuda:0 does not work behind it"}


def test_a_daemon_that_starts_again_examines_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy GPU each examination takes seconds, and the workers' lease runs meanwhile."""
    first = node(tmp_path, "file", monkeypatch)
    first.prove("cuda:0")
    examined: list[str] = []

    def again(walls: list[Standing] | None = None) -> Boxes:
        boxes = Boxes.of_node(first.directory, Mode.AUTO)
        boxes.standing = walls or boxes.standing
        works = boxes._works
        monkeypatch.setattr(boxes, "_works", lambda device: examined.append(device) or works(device))
        boxes.prove("cuda:0")
        return boxes

    assert again().names == first.names and not examined
    assert again().standing == first.standing
    strict = Boxes.of_node(first.directory, Mode.AUTO)
    strict.mode = Mode.STRICT
    with pytest.raises(Refused, match="cuda:0 works outside a box and in none"):
        strict.prove("cuda:0")
    fewer = [one for one in Boxes.of_node(first.directory, Mode.AUTO).standing if one.wall.name != "syscalls"]
    again(fewer)
    assert examined, "other walls were asked for"
    for damage in (b"{", b"[]", json.dumps({"cuda:0": 7}).encode(), json.dumps({"cuda:0": {"stood": 1}}).encode()):
        examined.clear()
        (first.directory / proven_walls.NAME).write_bytes(damage)
        assert again().names == first.names and examined
    examined.clear()
    monkeypatch.setattr(proven_walls, "boot_id", lambda: "another")
    again()
    assert examined, "the host was started anew"


def test_strict_does_not_go_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = node(tmp_path, "file", monkeypatch, Mode.STRICT)
    before = boxes.names
    with pytest.raises(Refused, match="cuda:0 works outside a box and in none"):
        boxes.prove("cuda:0")
    assert boxes.names == before


def test_a_device_that_does_not_work_outside_either_says_nothing_of_the_box(tmp_path: Path,
                                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = node(tmp_path, "miracle", monkeypatch)
    before = boxes.names
    boxes.prove("cuda:0")
    assert boxes.names == before and not list((boxes.directory / "homes").iterdir())


def test_the_real_examination_works_in_the_box(tmp_path: Path) -> None:
    directory = tmp_path / "nodes" / "a"
    directory.mkdir(parents=True)
    boxes = Boxes.of_node(directory, Mode.AUTO)
    assert boxes._works("cpu:0"), (directory / "box.log").read_text()
