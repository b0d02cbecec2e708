"""Programs and nodes of one machine on processors of their own, as on two hosts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--program-processors", type=int, default=0, metavar="N",
                        help="the first N for the program and its agent, the others for the nodes (0: all for all)")


class Processors:
    """``count``: of the first ones, for programs. What the calling thread starts runs where it runs itself."""

    def __init__(self, count: int) -> None:
        every = sorted(os.sched_getaffinity(0))
        if not 0 <= count < len(every):
            raise SystemExit(f"--program-processors {count}: there are {len(every)}")
        self.programs, self.nodes = (set(every[:count]), set(every[count:])) if count else (set(every), set(every))
        os.sched_setaffinity(0, self.nodes)

    @contextmanager
    def for_a_program(self) -> Iterator[None]:
        os.sched_setaffinity(0, self.programs)
        try:
            yield
        finally:
            os.sched_setaffinity(0, self.nodes)
