"""``rgpu run`` with options that need no click: its start is waited for, each time.

click, and the verb's forty options with what reads them, would be a good part of the start. So the options of
:data:`FLAGS` and :data:`VALUES` are read here; any other one, and whatever is wrong with these, is left to
:mod:`rgpu.cli.sessions.run`, which means the same by them. Both then start the program by
:mod:`rgpu.cli.sessions.starting`.
"""

from __future__ import annotations

import errno
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # the names stand in annotations only, and are waited for at each start
    from collections.abc import Sequence
    from typing import Any, NoReturn

    from rgpu.client.run.launcher import Front

FLAGS = {"-q": "quiet", "--quiet": "quiet", "--lazy": "lazy", "--queue": "queue"}
VALUES = {f"--{name}": name for name in ("name", "memory", "pool", "host", "gpus")}


class PlainRun:
    """What was asked for. ``values``: of :data:`VALUES`, those that were given."""

    def __init__(self, program: tuple[str, ...], flags: frozenset[str], values: dict[str, str]) -> None:
        self.program, self.flags, self.values = program, flags, values

    def run(self, begins_resident: bool = False) -> NoReturn:
        """Run it, and exit as the program does, or as the verb does by its errors.

        ``begins_resident``: a resident is started for runs to come, unless the settings want none.
        """
        try:
            self.carry_out(begins_resident=begins_resident)
        except SystemExit as end:
            _leave(end)

    def carry_out(self, *, front: Front | None = None, begins_resident: bool = False) -> NoReturn:
        """Run it, and raise SystemExit as :meth:`run` exits. ``front``: as for :func:`launcher.run`."""
        from rgpu.session.errors import RgpuError

        try:
            self._start(front, begins_resident)
        except (RgpuError, OSError, KeyboardInterrupt) as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:  # who read our output has enough
                sys.exit(1)
            from rgpu.cli import common

            common.tell(error, pool=self.values.get("pool"))

    def _start(self, front: Front | None = None, begins_resident: bool = False) -> NoReturn:
        from rgpu.api.settings import Settings
        from rgpu.cli.sessions import starting

        quiet, queue = "quiet" in self.flags, "queue" in self.flags
        settings = Settings({"pool": self.values.get("pool"), "memory": self.values.get("memory"),
                             "quiet": quiet or None})
        more: dict[str, Any] = {"front": front}
        if begins_resident and settings.resident:
            from rgpu.cli.resident.beginning import begin

            more["started"] = lambda name, pid: begin(self.values.get("pool"), settings)
        starting.start(self.program, settings, starting.requested(self.values.get("host"), self.values.get("gpus"),
                                                                  queue=queue),
                       name=self.values.get("name"), lazy="lazy" in self.flags, **more)


def _leave(end: SystemExit) -> NoReturn:
    """End this process without taking the interpreter down piece by piece: the run has closed what it had opened.

    What was being read in for the program's sake is not waited for.
    """
    if isinstance(end.code, str):
        raise end
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # as where this process was started without
            try:
                stream.flush()
            except (OSError, ValueError):  # closed, or nobody reads
                pass
    os._exit(end.code or 0)


def read(arguments: Sequence[str]) -> PlainRun | None:
    """Read a command line (without ``rgpu`` itself); None for one that is not that plain."""
    if not arguments or arguments[0] != "run":
        return None
    flags, values = set(), {}
    at = 1
    while at < len(arguments):
        word = arguments[at]
        option, equals, value = word.partition("=")
        if word == "--":
            at += 1
            break
        if len(word) < 2 or word[0] != "-":
            break
        if word in FLAGS:
            flags.add(FLAGS[word])
        elif option in VALUES and equals:
            values[VALUES[option]] = value
        elif option in VALUES and at + 1 < len(arguments) and not arguments[at + 1].startswith("-"):
            at += 1
            values[VALUES[option]] = arguments[at]
        else:
            return None
        at += 1
    program = tuple(arguments[at:])
    return PlainRun(program, frozenset(flags), values) if program else None
