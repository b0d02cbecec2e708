"""Spills a journal as an agent does, and marks each file that is said to be written. usage: … ROOT"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rgpu.client.journal.spill import FiledRun, SpillJob, write_segment
from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_NAME
from rgpu.session.journal.record import Record, pack_record
from tests.support.disk.preloaded import mark

FILES, RUNS, CALLS = 5, 3, 7


def call(seq: int) -> bytes:
    """The call of a position, packed; some have payloads of several pages."""
    if seq % 4:
        args = decoders.encode_args("stream_synchronize", stream=seq)
        return pack_record(Record(seq, BY_NAME["stream_synchronize"].id, args, b"", 0, 2))
    args = decoders.encode_args("memcpy_h2d", destination=seq, stream=0)
    return pack_record(Record(seq, BY_NAME["memcpy_h2d"].id, args, bytes([seq % 256]) * (seq * 997 % 20_000 + 1), 0, 2))


@dataclass
class Run:
    """Some calls in memory, as the journal holds them until they are spilled."""

    first: int
    last: int

    @property
    def data(self) -> bytes:
        return b"".join(call(seq) for seq in range(self.first, self.last + 1))

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, offset: int, limit: int) -> list[Any]:
        return [self.data[offset:offset + limit]]


def job(number: int, folder: Path) -> SpillJob:
    first = 1 + number * RUNS * CALLS
    runs = [Run(at, at + CALLS - 1) for at in range(first, first + RUNS * CALLS, CALLS)]
    return SpillJob(tuple(runs), folder)  # type: ignore[arg-type]


def main() -> None:
    folder = Path(sys.argv[1]) / "journal"
    folder.mkdir(mode=0o700)
    kept = []
    for number in range(FILES):
        spilled = job(number, folder)
        file, error = write_segment(spilled, "demo/1")
        assert file is not None, error
        mark(f"spilled {number}")
        offset = file.start
        for run in spilled.runs:
            kept.append(FiledRun(run.first, run.last, file, offset, run.size))
            offset += run.size
        if number == 2:  # a checkpoint counts: the oldest file is not needed any more
            mark("cut 0")
            for filed in kept[:RUNS]:
                filed.drop()


if __name__ == "__main__":
    main()
