"""A recorded session on disk: one journal file, or a folder of successive ones (docs/developers/journal.md).

Files that an agent leaves (``rgpu run --record``, a kept or spilled journal) are
read here as one sequence of calls. A recorded journal may have an answers file
beside it: text, a line ``POSITION DIGEST`` for each answer that the program was given,
below a line that names the format and the digest (:data:`ANSWERS_HEAD`).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rgpu.session.answers import BLAKE3, DIGEST_SIZE, XXH3, XXH3_LEAVES
from rgpu.session.errors import Corrupt, NotFound, VersionMismatch
from rgpu.session.journal.journal_file import JournalFileReader, JournalHeader, verify
from rgpu.session.journal.record import Record

SUFFIX = ".rgpuj"
ANSWERS = ".answers"
_ANSWER = re.compile(rb"([1-9][0-9]{0,18}) ([0-9a-f]{%d})" % (2 * DIGEST_SIZE))
#: Digests by the first line; files without one have BLAKE3.
HEADS = {f"rgpu answers {version} {kind}\n".encode(): kind for version, kind in ((2, XXH3), (3, XXH3_LEAVES))}
ANSWERS_HEAD = list(HEADS)[-1]  #: of new files
_HEADS = b"rgpu answers "
MAX_ANSWER_FILE = 1 << 30  #: bytes


@dataclass(frozen=True, slots=True)
class RecordedAnswers:
    """What an answers file holds. ``kind``: of the digests, as :class:`rgpu.session.answers.AnswerHash` takes it."""

    kind: str = XXH3_LEAVES
    digests: dict[int, bytes] = field(default_factory=dict)  #: by position


@dataclass(slots=True)
class RecordingReport:
    """Result of :meth:`Recording.verify`: every file is sound, and they follow one another."""

    path: str
    session: str
    first_seq: int
    last_seq: int
    records: int = 0
    record_bytes: int = 0
    payload_bytes: int = 0
    complete: bool = False  #: the last file was closed with a trailer
    torn_offset: int | None = None  #: in the last file, where its torn tail begins
    torn_bytes: int = 0
    answers: int = 0  #: digests in the answers file
    files: list[dict[str, Any]] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)  #: wire call → records

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


class Recording:
    """See the module docstring. Nothing is kept open between two uses."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the recording at ``path``. Raises :class:`NotFound` if it holds no journal, :class:`Corrupt` for files
        that do not belong together.
        """
        self.path = Path(path)
        if self.path.is_dir():
            found = sorted((_header(file).first_seq, file) for file in self.path.glob(f"*{SUFFIX}"))
            if not found:
                raise NotFound(f"{self.path} holds no journal files (*{SUFFIX})")
            self.files = [file for _, file in found]
        elif self.path.is_file():
            self.files = [self.path]
        else:
            raise NotFound(f"{self.path} does not exist")
        headers = [_header(file) for file in self.files]
        self.session, self.first_seq = headers[0].session, headers[0].first_seq
        for file, header in zip(self.files, headers, strict=True):
            if header.session != self.session:
                raise Corrupt(f"{file} is of session {header.session}, {self.files[0].name} of {self.session}",
                              offset=0, reason="session", path=str(file))

    def __iter__(self) -> Iterator[Record]:
        """Yield every record in order, up to the last file's torn tail. Raises :class:`Corrupt`.

        Arguments and payloads are views into the piece read; copy what is kept.
        """
        wanted = self.first_seq
        for number, file in enumerate(self.files):
            with JournalFileReader(file) as reader:
                self._follows(file, reader.header, wanted)
                yield from reader
                wanted = reader.last_seq + 1
                if reader.torn_offset is not None and number + 1 < len(self.files):
                    raise _torn(file, reader.torn_offset)

    def verify(self) -> RecordingReport:
        """Check every record of every file. Raises :class:`Corrupt` with path, offset and reason."""
        calls: Counter[str] = Counter()
        report = RecordingReport(str(self.path), self.session, self.first_seq, self.first_seq - 1)
        for number, file in enumerate(self.files):
            try:
                found = verify(file)
            except Corrupt as error:
                raise Corrupt(f"{file}: {error.message}", **{**error.detail, "path": str(file)}) from None
            if found.first_seq != report.last_seq + 1:
                raise _gap(file, found.first_seq, report.last_seq + 1)
            if found.torn_offset is not None and number + 1 < len(self.files):
                raise _torn(file, found.torn_offset)
            report.records += found.records
            report.record_bytes += found.record_bytes
            report.payload_bytes += found.payload_bytes
            report.last_seq, report.complete = found.last_seq, found.complete
            report.torn_offset, report.torn_bytes = found.torn_offset, found.torn_bytes
            report.files.append({"path": str(file), "first_seq": found.first_seq, "last_seq": found.last_seq})
            calls.update(found.calls)
        report.calls = dict(sorted(calls.items()))
        report.answers = len(self.answers().digests)
        return report

    def answers(self) -> RecordedAnswers:
        """Read the digests of the answers that the program was given; empty when none were recorded.

        Raises :class:`Corrupt` with the offset of the first bad line, :class:`VersionMismatch`; a torn last line is
        left out.
        """
        if self.path.is_dir():
            return RecordedAnswers()
        path = self.path.with_suffix(ANSWERS)
        try:
            with open(path, "rb") as file:
                data = file.read(MAX_ANSWER_FILE + 1)
        except FileNotFoundError:
            return RecordedAnswers()
        return parse_answers(data, str(path))

    @staticmethod
    def _follows(file: Path, header: JournalHeader, wanted: int) -> None:
        if header.first_seq != wanted:
            raise _gap(file, header.first_seq, wanted)


def parse_answers(data: bytes, path: str = "") -> RecordedAnswers:
    """Parse an answers file. ``path``: for messages. Raises :class:`Corrupt`, :class:`VersionMismatch`."""
    if len(data) > MAX_ANSWER_FILE:
        raise Corrupt(f"{path}: longer than {MAX_ANSWER_FILE} bytes", offset=MAX_ANSWER_FILE, reason="length")
    kind, at = BLAKE3, 0
    if any(head.startswith(data) for head in HEADS):
        return RecordedAnswers()  # its first line is torn
    if data.startswith(_HEADS):
        head = data[:data.find(b"\n") + 1]
        if head not in HEADS:
            raise VersionMismatch(f"{path} begins with {head[:80]!r}, this version of rgpu reads "
                                  f"{b' and '.join(HEADS)!r}", path=path)
        kind, at = HEADS[head], len(head)
    found = RecordedAnswers(kind)
    for line in data[at:].split(b"\n")[:-1]:  # behind the last newline: nothing, or a torn line
        match = _ANSWER.fullmatch(line)
        if match is None or int(match[1]) in found.digests:
            raise Corrupt(f"{path}: the line at offset {at} is no answer's digest, or its second", offset=at,
                          reason="answers", path=path)
        found.digests[int(match[1])] = bytes.fromhex(match[2].decode())
        at += len(line) + 1
    return found


def answer_line(seq: int, digest: bytes) -> bytes:
    """Format one line of an answers file."""
    return b"%d %s\n" % (seq, digest.hex().encode())


def _header(file: Path) -> JournalHeader:
    try:
        with JournalFileReader(file) as reader:
            return reader.header
    except Corrupt as error:
        raise Corrupt(f"{file}: {error.message}", **{**error.detail, "path": str(file)}) from None


def _gap(file: Path, first: int, wanted: int) -> Corrupt:
    return Corrupt(f"{file} begins with position {first}, where {wanted} should be", offset=0, reason="sequence",
                   seq=first, path=str(file))


def _torn(file: Path, offset: int) -> Corrupt:
    return Corrupt(f"{file} is torn at offset {offset}, and further files follow", offset=offset, reason="truncated",
                   path=str(file))
