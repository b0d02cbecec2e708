"""What a worker may read and write of disks in a second."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rgpu.server.box import host
from rgpu.server.box.cgroups import Cgroups, IoBound
from rgpu.server.box.disks import disks_of, whole_disk
from rgpu.server.box.walls import WALLS, Mode, decide
from rgpu.server.node.workers import homes
from rgpu.server.node.workers.boxes import Boxes
from rgpu.session.errors import Refused, UsageError
from tests.support.eventually import eventually

RATE = 2 << 20
#: Writes 6 MiB past the page cache's delay, reads them past the page cache; prints how long each took.
WRITES_AND_READS = """
import mmap, os, sys, time
piece = mmap.mmap(-1, 1 << 20)
piece.write(b"x" * (1 << 20))
began = time.monotonic()
file = os.open(sys.argv[1] + "/file", os.O_CREAT | os.O_WRONLY, 0o600)
for _ in range(6):
    os.write(file, piece)
os.fsync(file)
wrote = time.monotonic()
file = os.open(sys.argv[1] + "/file", os.O_RDONLY | os.O_DIRECT)
while os.readv(file, [piece]):
    pass
print(wrote - began, time.monotonic() - wrote, flush=True)
"""


def node(folder: Path) -> Path:
    directory = folder / "nodes" / "a"
    directory.mkdir(parents=True)
    return directory


def seconds(boxes: Boxes) -> tuple[float, float]:
    """How long a program in a worker's place writes, and reads; its groups are gone afterwards."""
    home, output = homes.make(boxes.directory), boxes.directory / "output"
    output.unlink(missing_ok=True)
    process = boxes.execute([sys.executable, "-c", WRITES_AND_READS, str(home.path)], home, output)
    assert process.wait(120) == 0, output.read_text()
    boxes.release(home)
    wrote, read = map(float, output.read_text().split())
    return wrote, read


def test_what_a_worker_reads_and_writes_is_held_to_the_bound(tmp_path: Path) -> None:
    """6 MiB at 2 MiB a second take three; without a bound a disk that is worth the name needs a small part of it."""
    directory = node(tmp_path)
    lacking = host.missing(folders=[directory])
    if lacking.keys() & {"cgroup", "io"}:
        pytest.skip(str(lacking))
    bounded = Boxes.of_node(directory, Mode.AUTO, io=RATE)
    free = Boxes.of_node(directory, Mode.AUTO)
    assert "io" in bounded.names and "io" not in [one.wall.name for one in free.standing]
    slow, fast = seconds(bounded), seconds(free)
    assert slow[0] > 2 * fast[0] and slow[1] > 2 * fast[1], (slow, fast)
    eventually(lambda: not bounded.cgroups.left(bounded._prefix), "a group is left", within=20, every=0.05)


def unified(folder: Path, controllers: str) -> tuple[Cgroups, Path]:
    """Groups of a tree like that of version 2, of plain files, and the daemon's folder in it."""
    own = folder / "tree" / "rgpu.service"
    (own / "daemon").mkdir(parents=True)
    (own / "cgroup.controllers").write_text(controllers)
    (own / "cgroup.procs").write_text("")
    (own / "cgroup.subtree_control").write_text("")
    (own / "daemon" / "io.max").write_text("")
    (folder / "cgroup").write_text("0::/rgpu.service\n")
    return Cgroups.find("", root=folder / "tree", own=folder / "cgroup"), own


def test_version_2_is_asked_for_what_was_given_and_for_nothing_without(tmp_path: Path) -> None:
    groups, own = unified(tmp_path, "cpu io memory pids")
    groups.prepare(io=True)
    assert groups.io_reason == "" and (own / "cgroup.subtree_control").read_text() == "+memory +pids +io"
    groups.make("rgpu-a-1", 0, IoBound(RATE, ("254:0",)))
    assert (own / "rgpu-a-1" / "io.max").read_text() == f"254:0 rbps={RATE} wbps={RATE}"
    assert groups.group("rgpu-a-1").joins() == [str(own / "rgpu-a-1" / "cgroup.procs")]
    groups.make("rgpu-a-2", 0)
    assert not (own / "rgpu-a-2" / "io.max").exists()


def test_version_1_is_asked_in_a_tree_of_its_own(tmp_path: Path) -> None:
    """And a worker without a bound has no group there."""
    lines, names = [], ("memory", "pids", "blkio")
    for number, name in enumerate(names):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cgroup.procs").write_text("")
        lines.append(f"{number + 1}:{name}:/")
    (tmp_path / "own").write_text("\n".join(lines))
    groups = Cgroups.find("", root=tmp_path, own=tmp_path / "own")
    assert groups.io_reason == ""
    groups.prepare(io=True)
    assert "CONFIG_BLK_DEV_THROTTLING" in groups.io_reason
    groups = Cgroups.find("", root=tmp_path, own=tmp_path / "own")
    folder = tmp_path / "blkio" / "rgpu-a-1"
    folder.mkdir()
    (folder / "blkio.throttle.read_bps_device").write_text("")
    groups.make("rgpu-a-1", 0, IoBound(RATE, ("8:0",)))
    for name in ("blkio.throttle.read_bps_device", "blkio.throttle.write_bps_device"):
        assert (folder / name).read_text() == f"8:0 {RATE}"
    assert len(groups.group("rgpu-a-1").joins()) == 3
    groups.make("rgpu-a-2", 0)
    assert not (tmp_path / "blkio" / "rgpu-a-2").exists() and len(groups.group("rgpu-a-2").joins()) == 2


def test_a_controller_that_is_missing_takes_no_other_wall_down(tmp_path: Path) -> None:
    groups, own = unified(tmp_path, "memory pids")
    groups.prepare(io=True)
    assert groups.reason == "" and "the controller io is not in" in groups.io_reason
    assert (own / "cgroup.subtree_control").read_text() == "+memory +pids"
    missing = host.missing(groups)
    standing = {one.wall.name: one for one in decide(Mode.AUTO, {"io": missing["io"]}, users=False, asked=("io",))}
    assert standing["memory"].stands and not standing["io"].stands
    assert "the controller io is not in" in standing["io"].reason


def test_a_partition_is_bounded_by_its_disk_and_a_folder_without_one_is_named(tmp_path: Path) -> None:
    disk = tmp_path / "devices" / "vda"
    (disk / "vda1").mkdir(parents=True)
    (disk / "dev").write_text("254:0\n")
    (disk / "vda1" / "dev").write_text("254:1\n")
    (disk / "vda1" / "partition").write_text("1\n")
    block = tmp_path / "block"
    block.mkdir()
    (block / "254:0").symlink_to(disk)
    (block / "254:1").symlink_to(disk / "vda1")
    assert whole_disk(os.makedev(254, 1), block) == whole_disk(os.makedev(254, 0), block) == "254:0"
    assert whole_disk(os.makedev(0, 40), block) == ""
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mounts"
    mounts.write_text(f"31 1 {os.major(device)}:{os.minor(device)} / / rw - overlay overlay rw\n")
    found = disks_of([tmp_path / "not" / "there", tmp_path], block=tmp_path / "none", mounts=mounts)
    assert found.numbers == ()
    assert found.lacking == (f"{tmp_path} lies on overlay, which shows no block device that could be bounded",)


def test_shared_memory_is_no_disk() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    assert disks_of([Path("/dev/shm")]).lacking[0].startswith("/dev/shm lies on tmpfs")


def test_a_bound_that_was_not_asked_for_lacks_nowhere_and_one_that_was_is_refused_where_it_cannot_be(
        tmp_path: Path) -> None:
    names = {wall.name for wall in WALLS}
    assert names - {one.wall.name for one in decide(Mode.STRICT, {}, users=True)} == {"io"}
    with pytest.raises(UsageError, match="would not start in time"):
        Boxes.of_node(node(tmp_path), Mode.AUTO, io=1000)
    boxes = Boxes.of_node(tmp_path / "nodes" / "a", Mode.OFF, io=RATE)
    assert boxes.io is None and "io" not in boxes.names
    assert next(one.reason for one in boxes.standing if one.wall.name == "io") == "the node was started with --box off"
    if Path("/dev/shm").is_dir() and "root" not in host.missing() and "io" not in host.missing():
        with pytest.raises(Refused, match="io: /dev/shm lies on tmpfs"):
            Boxes.of_node(Path("/dev/shm"), Mode.STRICT, users=(60000, 60001), io=RATE)
