"""``rgpu run`` with options that need no click, for a fast start.

Loading click and the parsers of the verb's forty options would take a large part of the start. So the options of
:data:`FLAGS` and :data:`VALUES` are read here; any other option, and any error in these, is left to
:mod:`rgpu.cli.sessions.run`, which gives them the same meaning. Both then start the program by
:mod:`rgpu.cli.sessions.starting`.
"""

from __future__ import annotations

import errno
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # used in annotations only; importing them would delay each start
    from collections.abc import Sequence
    from typing import Any, NoReturn

    from rgpu.client.run.launcher import Front

FLAGS = {"-q": "quiet", "--quiet": "quiet", "--lazy": "lazy", "--queue": "queue"}
VALUES = {f"--{name}": name for name in ("name", "memory", "pool", "host", "gpus")}


class PlainRun:
    """A parsed command line. ``values``: the options of :data:`VALUES` that were given."""

    def __init__(self, program: tuple[str, ...], flags: frozenset[str], values: dict[str, str]) -> None:
        self.program, self.flags, self.values = program, flags, values

    def run(self, begins_resident: bool = False) -> NoReturn:
        """Run the program, and exit as it does, or with the exit code of the verb's error.

        ``begins_resident``: start a resident for later runs, unless the settings forbid it.
        """
        try:
            self.carry_out(begins_resident=begins_resident)
        except SystemExit as end:
            _leave(end)

    def carry_out(self, *, front: Front | None = None, begins_resident: bool = False) -> NoReturn:
        """Run the program, and raise SystemExit where :meth:`run` exits. ``front``: as for :func:`launcher.run`."""
        from rgpu.session.errors import RgpuError

        try:
            self._start(front, begins_resident)
        except (RgpuError, OSError, KeyboardInterrupt) as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:  # the reader of the output has ended
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
    """End this process without the interpreter's finalization: the run has closed what it had opened.

    Files that are still being read ahead for the program are not waited for.
    """
    if isinstance(end.code, str):
        raise end
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None where this process was started without it
            try:
                stream.flush()
            except (OSError, ValueError):  # closed, or without a reader
                pass
    os._exit(end.code or 0)


def read(arguments: Sequence[str]) -> PlainRun | None:
    """Read a command line (without ``rgpu`` itself); None for one that needs click."""
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
