"""Settings: the list of them, and where each value came from.

Precedence: command-line option, environment (``RGPU_<NAME>``), configuration
file, default. The file is TOML: ``$RGPU_CONFIG``, or ``rgpu/config.toml`` under
``$XDG_CONFIG_HOME`` (``~/.config``). ``rgpu config explain`` prints the result.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rgpu.api.contexts import LOCAL, Contexts
from rgpu.session.errors import UsageError

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


AUTO = -1  #: stands for a count that is determined automatically


def parse_size(text: str | int) -> int:
    """``"8GiB"``, ``"512M"``, ``"4096"`` → bytes (binary units). Raises :class:`UsageError`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", str(text).lower())
    if not match:
        raise UsageError(f"{text!r} is no size; write for example 512MiB, 8GiB or a number of bytes")
    return int(float(match.group(1)) * _UNITS[match.group(2)])


def parse_count(text: str | int) -> int:
    """Return a whole number, not negative. Raises :class:`UsageError`."""
    if not re.fullmatch(r"\s*\d{1,6}\s*", str(text)):
        raise UsageError(f"{text!r} is no number; write for example 2")
    return int(text)


#: Policies of :mod:`rgpu.server.node.workers.compute`.
POLICIES = ("shared", "always", "never")
#: Kinds of box of :mod:`rgpu.server.box.walls`.
BOXES = ("auto", "off", "strict")


def parse_warm_workers(text: str | int) -> int:
    """Return a number; :data:`AUTO` for ``auto``. Raises :class:`UsageError`."""
    if str(text).strip().lower() in ("auto", str(AUTO)):
        return AUTO
    return parse_count(text)


def parse_box(text: str) -> str:
    """Return the name of a kind of box. Raises :class:`UsageError`."""
    if text not in BOXES:
        raise UsageError(f"{text!r} is none of {', '.join(BOXES)}")
    return text


def parse_policy(text: str) -> str:
    """Return the name of a policy by which sessions are held to their shares. Raises :class:`UsageError`."""
    if text not in POLICIES:
        raise UsageError(f"{text!r} is none of {', '.join(POLICIES)}")
    return text


def parse_flag(text: str | bool) -> bool:
    """``on``/``off`` and their usual other spellings. Raises :class:`UsageError`."""
    if isinstance(text, bool):
        return text
    if text.lower() in ("on", "true", "yes", "1"):
        return True
    if text.lower() in ("off", "false", "no", "0"):
        return False
    raise UsageError(f"{text!r} is neither on nor off")


def parse_seconds(text: str | float) -> float:
    """``"500ms"``, ``"10s"``, ``"2.5"`` → seconds. Raises :class:`UsageError`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|)\s*", str(text).lower())
    if not match:
        raise UsageError(f"{text!r} is no duration; write for example 500ms or 10s")
    return float(match.group(1)) * {"ms": 0.001, "m": 60.0}.get(match.group(2), 1.0)


def parse_age(text: str | float) -> float:
    """``"15m"``, ``"12h"``, ``"7d"``, ``"0"`` → seconds. Raises :class:`UsageError`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|m|h|d|)\s*", str(text).lower())
    if not match:
        raise UsageError(f"{text!r} is no age; write for example 15m, 12h or 7d")
    return float(match.group(1)) * {"m": 60.0, "h": 3600.0, "d": 86400.0}.get(match.group(2), 1.0)


@dataclass(frozen=True)
class Setting:
    """One setting. ``parse`` turns text from the file or the environment into the value."""

    name: str
    default: Any
    parse: Any
    help: str


def _state_home() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "rgpu"


def journal_limit() -> int:
    """Return the default journal limit in bytes: 1/32 of this process's memory limit, 256 MiB to 4 GiB."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2, or "max"
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(4 << 30, max(256 << 20, total // 32 >> 20 << 20))


SETTINGS: tuple[Setting, ...] = (
    Setting("pool", lambda: str(_state_home() / "pool"), str, "the pool's directory (addresses and keys)"),
    Setting("context", lambda: "", str, "the context whose pool is meant (`rgpu context ls`)"),
    Setting("registry", lambda: "embedded", str, "the pool's registry: etcd://HOST:PORT,…/PREFIX?…, or embedded"),
    Setting("memory", lambda: 0, parse_size, "device memory of a session (its quota); 0: as --gpus says, else the "
            "pool's default (`rgpu pool status`): one GPU, 1 GiB on the cpu device"),
    Setting("quiet", lambda: False, parse_flag, "no line at the start of a run that says what it was given"),
    Setting("resident", lambda: True, parse_flag, "after a first plain `rgpu run` a process remains that starts the "
            "next ones faster"),
    Setting("resident_idle", lambda: 600.0, parse_age, "how long that process remains without a run"),
    Setting("recover", lambda: True, parse_flag, "keep the journal since the last checkpoint, to outlive a server"),
    Setting("journal_limit", journal_limit, parse_size, "journal kept in memory before it is spilled (default: 1/32 of "
            "the machine's memory, 256 MiB to 4 GiB)"),
    Setting("journal_dir", lambda: str(_state_home() / "journal"), str, "where a journal is spilled to"),
    Setting("runs_dir", lambda: str(_state_home() / "runs"), str, "detached runs: their records and output"),
    Setting("keep_runs", lambda: 50, parse_count, "detached runs that stay on record after their end, the newest ones"),
    Setting("log_limit", lambda: 64 << 20, parse_size, "bytes that are kept of the output of a detached run: the first "
            "quarter of it, and the end"),
    Setting("max_downtime", lambda: 10.0, parse_seconds, "longest pause that a move may cause"),
    Setting("store", lambda: "", str, "where checkpoints are: a directory or s3://BUCKET/PREFIX?endpoint=URL (default: "
                                      "the "
            "pool's directory)"),
    Setting("store_credentials", lambda: "", str, "file with the credentials of an object store (default: AWS_* "
            "variables); read by node daemons only"),
    Setting("keep_images", lambda: 3, int, "newest checkpoints of each session that stay when a new one is taken; 0: "
                                           "all"),
    Setting("checkpoint_bandwidth", lambda: 0, parse_size, "bytes/s that the checkpoints of a node may write together; "
            "0: no limit"),
    Setting("enforce_compute", lambda: "shared", parse_policy, "when a node holds sessions to their shares of a "
            "device's time: shared, always or never"),
    Setting("box", lambda: "auto", parse_box, "walls around workers: auto (what the host allows), off, strict (all)"),
    Setting("worker_uids", lambda: "", str, "FIRST-LAST: user ids not used otherwise, one for each worker of "
            "this host"),
    Setting("worker_memory", lambda: 0, parse_size, "host memory that a worker may have; 0: nearly all of the host's"),
    Setting("worker_io", lambda: 0, parse_size, "bytes a second that a worker may read, and write, of the node's "
            "disks; 0: no bound"),
    Setting("client_grace", lambda: 600.0, parse_age, "how long a client's host may be silent before its session is "
            "checkpointed and ended; a node's: for sessions that set none"),
    Setting("timeout", lambda: 30.0, parse_seconds, "how long a command waits for the pool"),
    Setting("spares", lambda: AUTO, parse_warm_workers,
            "warm workers for each device of a node; auto: "
            "as many as memory and processors allow, one at least"),
    Setting("log_level", lambda: "info", str, "debug, info, warning or error"),
)


@dataclass(frozen=True)
class Value:
    """A setting's value, and where it came from."""

    value: Any
    source: str  #: "option --pool", "environment RGPU_POOL", "file …", "default"


class Settings:
    """All settings, resolved once for a command."""

    def __init__(self, options: dict[str, Any] | None = None, environ: dict[str, str] | None = None, *,
                 contexts: bool = True) -> None:
        """``contexts``: whether a context may name the pool; False for operations on a pool of this machine.

        Raises :class:`UsageError`, and :class:`NotFound` for a context that does not exist.
        """
        environ = dict(os.environ) if environ is None else environ
        self.file, content = _read_file(environ)
        self._values: dict[str, Value] = {}
        for setting in SETTINGS:
            self._values[setting.name] = _resolve(setting, options or {}, environ, self.file, content)
        if contexts:
            self._values["pool"] = _pool(self._values["pool"], self._values["context"], environ)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name].value
        except KeyError:
            raise AttributeError(name) from None

    def given(self, name: str) -> bool:
        """Whether a source other than the default set it."""
        return self._values[name].source != "default"

    def explain(self) -> list[dict[str, Any]]:
        """Return every setting with its value and where it came from."""
        return [{"name": s.name, "value": self._values[s.name].value, "source": self._values[s.name].source,
                 "help": s.help} for s in SETTINGS]


def _read_file(environ: dict[str, str]) -> tuple[Path | None, dict[str, Any]]:
    named = environ.get("RGPU_CONFIG")
    base = Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    path = Path(named) if named else base / "rgpu" / "config.toml"
    try:
        there = path.exists()
    except PermissionError:  # another user's folder, for example where `runuser` kept HOME
        there = False
    if not there:
        if named:
            raise UsageError(f"RGPU_CONFIG names {path}, which does not exist")
        return None, {}
    import tomllib  # most users have no such file

    try:
        content = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path}: {error}") from error
    unknown = set(content) - {s.name for s in SETTINGS}
    if unknown:
        raise UsageError(f"{path}: unknown setting {sorted(unknown)[0]!r}; `rgpu config explain` lists them")
    return path, content


def _pool(directory: Value, context: Value, environ: dict[str, str]) -> Value:
    """The selected pool: the directory or context of the source with the higher precedence, else the current context.

    Raises :class:`UsageError` where both were named in the same source, :class:`NotFound`.
    """
    places = ("option", "environment", "file", "default")
    named, meant = (places.index(value.source.split()[0]) for value in (directory, context))
    known = Contexts(environ)
    if named == meant and directory.source != "default":
        raise UsageError(f"the pool's directory and a context are both named ({directory.source}, {context.source}): "
                         "name one of them")
    if meant < named:
        return Value(str(known.existing(context.value).root), f"context {context.value} ({context.source})") \
            if context.value != LOCAL else directory
    if directory.source == "default" and (current := known.current()):
        return Value(str(known.existing(current).root), f"context {current} (current)")
    return directory


def _resolve(setting: Setting, options: dict[str, Any], environ: dict[str, str], path: Path | None,
             content: dict[str, Any]) -> Value:
    if options.get(setting.name) is not None:
        return Value(setting.parse(options[setting.name]), f"option --{setting.name.replace('_', '-')}")
    variable = f"RGPU_{setting.name.upper()}"
    if environ.get(variable):
        return Value(setting.parse(environ[variable]), f"environment {variable}")
    if setting.name in content:
        return Value(setting.parse(content[setting.name]), f"file {path}")
    return Value(setting.default(), "default")
