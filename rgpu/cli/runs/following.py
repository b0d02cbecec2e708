"""A program's output on stdout, byte for byte."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from rgpu.link.runs.folder import KnownRun
from rgpu.link.runs.output import OutputReader
from rgpu.session.printable import printable


def reader(run: KnownRun, tail: int | None) -> OutputReader:
    """Return the run's output, or its last ``tail`` lines."""
    found = run.output()
    if tail is not None:
        found.seek_last(tail)
    return found


def show(pieces: Iterable[bytes]) -> None:
    """Write them out as they come."""
    for piece in pieces:
        if piece:
            sys.stdout.buffer.write(piece)
        else:
            sys.stdout.buffer.flush()
    sys.stdout.buffer.flush()


def follow(run: KnownRun, tail: int | None, over: Callable[[], bool]) -> None:
    """Write the output as it comes, until ``over()``."""
    show(reader(run, tail).follow(over))


def lines(run: KnownRun, tail: int | None) -> list[str]:
    """The output as lines of text: bytes that are none are written out."""
    data = b"".join(reader(run, tail).read())
    return [printable(line, keep="\t") for line in data.decode(errors="backslashreplace").splitlines()]
