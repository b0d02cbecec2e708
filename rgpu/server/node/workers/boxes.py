"""The boxes of a node's workers: the walls around each, made when it is started and removed when it has ended.

No state is kept here: a home's owner is its worker's user, and its name that of the worker's control group. So a
restarted daemon finds all boxes again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from rgpu.server.address_layout import fixed_in_children
from rgpu.server.box import host, launch, mounts
from rgpu.server.box.cgroups import Cgroups, Group, IoBound
from rgpu.server.box.disks import disks_of
from rgpu.server.box.environment import worker_environment
from rgpu.server.box.places import worker_places
from rgpu.server.box.walls import Mode, Standing, check, decide
from rgpu.server.device.mps import PIPES
from rgpu.server.node.workers import proven_walls
from rgpu.server.node.workers.homes import Home, all_of, forget_old, make, prune
from rgpu.server.template import forking
from rgpu.server.template.forking import NotForked, Templates, WorkerProcess
from rgpu.server.worker.entered_box import TOKEN
from rgpu.session.errors import Refused, UsageError

log = structlog.get_logger(__name__)

_LAUNCH = str(Path(launch.__file__))
EXAMINE = "rgpu.server.node.devices.examine"  #: a program that reports whether a device works
PATIENCE = 60.0  #: seconds that it may take
LEAST_IO = 1 << 20  #: bytes/s; a lower bound keeps workers from starting
#: Sets of walls that a driver may not work behind, smallest first.
_HINDRANCES = (("files",), ("files", "syscalls", "capabilities"))


@dataclass
class Boxes:
    """See the module docstring. ``directory``: the node's; ``users``: (first, last) for workers, None: the daemon's.

    ``memory``: bytes that a worker may use, 0: no bound. ``io``: bound on reads and writes of the disks of its folders,
    as far as these can be bounded; None: no bound. ``store``: folder of checkpoints, if workers access it themselves;
    None: through the daemon.
    """

    directory: Path
    standing: Sequence[Standing]
    devices: tuple[str, ...] = ()
    store: Path | None = None
    cgroups: Cgroups = field(default_factory=lambda: Cgroups({}, "not asked for"))
    memory: int = 0
    users: tuple[int, int] | None = None
    io: IoBound | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    mps: Mapping[str, str] = field(default_factory=dict)  #: variables that make a worker a client of an MPS server
    before_kill: Callable[[int], None] | None = None  #: called, in a thread, with the pid of a worker to be killed
    driver_cache: bool = True
    mode: Mode = Mode.AUTO
    templates: Templates = field(default_factory=Templates)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of_node(cls, directory: Path, mode: Mode, *, users: tuple[int, int] | None = None, cgroup: str = "",
                memory: int = 0, io: int = 0, devices: tuple[str, ...] = (), store: Path | None = None) -> Boxes:
        """Make the boxes that this host permits. ``io``: bytes/s that a worker may read and write, 0: no bound.

        Raises :class:`Refused` for walls that ``strict`` requires and the host lacks, :class:`UsageError`.
        """
        if 0 < io < LEAST_IO:
            raise UsageError(f"--worker-io {io} is less than {LEAST_IO >> 20} MiB a second: a worker reads its own "
                             "libraries within that, and would not start in time")
        cgroups = Cgroups.find(cgroup) if mode != Mode.OFF else Cgroups({}, "not asked for")
        cgroups.prepare(io=bool(io))
        apart = mode == Mode.STRICT or users is not None  # workers share no folder that one could damage for others
        store = None if apart else store
        folders = [directory, *([store] if store is not None else [])]
        missing = host.missing(cgroups, folders)
        if users and "root" in missing:
            raise UsageError(f"--worker-uids needs more rights: {missing['root']}")
        standing = decide(mode, missing, users=users is not None, asked=("io",) if io else ())
        check(mode, standing)
        bound = IoBound(io, disks_of(folders).numbers) if io and not cgroups.io_reason else None
        return cls(directory, standing, devices, store, cgroups, memory, users, bound, driver_cache=not apart,
                   mode=mode)

    @property
    def names(self) -> list[str]:
        """Names of the walls that stand."""
        return [one.wall.name for one in self.standing if one.stands]

    def warn(self) -> None:
        """Log once which walls are missing, and why."""
        lacking = {one.wall.name: one.reason for one in self.standing if not one.stands}
        if lacking:
            log.warning("workers have no wall of some kinds", stands=self.names, lacking=lacking,
                        advice="docs/operators/box.md; `rgpu doctor` says what is missing")

    def prove(self, device: str) -> None:
        """Have the device examined inside the box; walls behind which its driver does not work are removed.

        Nothing changes where it does not work outside either. The result is kept for a daemon that starts again
        (:mod:`.proven_walls`). Raises :class:`Refused` where requested walls keep the driver from working.
        """
        asked = self.names
        stood = proven_walls.recall(self.directory, device, asked)
        if stood is not None and (self.mode != Mode.STRICT or stood == asked):  # `strict` accepts no fewer walls
            self._go_without(device, [name for name in asked if name not in stood])
            log.info("a device was examined in the box before", device=device, stands=self.names)
            return
        if self._find_out(device):
            proven_walls.keep(self.directory, device, asked, self.names)

    def _find_out(self, device: str) -> bool:
        """Examine the device with fewer walls each time; return whether it worked behind the rest (:meth:`prove`)."""
        outside = basic(self.directory)
        if self._works(device):
            return True
        if not outside._works(device):
            log.warning("whether a device works in a box cannot be told: it does not work outside either now",
                        device=device)
            return False
        whole = self.standing
        for fewer in _HINDRANCES:
            self.standing = whole
            self._go_without(device, fewer)
            if self.mode != Mode.STRICT and self._works(device):
                log.warning("a driver does not work in a box: workers go without some walls", device=device,
                            without=fewer, stands=self.names)
                return True
        self.standing = whole
        raise Refused(f"{device} works outside a box and in none that was asked for ({', '.join(self.names)}): start "
                      "the node with --box off, or without --worker-uids")

    def _go_without(self, device: str, names: Sequence[str]) -> None:
        """Remove walls behind which the device's driver does not work."""
        reason = f"{device} does not work behind it"
        self.standing = [Standing(one.wall, False, reason) if one.wall.name in names and one.stands else one
                         for one in self.standing]

    def _works(self, device: str) -> bool:
        """Whether the device does simple work for a process in a worker's box."""
        log.info("a device is examined", device=device, walls=self.names)  # `rgpu up` waits while this goes on
        home = make(self.directory)
        output = self.directory / "box.log"
        try:
            output.unlink(missing_ok=True)
            process = self.execute([sys.executable, "-m", EXAMINE, "--device", device], home, output)
            process.wait(PATIENCE)
            return bool(json.loads(output.read_text().splitlines()[-1])["worked"])
        except subprocess.TimeoutExpired:
            process.kill()
            return False
        except (OSError, ValueError, LookupError):
            return False
        finally:
            self.release(home)

    def spawn(self, arguments: Sequence[str], home: Home, log_path: Path, *, apart: bool = False) -> WorkerProcess:
        """Start a worker in its box, in a session of its own, logging to ``log_path``. Raises OSError.

        It is forked from the node's template (:mod:`rgpu.server.template`), or executed: for other kinds of devices,
        another environment than that of the template, and where none can be forked. ``apart``: it becomes no client of
        an MPS server.
        """
        kind = arguments[arguments.index("--device") + 1].partition(":")[0]
        arguments = ["--home", str(home.path), *arguments]
        environ, plan = self._plan(home, apart)
        if kind in forking.KINDS and not apart:
            common = {**worker_environment(self.environ, driver_cache=self.driver_cache), **self.mps}
            try:
                with open(log_path, "ab") as output:
                    return self.templates.fork(kind, common, plan, arguments, environ, output.fileno())
            except NotForked as error:
                log.warning("a worker is executed: that takes longer", reason=str(error))
        return self._execute([sys.executable, "-m", "rgpu.server.worker.main", *arguments], environ, plan, log_path)

    def execute(self, command: Sequence[str], home: Home, log_path: Path) -> subprocess.Popen[bytes]:
        """Start a program in a box of its own, as a worker is executed. Raises OSError."""
        return self._execute(command, *self._plan(home, apart=False), log_path)

    def _plan(self, home: Home, apart: bool) -> tuple[dict[str, str], dict[str, Any]]:
        """Make what the box needs on this host, and return (the worker's environment, the plan of its box)."""
        walls = self.names
        environ = worker_environment(self.environ, home.path, driver_cache=self.driver_cache)
        environ |= {PIPES: str(home.path)} if apart else self.mps  # no control daemon is there
        uid = gid = os.getuid()
        if "user" in walls:
            uid, gid = self._take_user(home)
        group = self._make_group(home) if "memory" in walls else Group()
        plan = {"walls": walls, "joins": group.joins(), "uid": uid, "gid": gid, "owner": os.getuid(),
                "places": worker_places(home.path, devices=self.devices, environ=environ, writable=self._shared(gid),
                                        driver_cache=self.driver_cache)}
        return environ | {TOKEN: home.token()}, plan

    @staticmethod
    def _execute(command: Sequence[str], environ: Mapping[str, str], plan: Mapping[str, Any], log_path: Path
                 ) -> subprocess.Popen[bytes]:
        environ = {**environ, launch.PLAN: json.dumps({**plan, "argv": list(command)})}
        with open(log_path, "ab") as output:
            process = _start([sys.executable, "-E", "-S", _LAUNCH], environ, output.fileno(),
                             own_processes="processes" in plan["walls"])
        threading.Thread(target=process.wait, name="reap", daemon=True).start()  # so that no zombie is left
        return process

    def release(self, home: Home, session_folder: Path | None = None) -> None:
        """Remove what was made for a worker that has ended: its group, its folder, its user. Raises nothing."""
        self._group(home).remove()
        home.clear()
        if session_folder is not None:
            prune(session_folder)
            forget_old(session_folder.parent)

    def sweep(self) -> None:
        """Remove control groups of this node's workers that have no home any more."""
        homes = {one.name for one in all_of(self.directory)}
        for group in self.cgroups.left(self._prefix):
            if next(iter(group.folders.values())).name.removeprefix(self._prefix) not in homes:
                group.remove()

    def killed_for_memory(self, home: Home) -> bool:
        """Whether the kernel killed the worker, or a part of it, because it reached its memory limit."""
        return self._group(home).killed() > 0

    # -- parts --------------------------------------------------------------------
    def _take_user(self, home: Home) -> tuple[int, int]:
        """A (user, group) with a user that no other worker of this host's nodes has. Raises :class:`Refused`."""
        assert self.users is not None
        first, last = self.users
        # Nodes of this pool on this host may share the range.
        with self._lock, open(self.directory.parent.parent / "worker-users.lock", "a") as others:
            fcntl.flock(others, fcntl.LOCK_EX)
            taken = {one.path.stat().st_uid for node in self.directory.parent.iterdir() for one in all_of(node)}
            free = next((uid for uid in range(first, last + 1) if uid not in taken), None)
            if free is None:
                raise Refused(f"all users of --worker-uids {first}-{last} have a worker")
            os.chown(home.path, free, first)
        return free, first

    def _shared(self, gid: int) -> list[Path]:
        """The folders that workers write to beside their own; owned by the workers' group, where they have one."""
        modules = self.directory / "modules"
        with contextlib.suppress(OSError):  # a full disk: workers have no cache then
            modules.mkdir(mode=0o700, parents=True, exist_ok=True)
            if gid != os.getgid():
                os.chown(modules, -1, gid)
                modules.chmod(0o2770)
        if self.store is not None:
            with contextlib.suppress(OSError):  # the process that writes there reports the error
                self.store.mkdir(mode=0o700, parents=True, exist_ok=True)
        return [modules, *([self.store] if self.store is not None else [])]

    def _group_name(self, home: Home) -> str:
        return f"{self._prefix}{home.name}"

    @property
    def _prefix(self) -> str:
        return group_prefix(self.directory)

    def _group(self, home: Home) -> Group:
        return self.cgroups.group(self._group_name(home))

    def _make_group(self, home: Home) -> Group:
        return self.cgroups.make(self._group_name(home), self.memory, self.io)


def group_prefix(directory: Path) -> str:
    """Return the name prefix of a node's control groups, unique also among equally named nodes of other pools."""
    return f"rgpu-{directory.name}-{hashlib.sha256(str(directory).encode()).hexdigest()[:8]}-"


def usual_memory() -> int:
    """Return the default bytes of memory of a worker: the host's, less what its daemon needs."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(max(total // 2, total - max(1 << 30, total // 20)))


def basic(directory: Path) -> Boxes:
    """Return the boxes of a node without options: only walls that need no rights and hinder no worker."""
    return Boxes(directory, decide(Mode.OFF, {}, users=False))


def _start(command: list[str], environ: Mapping[str, str], output: int, *, own_processes: bool
           ) -> subprocess.Popen[bytes]:
    """Start the command from a thread of its own: its children start without the namespaces that the thread left."""
    done: list[subprocess.Popen[bytes] | BaseException] = []

    def run() -> None:
        try:
            if own_processes:
                mounts.leave_processes()
            with fixed_in_children():
                done.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                             start_new_session=True, close_fds=True, env=dict(environ)))
        except BaseException as error:  # noqa: BLE001 - raised in the caller
            done.append(error)

    thread = threading.Thread(target=run, name="start-worker")
    thread.start()
    thread.join()
    if isinstance(done[0], BaseException):
        raise done[0]
    return done[0]


def parse_users(text: str) -> tuple[int, int] | None:
    """Return (first, last) of ``FIRST-LAST``; None for an empty text. Raises :class:`UsageError`."""
    if not text:
        return None
    first, _, last = text.partition("-")
    if not (first.isdigit() and last.isdigit() and 0 < int(first) <= int(last) < 2**32 - 1):
        raise UsageError(f"{text!r} is no range of users: FIRST-LAST, neither of them root")
    return int(first), int(last)


