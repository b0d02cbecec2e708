"""The record of a detached run, and the state of the run that follows from it. Pure.

One JSON object in ``run.json`` of the run's folder, written whole by the process that keeps the run (its supervisor;
the agent once that has died). Version 1; readers refuse other versions, longer files and fields of other types.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from rgpu.session.errors import Corrupt, VersionMismatch
from rgpu.session.printable import printable

VERSION = 1
LONGEST = 1 << 16  #: bytes of a record
_MOST_COMMAND = 4096  #: characters of the command line that are kept

Text = Annotated[str, Meta(max_length=4096)]
Pid = Annotated[int, Meta(ge=0, le=1 << 31)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process of the host. ``started``: proc(5), field 22, which tells it apart from a later one of the same pid."""

    pid: Pid = 0
    started: Annotated[str, Meta(max_length=32)] = ""


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Times in s since 1970; ``time_limit`` in s, 0: none; ``log_limit`` in bytes.

    ``host``, ``boot``: the machine and its boot; ``how``: means by which its supervisor was started. ``ended``: 0 while
    it runs. ``exit_code``: of the program, 128 + n after signal n; None: not known. ``reason``: why it ended.
    ``trouble``: what happened to its supervisor or agent.
    """

    rgpu_run: int = VERSION
    name: Annotated[str, Meta(min_length=1, max_length=63)]
    command: Text = ""
    pool: Text = ""
    folder: Text = ""
    host: Text = ""
    boot: Annotated[str, Meta(max_length=64)] = ""
    how: Text = ""
    begun: Seconds = 0.0
    program: Process = Process()
    agent: Process = Process()
    supervisor: Process = Process()
    log_limit: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    time_limit: Seconds = 0.0
    ended: Seconds = 0.0
    exit_code: Annotated[int, Meta(ge=0, le=255)] | None = None
    reason: Text = ""
    trouble: Text = ""


def shown_command(command: list[str]) -> str:
    """Return the command line for a record: bytes that are no text are escaped, a long one is cut."""
    return printable(" ".join(command))[:_MOST_COMMAND]


def encode(record: RunRecord) -> bytes:
    """Return the content of ``run.json``."""
    return msgspec.json.format(msgspec.json.encode(record)) + b"\n"


def decode(data: bytes, where: str) -> RunRecord:
    """Read a record. ``where``: its path, for the error. Raises :class:`Corrupt`, :class:`VersionMismatch`."""
    if len(data) > LONGEST:
        raise Corrupt(f"{where} is longer than {LONGEST} bytes: it is no record of a run", path=where, reason="length")
    try:
        version = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get("rgpu_run")
        if version is not None and bytes(version).strip() != b"%d" % VERSION:
            raise VersionMismatch(f"{where} is a record of version {bytes(version).decode()[:16]}, and version "
                                  f"{VERSION} is read here: look at it with the rgpu that wrote it", path=where)
        if version is None:
            raise Corrupt(f"{where} is no record of a run: it says no version", path=where, reason="version")
        return msgspec.json.decode(data, type=RunRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"{where} cannot be read: {error}", path=where, reason="record") from None


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a run, from the machine. ``kept``: a process holds its lock, its supervisor or the agent after it."""

    here: bool  #: it was started on this machine
    same_boot: bool
    kept: bool
    agent: bool  #: runs
    program: bool  #: runs


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of a run: ``running``, ``ended`` or ``unknown``, and why."""

    state: str
    reason: str

    @property
    def over(self) -> bool:
        """Whether its state will not change any more."""
        return self.state != "running"


def standing(record: RunRecord, facts: Facts) -> Standing:
    """Return the state of the run; its record alone does not show that a supervisor was killed."""
    trouble = f" ({record.trouble})" if record.trouble else ""
    if record.ended:
        return Standing("ended", record.reason + trouble)
    if not facts.here:
        return Standing("unknown", f"it was started on {record.host}: ask there")
    if not facts.same_boot:
        return Standing("unknown", "the host was restarted while it ran: its program has ended, how is not known")
    if facts.kept:
        return Standing("running", record.trouble)
    if facts.agent:
        return Standing("running", "its supervisor died; its agent goes on, and keeps its output in a moment")
    if facts.program:
        return Standing("running", "its supervisor and its agent died; its program goes on, without GPU and without "
                                   "output")
    return Standing("unknown", f"its supervisor died{trouble}; its program has ended, how is not known")
