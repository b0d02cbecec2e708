"""A program's output in a bounded folder: its first quarter and its end, byte for byte, and what is missing is said."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest

from rgpu.link.runs.output import LEAST_LIMIT, OutputReader, OutputWriter, gap_line
from rgpu.session.errors import Corrupt

GAP = re.compile(rb"\nrgpu: (\d+) bytes of the output are left out here[^\n]*\n")


def kept(folder: Path) -> bytes:
    return b"".join(OutputReader(folder).read())


def bytes_of(seed: int, count: int) -> bytes:
    return random.Random(seed).randbytes(count)


@pytest.mark.parametrize("count", [0, 1, 100, LEAST_LIMIT // 8, LEAST_LIMIT // 2, LEAST_LIMIT])
def test_what_is_within_the_limit_is_kept_whole(tmp_path: Path, count: int) -> None:
    data = bytes_of(1, count)
    OutputWriter(tmp_path, LEAST_LIMIT).write(data)
    assert kept(tmp_path) == data


@pytest.mark.parametrize("seed", range(12))
def test_of_more_the_beginning_and_the_end_are_kept(tmp_path: Path, seed: int) -> None:
    """In pieces of any size, by writers one after the other as after a supervisor's death."""
    choose, limit = random.Random(seed), LEAST_LIMIT + 8 * seed
    data = bytes_of(seed, choose.randrange(limit + 1, 6 * limit))
    at = 0
    writer = OutputWriter(tmp_path, limit)
    while at < len(data):
        if choose.random() < 0.02:
            writer.close()
            writer = OutputWriter(tmp_path, limit)
            assert writer.position == at
        piece = data[at:at + choose.randrange(1, limit // 3)]
        writer.write(piece)
        at += len(piece)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= limit
    first, missing, last = GAP.split(kept(tmp_path))
    assert data.startswith(first) and len(first) == 2 * (limit // 8)
    assert data.endswith(last) and len(last) >= limit // 2
    assert len(first) + int(missing) + len(last) == len(data)


def test_a_writer_that_goes_on_keeps_to_the_limit(tmp_path: Path) -> None:
    for number in range(40):
        writer = OutputWriter(tmp_path, LEAST_LIMIT)
        writer.write(bytes_of(number, LEAST_LIMIT // 5))
        writer.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= LEAST_LIMIT


@pytest.mark.parametrize("text", [b"a\nb\nc\n", b"a\nb\nc", b"", b"\n\n\n", b"one line"])
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_the_last_lines(tmp_path: Path, text: bytes, count: int) -> None:
    OutputWriter(tmp_path, LEAST_LIMIT).write(text)
    reader = OutputReader(tmp_path)
    reader.seek_last(count)
    lines = text.splitlines(keepends=True)
    assert b"".join(reader.read()) == b"".join(lines[len(lines) - count:] if count < len(lines) else lines if count
                                               else [])


def test_the_last_lines_over_several_files(tmp_path: Path) -> None:
    lines = [b"%07d\n" % number for number in range(LEAST_LIMIT // 10)]
    OutputWriter(tmp_path, LEAST_LIMIT).write(b"".join(lines))
    reader = OutputReader(tmp_path)
    reader.seek_last(3000)
    assert b"".join(reader.read()) == b"".join(lines[-3000:])


def test_a_reader_goes_on_where_it_was(tmp_path: Path) -> None:
    writer, reader = OutputWriter(tmp_path, LEAST_LIMIT), OutputReader(tmp_path)
    writer.write(b"first ")
    assert b"".join(reader.read()) == b"first "
    writer.write(b"second")
    assert b"".join(reader.read()) == b"second" and b"".join(reader.read()) == b""
    writer.write(bytes(3 * LEAST_LIMIT))  # the reader was too slow
    found = b"".join(reader.read())
    assert GAP.search(found) and found.endswith(bytes(LEAST_LIMIT // 2))


def test_a_full_disk_loses_output_and_says_how_much(tmp_path: Path) -> None:
    writer = OutputWriter(tmp_path, LEAST_LIMIT)
    writer.write(b"before")
    writer.close()
    writer._room = 0
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):  # root may write anywhere: a file is in the way instead
        (tmp_path / f"output-{6:020d}").symlink_to("/dev/full")
    writer.write(b"lost")
    tmp_path.chmod(0o700)
    (tmp_path / f"output-{6:020d}").unlink(missing_ok=True)
    writer._room = 0
    writer.write(b"after")
    assert kept(tmp_path) == b"before" + gap_line(4) + b"after"


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"output-{0:020d}"
    {"link": lambda: path.symlink_to("/etc/passwd"), "fifo": lambda: os.mkfifo(path), "folder": path.mkdir}[kind]()
    with pytest.raises(Corrupt):
        kept(tmp_path)
