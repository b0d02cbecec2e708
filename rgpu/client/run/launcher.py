"""``rgpu run``: the program with our driver library in front, and the agent beside it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from rgpu.client.detached.time_limit import Ending, Timekeeper, TimeLimit, clock
from rgpu.client.run.agent import Agent, Options
from rgpu.client.run.signals import die_by, install, put_back
from rgpu.link import versions
from rgpu.link.control import ControlClient
from rgpu.link.description import MOST, named, remember
from rgpu.link.keys import Endpoint, KeyPair, PoolFiles
from rgpu.link.local.promptness import keep_prompt
from rgpu.link.loggers import get_logger
from rgpu.session.errors import (
    AlreadyExists,
    NotFound,
    PoolUnavailable,
    RanksMissing,
    Refused,
    RgpuError,
    UsageError,
)
from rgpu.session.printable import printable
from rgpu.session.run_environment import POOL, SESSION

if TYPE_CHECKING:
    from rgpu.client.detached.standby import Standby

log = get_logger(__name__)

DRIVER = "libcuda.so.1"
COLLECTIVES = "libnccl.so.2"
LIST = "RGPU_LIST"  #: set for programs of a gang: their devices are the run's list
CUPTI = ("libcupti.so.12", "libcupti.so.13")  #: by the CUDA version that a program was built with
SPLITS = re.compile(r"[\s:;]")  #: what ends a path in LD_PRELOAD or LD_LIBRARY_PATH
NOT_FOUND, NOT_EXECUTABLE = 127, 126  #: exit codes, as shells use them


class Front(Protocol):
    """`rgpu run` in front of an agent that is another process (``rgpu.cli.resident``): it starts the program, as its
    parent."""

    pid: int

    def place(self, agent: Agent, program: str) -> int:
        """Make the session; return 0, or minus a signal that came before. Raises the pool's refusal."""

    def run(self, command: Sequence[str], environ: dict[str, str], agent: Agent,
            started: Callable[[int], None]) -> int:
        """Have the program run; return its exit code, or minus the signal."""

    def die_by(self, number: int) -> None:
        """Have `rgpu run` end by the signal that ended the program."""


def shim_directory() -> Path:
    """Return the folder of rgpu's driver library. Raises :class:`NotFound`. ``RGPU_SHIM_DIR`` overrides it."""
    directory = Path(os.environ.get("RGPU_SHIM_DIR") or Path(__file__).parents[1] / "lib").resolve()
    if not (directory / DRIVER).exists():
        raise NotFound(f"{directory / DRIVER} does not exist: install rgpu ('pip install .'), which builds it",
                       path=str(directory))
    return directory


def environment(base: Mapping[str, str], library: Path, agent: Path, driver_version: int | None = None,
                several: bool = False, ranks: bool = False, members: int = 0) -> dict[str, str]:
    """Return the program's environment; the user's settings are kept, behind those of rgpu.

    ``driver_version``: as cuDriverGetVersion; the shim answers it before it has a session.
    ``several``: the session has more than one GPU. ``ranks``: its processes are a gang's ranks, whose NCCL cannot
    be the program's own, which would share memory between them. ``members``: how many members of a gang the run has;
    a process that is no rank may use all of them, for which it needs the routing library, and NCCL by calls.
    """
    result = dict(base)
    result.pop(LIST, None)  # of a gang that this run is started within
    if members:
        result[LIST] = str(members)
    library = loadable(library, agent.parent)
    folder = library / "router" if members > 1 and not ranks else library
    driver = str(folder / DRIVER)
    paths = str(library) if folder == library else f"{folder}:{library}"
    result["LD_LIBRARY_PATH"] = _join(paths, base.get("LD_LIBRARY_PATH"), ":")
    nccl = library / "nccl" / COLLECTIVES  # where it is not installed, the loader would complain at each start
    # rgpu's CUPTI is loaded first: PyTorch's wheels name the folder of NVIDIA's (DT_RPATH), which takes precedence over
    # every path here, but not over a library of that name which is loaded already.
    first = [driver, *(str(library / name) for name in CUPTI if (library / name).exists())]
    if base.get("RGPU_NCCL", "calls" if ranks or folder != library else "own") == "calls" and nccl.exists():
        first.append(str(nccl))
    # Of a run that this one is started within, no driver library stays: the loader would take it for a second one.
    others = [name for name in (base.get("LD_PRELOAD") or "").split(":") if name and Path(name).name != DRIVER]
    result["LD_PRELOAD"] = ":".join([*first, *others])
    result["RGPU_AGENT"] = str(agent)
    if driver_version is not None:
        result["RGPU_DRIVER_VERSION"] = str(driver_version)
    result["NUMBA_CUDA_DRIVER"] = driver  # the file
    result["TRITON_LIBCUDA_PATH"] = str(folder)  # the directory, which Triton gives its compiler with -L
    # This machine has no PCI tree to look GPUs up in, so NCCL takes them to be far apart and would fall back to host
    # memory that GPU and CPU poll together, which cannot work here. With this it tries peer access first, which works
    # or fails with a reason.
    result.setdefault("NCCL_P2P_LEVEL", "SYS")
    if several:  # between devices of one process it would map one handle at two addresses; without, it uses pointers
        result.setdefault("NCCL_CUMEM_ENABLE", "0")
    # The path in which compilers started by the program look for -lcuda: inductor's C++ wrapper, cpp extensions.
    link = library / "link"  # installed; in a folder of a build, libcuda.so is a link
    result["LIBRARY_PATH"] = _join(str(link if link.exists() else library), base.get("LIBRARY_PATH"), ":")
    return result


def loadable(library: Path, folder: Path) -> Path:
    """Return the directory under a path that the loader accepts: a link in ``folder``, the agent's, if necessary."""
    if not SPLITS.search(str(library)):
        return library
    link = folder / "lib"
    if SPLITS.search(str(link)):
        raise UsageError(f"programs cannot be given the driver library: white space, a colon or a semicolon is in "
                         f"{library} and in {folder}; set TMPDIR to a folder without")
    with contextlib.suppress(FileExistsError):
        link.symlink_to(library)
    return link


def _join(first: str, rest: str | None, separator: str) -> str:
    return first + separator + rest if rest else first


def default_name(command: Sequence[str]) -> str:
    """Return a name that no session of a large pool has: the program's, and eight hex digits.

    With four, one start of two hundred beside 300 sessions of that program was refused for a name nobody had chosen.
    """
    stem = Path(command[0]).name
    if stem.startswith("python") and len(command) > 1 and not command[1].startswith("-"):
        stem = Path(command[1]).stem
    clean = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in stem).strip("-._")[:40]
    return f"{clean or 'session'}-{secrets.token_hex(4)}"


def check_pool(keys: KeyPair, endpoints: Sequence[Endpoint], name: str,
               learned: Callable[[list[Endpoint]], None] = lambda living: None) -> None:
    """Check, before the program is started, that the pool answers, accepts the key, and that the name is free.

    ``learned``: called with the present endpoints of the nodes.

    Raises :class:`PoolUnavailable`, :class:`AuthenticationFailed`, :class:`AlreadyExists`,
    :class:`VersionMismatch`.
    """
    if not endpoints:
        raise PoolUnavailable("the pool has no node: start one with 'rgpu up'")
    with ControlClient(keys, endpoints) as client:
        reply = client.call("pool.ping", timeout=5.0)
        versions.check(reply.get("versions"), "the pool")
        learned(named(reply.get("endpoints")))
        try:
            found = client.call("session.owner", {"session": name}, timeout=5.0)
        except RgpuError:
            return  # not found, or unknown now: session.create decides
        if isinstance(found, dict) and found.get("state") not in (None, "ended", "failed"):
            raise AlreadyExists(f"a session named {name} is running: choose another name with --name, or end it with "
                                f"'rgpu kill {name}'", session=name)


def described(files: PoolFiles, pool: str) -> list[Endpoint]:
    """Return the endpoints that the description names now. Raises :class:`NotFound`, also for another pool's."""
    found = files.read_description()
    if found.id != pool:
        raise NotFound(f"{files.description_path} describes another pool by now", path=str(files.description_path))
    return found.endpoints


def write_down(files: PoolFiles, pool: str, living: list[Endpoint]) -> None:
    """Write the nodes' present endpoints into the description of that pool; another pool's stays as it is."""
    try:
        if living and files.read_description().id == pool:
            remember(files, living, most=None if (files.root / "nodes").exists() else MOST)
    except (OSError, RgpuError) as error:
        log.info("the pool's addresses are not written down", path=str(files.description_path), reason=str(error))


def run(command: Sequence[str], *, name: str | None = None, memory: int | None = None, pool: Path,
        recover: bool | None = None, journal_limit: int = 1 << 30, journal_dir: Path | None = None,
        on_full: str = "block", extra: dict[str, Any] | None = None, reraise: bool = False, record: Path | None = None,
        checkpoint_every: float = 0.0, max_replay: float = 0.0, divergence: str = "warn", same_host: bool = True,
        lazy: bool = False, quiet: bool = False,
        started: Callable[[str, int], None] = lambda name, pid: None, limit: TimeLimit | None = None,
        standby: Standby | None = None, front: Front | None = None) -> int:
    """Run ``command`` on sessions of the pool; return its exit code, 128 + n when signal n ended it.

    The first session is made before the program starts, which does not start if it is refused; ``lazy``: with the
    program's first CUDA call. ``started``: called with the run's name and the program's pid once it runs. ``limit``:
    time limit. ``standby``: of a detached run. ``front``: runs the program, where this process does not; neither limit
    nor standby then.

    ``reraise``: end this process by that signal too, as a shell expects it. ``record``, ``checkpoint_every``,
    ``max_replay``, ``divergence``, ``same_host``, ``quiet``: see :class:`rgpu.client.run.agent.Options`.
    Raises :class:`RgpuError` for errors before the program starts, :class:`RanksMissing` after it.
    """
    if not command:
        raise UsageError("nothing to run: rgpu run [options] -- COMMAND …")
    files = PoolFiles(pool)
    keys = KeyPair.load(files.key_for("user"))
    description = files.read_description()
    endpoints = description.endpoints
    library = shim_directory()
    if not lazy and (cannot := _cannot_start(command[0])):
        return cannot
    name = name or default_name(command)

    def learned(living: list[Endpoint]) -> None:
        write_down(files, description.id, living)

    check_pool(keys, endpoints, name, learned)
    options = Options(name, memory, recover, journal_limit, journal_dir, on_full, extra or {}, record,
                      checkpoint_every, max_replay, divergence, same_host, quiet, front.pid if front else os.getpid())
    keep_prompt()
    agent = Agent(options, keys, endpoints, complain=_complain, described=lambda: described(files, description.id),
                  learned=learned)
    place: Callable[[Agent, str], int] = front.place if front else _place
    try:
        agent.start()
        status = 0 if lazy else place(agent, shutil.which(command[0]) or command[0])
        if not status:
            gang = (extra or {}).get("gang")
            several = float((extra or {}).get("gpus") or 1) > 1 or gang is not None
            environ = environment(os.environ, library, agent.socket_path, _driver_version(agent), several,
                                  gang is not None and not gang.get("spread"), agent.members)
            environ |= {SESSION: name, POOL: str(files.root.resolve())}
            if front:
                status = front.run(command, environ, agent, lambda pid: started(name, pid))
            else:
                status = _run_child(command, environ, agent, lambda pid: started(name, pid), limit or TimeLimit(),
                                    standby)
        agent.child_exited(status if status >= 0 else 128 - status)
        if standby is not None:
            code = RanksMissing.exit_code if agent.missing else status if status >= 0 else 128 - status
            standby.exited(code, agent.why or _how(status))
        if agent.missing:
            raise RanksMissing(agent.missing)
    finally:
        agent.close()
        if standby is not None:
            standby.close()
    if status < 0 and reraise:
        (front.die_by if front else die_by)(-status)
    return status if status >= 0 else 128 - status


def _cannot_start(program: str) -> int:
    """Return the exit code for a program that cannot be executed, after telling the user; 0 for any other."""
    if shutil.which(program):
        return 0
    path = Path(program)
    there = "/" in program and path.exists()
    print(f"rgpu: {program}: " + (f"{os.strerror(errno.EISDIR if path.is_dir() else errno.EACCES)}" if there
                                  else "not found"), file=sys.stderr)
    return NOT_EXECUTABLE if there else NOT_FOUND


def _place(agent: Agent, program: str) -> int:
    """Make the session; return 0, or minus a signal that came before. Raises the pool's refusal."""
    came: list[int] = []
    old = install(lambda number, frame: came.append(number), lambda: came.append(signal.SIGINT))
    try:
        agent.place(program, lambda: signal.Signals(came[0]).name if came else "")
    except Refused:
        if not came:
            raise
    finally:
        put_back(old)
    return -came[0] if came else 0


def _complain(line: str) -> None:
    """Print a line to the user, whose text may be the pool's or another user's."""
    with contextlib.suppress(OSError):  # a terminal that was closed
        print(printable(line, keep="\n"), file=sys.stderr, flush=True)


def _driver_version(agent: Agent) -> int | None:
    """Return the driver version of the device that the pool would choose now; None if there is none to choose."""
    try:
        return agent.observer.candidate().facts.driver_version
    except RgpuError as error:
        log.info("no device is known before the program starts", reason=error.message)
        return None


def _how(status: int) -> str:
    """Return how a program ended, by its status."""
    return f"its program ended with exit code {status}" if status >= 0 else \
        f"its program was ended by {signal.Signals(-status).name}"


def _run_child(command: Sequence[str], environ: dict[str, str], agent: Agent, started: Callable[[int], None],
               limit: TimeLimit, standby: Standby | None) -> int:
    """Run the child and return its status: its exit code, or minus the signal.

    A detached child leads a process group, and has no terminal.
    """
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        elif child.returncode is None:
            child.send_signal(number)

    old = install(forward, agent.interrupted)
    try:
        try:
            begun = clock()
            child = subprocess.Popen(list(command), env=environ) if standby is None else subprocess.Popen(
                list(command), env=environ, stdin=subprocess.DEVNULL, stdout=standby.output, stderr=standby.output,
                process_group=0)
        except FileNotFoundError:
            print(f"rgpu: {command[0]}: not found", file=sys.stderr)
            return NOT_FOUND
        except OSError as error:
            print(f"rgpu: {command[0]}: {error.strerror}", file=sys.stderr)
            return NOT_EXECUTABLE
        agent.child_started(child.pid)
        if standby is not None:
            standby.started(child.pid)
        started(child.pid)
        for number in early:
            child.send_signal(number)
        timekeeper = Timekeeper(limit, child.pid, begun, agent.ends_by)
        timekeeper.start()
        ending = Ending(child.pid)
        agent.end_program = ending.now
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # its pid is not used again until it was waited for
        timekeeper.stop()
        ending.stop()
        timekeeper.await_rest()  # a shell ends at once: its children may be writing their checkpoints
        return child.wait()
    finally:
        put_back(old)
