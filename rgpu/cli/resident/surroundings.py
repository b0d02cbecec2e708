"""Surroundings of a process: a resident serves only runs whose surroundings are identical to its own at its start.

An agent that a resident forks has the resident's user, groups, limits, processors, control group and namespaces, not
those of `rgpu run`; and some variables act when an interpreter starts. So all of these are described as text; a
resident's socket is named by its checksum, and the agent compares the text itself before it does anything. An agent
takes over everything else from its run: environment, folder, umask, stderr.
"""

from __future__ import annotations

import os
import stat
import sys
from zlib import crc32

VERSION = 1  #: of the protocol between `rgpu run` and its agent
#: Variables that select the pool: each pool has a resident of its own, which ends with the pool's folder.
POOL_VARIABLES = ("RGPU_POOL", "RGPU_CONTEXT", "RGPU_CONFIG", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "HOME")
#: Variables that are read once, when a process starts or a module is imported.
EARLY_VARIABLES = ("GLIBC_TUNABLES", "LANG", "LANGUAGE", "TZ")
EARLY_PREFIXES = ("PYTHON", "LD_", "LC_", "MALLOC_", "OPENSSL_")
#: Variables of runs that no resident serves: a run within a run has the driver library in each process; the others are
#: for tests of single processes.
OWN_AGENT = ("RGPU_AGENT", "RGPU_EFFECTS", "RGPU_FAULT_FILE")
#: Lines of /proc/self/status that a process inherits and keeps.
_STATUS = (b"Uid:", b"Gid:", b"Groups:", b"Cap", b"NoNewPrivs:", b"Seccomp:", b"Cpus_allowed:", b"Mems_allowed:",
           b"THP_enabled:")
_FILES = ("cgroup", "limits", "oom_score_adj")
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")
LONGEST = 107  #: bytes of a Unix socket's path


def describe(pool: str | None) -> bytes:
    """Return the surroundings of this process as text, for a run with ``--pool`` ``pool``.

    Raises :class:`OSError` where they cannot be read, or the process is traced.
    """
    own = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    lines = [f"{VERSION}", sys.executable, own, f"pool {pool}", f"nice {os.getpriority(os.PRIO_PROCESS, 0)}"]
    root = os.stat("/")
    lines.append(f"root {root.st_dev} {root.st_ino}")
    for name in _NAMESPACES:
        lines.append(f"{name} {_inode(f'/proc/self/ns/{name}')}")
    lines += [f"{name}={os.environ.get(name)}" for name in (*POOL_VARIABLES, *sorted(filter(_early, os.environ)))]
    text = os.fsencode("\n".join(lines))
    for name in _FILES:
        text += b"\n" + _read(f"/proc/self/{name}")
    status = _read("/proc/self/status").splitlines(True)
    if b"TracerPid:\t0\n" not in status:  # a tracer follows all processes of a run, and would wait for its resident
        raise OSError("this process is traced")
    return text + b"".join([line for line in status if line.startswith(_STATUS)])


def kept() -> dict[str, str]:
    """Return the environment of a resident, without a run's other variables, which may be secret."""
    names = {*POOL_VARIABLES, "PATH", "TMPDIR", "XDG_RUNTIME_DIR"}
    return {name: value for name, value in os.environ.items() if name in names or _early(name)}


def folder() -> str:
    """Return the folder of this user's residents; :func:`usable` checks it."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isabs(runtime):
        return os.path.join(runtime, "rgpu-residents")
    return os.path.join(os.environ.get("TMPDIR") or "/tmp", f"rgpu-residents-{os.geteuid()}")


def usable(path: str) -> bool:
    """Whether the folder is usable: a directory, no link, of this user without access for others. False: it is missing.

    Raises :class:`PermissionError` for any other.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{path} is not this user's alone")
    return True


def socket_path(text: bytes) -> str:
    """Return where a resident of those surroundings listens. Raises :class:`OSError` where that is too long."""
    path = os.path.join(folder(), f"{crc32(text):08x}.sock")
    if len(os.fsencode(path)) > LONGEST:
        raise OSError(f"{path} is too long for a Unix socket")
    return path


def _early(name: str) -> bool:
    return name in EARLY_VARIABLES or name.startswith(EARLY_PREFIXES)


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:  # a kernel without that kind
        return 0


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(descriptor, 65536):
            parts.append(part)
    finally:
        os.close(descriptor)
    return b"".join(parts)
