"""A control group for each worker: its memory, its tasks and, where asked for, its input and output are bounded, and
what it does ends with it (cgroups(7)).

Version 2 where the host has its controllers there, else version 1. The daemon needs a group in which it may make
others: one that was delegated to it (systemd: ``Delegate=yes``), or root's. In version 2 a group with children has no
processes of its own, so the daemon first goes into ``daemon`` below it; that fails where it shares its group with
other processes, and then it says so. Input and output have a controller of their own, which may be missing while the
others are there.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from rgpu.session.errors import UsageError

ROOT = Path("/sys/fs/cgroup")
TASKS = 4096
REMOVE_SECONDS = 2.0
_CONTROLLERS = ("memory", "pids")  #: without which there are no groups
_IO = "io"  #: of version 2, and the key among folders in both
_EARLIER_IO = "blkio"  #: its name in version 1
#: Files of version 1 that bound bytes a second of one disk.
_EARLIER_BOUNDS = ("blkio.throttle.read_bps_device", "blkio.throttle.write_bps_device")


@dataclass(frozen=True, slots=True)
class IoBound:
    """``rate``: bytes a second, read and written each, of each of the ``disks`` (MAJOR:MINOR; :mod:`.disks`)."""

    rate: int
    disks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """One worker's. ``folders``: by controller; in version 2 all are the same."""

    folders: dict[str, Path] = field(default_factory=dict)

    def joins(self) -> list[str]:
        """Return the files to which a process writes itself to be in the group."""
        return [str(folder / "cgroup.procs") for folder in dict.fromkeys(self.folders.values())]

    def limit(self, memory: int) -> None:
        """Bound its memory, bytes; 0: no bound. Raises OSError."""
        folder = self.folders.get("memory")
        if folder is None:
            return
        if (folder / "memory.limit_in_bytes").exists():
            (folder / "memory.limit_in_bytes").write_text(str(memory or -1))
        else:
            (folder / "memory.max").write_text(str(memory or "max"))
            with contextlib.suppress(OSError):  # no swap to speak of: what is bounded is what it may have
                (folder / "memory.swap.max").write_text("0" if memory else "max")

    def bound(self, io: IoBound) -> None:
        """Bound what it reads and writes of disks. Raises OSError."""
        folder = self.folders[_IO]
        for disk in io.disks:
            if (folder / _EARLIER_BOUNDS[0]).exists():
                for name in _EARLIER_BOUNDS:
                    (folder / name).write_text(f"{disk} {io.rate}")
            else:
                (folder / "io.max").write_text(f"{disk} rbps={io.rate} wbps={io.rate}")

    def killed(self) -> int:
        """Return how many of its processes the kernel ended for lack of memory; 0 where nothing bounds it."""
        folder = self.folders.get("memory")
        if folder is None:
            return 0
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError, ValueError):
                for line in (folder / name).read_text().splitlines():
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        return 0

    def remove(self) -> None:
        """Remove it, once its processes have gone; what is left of them is ended."""
        until = time.monotonic() + REMOVE_SECONDS
        for folder in dict.fromkeys(self.folders.values()):
            with contextlib.suppress(OSError):
                (folder / "cgroup.kill").write_text("1")
            while True:
                try:
                    folder.rmdir()
                except FileNotFoundError:
                    pass
                except OSError:
                    if time.monotonic() < until:
                        time.sleep(0.02)
                        continue
                break


class Cgroups:
    """Makes the groups of a node's workers. ``reason``: why there are none; empty where there are.

    ``io_reason``: why they cannot bound input and output; empty where they can.
    """

    def __init__(self, parents: dict[str, Path], reason: str = "", *, unified: bool = True) -> None:
        self.parents, self.reason, self._unified = parents, reason, unified
        self.io_reason = reason or ("" if _IO in parents else (
            f"the controller io is not in {parents['memory']}/cgroup.controllers (systemd: Delegate=yes)" if unified
            and parents else "the controller blkio is not mounted, or its folder is not this user's"))

    @classmethod
    def find(cls, given: str, *, root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> Cgroups:
        """Look where this process may make groups. ``given``: a folder of version 2 that an operator names.

        Nothing is changed. Raises :class:`UsageError` for a folder that is no control group.
        """
        if given:
            folder = Path(given)
            if not (folder / "cgroup.procs").exists():
                raise UsageError(f"{given} is no control group (cgroup v2): it has no cgroup.procs")
            return cls(_controllers(folder), _cannot(folder))
        try:
            lines = [line.split(":", 2) for line in own.read_text().splitlines()]
        except OSError as error:
            return cls({}, f"{own} cannot be read: {error.strerror}")
        for number, _, path in lines:
            folder = root / path.lstrip("/")
            if number == "0" and (folder / "cgroup.controllers").exists():
                offered = (folder / "cgroup.controllers").read_text().split()
                if set(_CONTROLLERS) <= set(offered):
                    return cls(_controllers(folder), _cannot(folder))
        return cls._earlier(lines, root)

    @classmethod
    def _earlier(cls, lines: list[list[str]], root: Path) -> Cgroups:
        """In version 1: each controller has a tree of its own."""
        parents = {}
        for _, controllers, path in lines:
            for name in (*_CONTROLLERS, _EARLIER_IO):
                if name in controllers.split(","):
                    found = [folder for folder in (root / controllers / path.lstrip("/"), root / controllers)
                             if (folder / "cgroup.procs").exists()]
                    if found and os.access(found[0], os.W_OK):
                        parents[_IO if name == _EARLIER_IO else name] = found[0]
        if set(_CONTROLLERS) <= set(parents):
            return cls(parents, unified=False)
        return cls({}, "no control group in which this daemon may make others (systemd: Delegate=yes; or --cgroup)")

    def prepare(self, *, io: bool = False) -> None:
        """Make it possible to bound groups below (version 2). Sets :attr:`reason` where that fails.

        ``io``: input and output too; :attr:`io_reason` where they cannot be.
        """
        if self.reason:
            return
        if not self._unified:
            if io and not self.io_reason and not all((self.parents[_IO] / name).exists() for name in _EARLIER_BOUNDS):
                self.io_reason = "the kernel bounds no input and output (CONFIG_BLK_DEV_THROTTLING)"
            return
        folder = self.parents["memory"]
        try:
            leaf = folder / "daemon"
            leaf.mkdir(exist_ok=True)
            if str(os.getpid()) in (folder / "cgroup.procs").read_text().split():
                (leaf / "cgroup.procs").write_text(str(os.getpid()))
            (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in _CONTROLLERS))
        except OSError as error:
            self.reason = f"{folder} cannot be divided among workers: {error.strerror} (other processes in it?)"
            self.io_reason = self.io_reason or self.reason
            return
        if io and not self.io_reason:
            self._prepare_io(folder, leaf)

    def _prepare_io(self, folder: Path, leaf: Path) -> None:
        try:
            with (folder / "cgroup.subtree_control").open("a") as control:
                control.write(f" +{_IO}")
        except OSError as error:
            self.io_reason = f"the controller io cannot be given to groups below {folder}: {error.strerror}"
            return
        if not (leaf / "io.max").exists():
            self.io_reason = "the kernel bounds no input and output (CONFIG_BLK_DEV_THROTTLING)"

    def make(self, name: str, memory: int, io: IoBound | None = None) -> Group:
        """Make a group for one worker, bounded. ``memory``: bytes, 0: no bound. Raises OSError."""
        group = Group({controller: parent / name for controller, parent in self.parents.items()
                       if controller != _IO or io is not None})
        try:
            for folder in dict.fromkeys(group.folders.values()):
                folder.mkdir(exist_ok=True)
            (group.folders["pids"] / "pids.max").write_text(str(TASKS))
            group.limit(memory)
            if io is not None:
                group.bound(io)
            with contextlib.suppress(OSError):  # all of a worker's processes go together
                (group.folders["memory"] / "memory.oom.group").write_text("1")
        except OSError:
            group.remove()
            raise
        return group

    def group(self, name: str) -> Group:
        """Return the group of that name, as much of it as is there."""
        return Group({controller: parent / name for controller, parent in self.parents.items()
                      if (parent / name).is_dir()})

    def left(self, prefix: str) -> list[Group]:
        """Return the groups of that name's beginning that are there."""
        names = {path.name for parent in self.parents.values() for path in parent.glob(f"{prefix}*") if path.is_dir()}
        return [self.group(name) for name in sorted(names)]


def _controllers(folder: Path) -> dict[str, Path]:
    """Where in version 2 each controller is that workers need; ``io`` only where it is offered."""
    try:
        offered = (folder / "cgroup.controllers").read_text().split()
    except OSError:
        offered = []
    return dict.fromkeys((*_CONTROLLERS, *(name for name in (_IO,) if name in offered)), folder)


def _cannot(folder: Path) -> str:
    return "" if os.access(folder, os.W_OK) else f"{folder} is not this user's to divide (systemd: Delegate=yes)"
