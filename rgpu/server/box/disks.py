"""Whole disks below folders, as control groups name them: ``MAJOR:MINOR`` of the device, never of a partition.

The kernel bounds input and output of block devices (blk-throttle). A folder of a file system that lies on none, or
hides it (tmpfs, overlay, network file systems, btrfs), cannot be bounded, and the reason says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

BLOCK = Path("/sys/dev/block")
MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class Disks:
    """``numbers``: of the whole disks, each once. ``lacking``: why a folder has none, one sentence for each folder."""

    numbers: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()


def disks_of(folders: Iterable[Path], *, block: Path = BLOCK, mounts: Path = MOUNTS) -> Disks:
    """Find the whole disks that the folders lie on; one that is not there yet lies where its parent does."""
    numbers: dict[str, None] = {}
    lacking = []
    for folder in dict.fromkeys(_existing(folder) for folder in folders):
        try:
            device = folder.stat().st_dev
        except OSError as error:
            lacking.append(f"{folder} cannot be looked at: {error.strerror}")
            continue
        number = whole_disk(device, block)
        if number:
            numbers[number] = None
        else:
            lacking.append(f"{folder} lies on {_kind(device, mounts)}, which shows no block device that could be "
                           "bounded")
    return Disks(tuple(numbers), tuple(lacking))


def whole_disk(device: int, block: Path = BLOCK) -> str:
    """Return ``MAJOR:MINOR`` of the disk that the device ``st_dev`` is, or is a partition of; empty for no disk."""
    entry = block / f"{os.major(device)}:{os.minor(device)}"
    try:
        found = entry.resolve(strict=True)
        if (found / "partition").exists():
            found = found.parent
        return (found / "dev").read_text().strip()
    except OSError:
        return ""


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next((one for one in (folder, *folder.parents) if one.exists()), folder)


def _kind(device: int, mounts: Path) -> str:
    """The kind of the file system, as the kernel's table of mounts has it."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        for line in mounts.read_text().splitlines():
            before, _, after = line.partition(" - ")
            if before.split()[2:3] == [wanted] and after:
                return after.split()[0]
    except OSError:
        pass
    return "a file system"
