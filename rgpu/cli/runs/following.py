"""A program's output on stdout, byte for byte."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from rgpu.link.runs.folder import KnownRun
from rgpu.session.printable import printable


def show(pieces: Iterable[bytes]) -> None:
    """Write pieces to stdout; an empty one flushes it."""
    for piece in pieces:
        if piece:
            sys.stdout.buffer.write(piece)
        else:
            sys.stdout.buffer.flush()
    sys.stdout.buffer.flush()


def follow(run: KnownRun, tail: int | None, over: Callable[[], bool]) -> None:
    """Write a run's output as it arrives, until ``over()``."""
    show(run.output(tail).follow(over))


def lines(run: KnownRun, tail: int | None) -> list[str]:
    """Return a run's output as lines of text; bytes that are no text are escaped."""
    data = b"".join(run.output(tail).read())
    return [printable(line, keep="\t") for line in data.decode(errors="backslashreplace").splitlines()]
