"""Channels between a supervisor and the agent below it: two pipes, the run's folder, and lines of JSON about the run.

The lines, through the pipe of ``--report-fd``: ``{"started": {"name", "pid"}}`` or ``{"refused": {error}}``, then
``{"ended": {"exit_code", "reason"}}``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rgpu.session.errors import UsageError


class Supervised(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's ends. Descriptors: ``output``: the writing end of the program's output, ``pump``: its reading end,
    ``life``: a pipe that closes with the supervisor, ``word``: for the run's end. ``root``: the folder of runs.
    """

    output: int
    pump: int
    life: int
    word: int
    root: str
    name: str

    def as_text(self) -> str:
        """Return the value of ``--supervised``."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def read(cls, text: str) -> Supervised:
        """Read the value of ``--supervised``. Raises :class:`UsageError`."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise UsageError(f"--supervised is for the supervisor of a detached run: {error}") from None

    def keep_private(self) -> None:
        """Make the descriptors not inheritable: the program is given the output only, as its own."""
        for fd in (self.output, self.pump, self.life, self.word):
            os.set_inheritable(fd, False)


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The run that a supervisor starts. ``report``: descriptor for the first line. ``arguments``: of `rgpu run`."""

    name: str
    root: str
    pool: str
    how: str
    log_limit: int
    report: int
    keep: int
    time_limit: tuple[float, float] = (0.0, 0.0)  #: seconds, and seconds from SIGTERM to SIGKILL
    arguments: list[str] = []


@dataclass(frozen=True, slots=True)
class Pipe:
    """A pipe whose ends no started process inherits unless it is given them."""

    reader: int
    writer: int

    @classmethod
    def make(cls) -> Pipe:
        """Create a pipe."""
        return cls(*os.pipe2(os.O_CLOEXEC))


def package_path() -> str:
    """Return the folder that this package is imported from."""
    return str(Path(__file__).parents[3])
