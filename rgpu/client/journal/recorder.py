"""Recording a session: every call that its program publishes, and the digest of every answer it is given.

Unlike the journal that is kept for recovery, a recording is never cut. It is
written in the session's loop, so the program is slowed to the disk's speed. If
the disk fails the recording ends there, with a log line; the session goes on.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from rgpu.client.journal.cursor import Cursor
from rgpu.link.loggers import get_logger
from rgpu.session.journal.journal_file import JournalFileWriter
from rgpu.session.journal.recording import ANSWERS, ANSWERS_HEAD, SUFFIX, answer_line

if TYPE_CHECKING:
    from rgpu.client.journal.kept import Journal

log = get_logger(__name__)

PIECE = 16 << 20  #: bytes taken from the journal at once


class Recorder:
    """Recorder of one session. :meth:`take` is called after each read of the journal, before any run may be
    dropped.
    """

    def __init__(self, directory: Path, session: str) -> None:
        """Create DIRECTORY/SESSION.rgpuj and .answers. Raises OSError (FileExistsError: recorded before)."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = directory / f"{session.replace('/', '~')}{SUFFIX}"
        self._session = session
        self._writer: JournalFileWriter | None = JournalFileWriter(self.path, session)
        self._answers: BinaryIO = open(self.path.with_suffix(ANSWERS), "wb")  # noqa: SIM115 - closed by close()
        self._answers.write(ANSWERS_HEAD)
        self._cursor = Cursor(0, 0)
        self.error = ""  #: why the recording ended early

    def take(self, journal: Journal) -> None:
        """Write what was published since the last time."""
        if self._writer is None:
            return
        if self._cursor.number < journal.first_number:  # the run at the cursor was dropped
            self._cursor = Cursor(journal.first_number, 0)
        count = journal.last_seq - self._writer.next_seq + 1
        if count <= 0:
            return
        pieces = []
        while taken := journal.take(self._cursor, PIECE):
            pieces.extend(taken)
        try:
            self._writer.append_packed(pieces, self._writer.next_seq, count)
        except (OSError, ValueError) as error:
            self._fail(str(error))

    def answered(self, seq: int, digest: bytes) -> None:
        """Record the digest of an answer that the program is given."""
        if self._writer is None:
            return
        try:
            self._answers.write(answer_line(seq, digest))
        except OSError as error:
            self._fail(str(error))

    def _fail(self, reason: str) -> None:
        self.error = reason
        log.error("the recording ends here", session=self._session, path=str(self.path), reason=reason)
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.abandon()
            except OSError:
                pass  # the failure is logged above

    def close(self) -> None:
        """Close the files of the recording: the session is over."""
        try:
            self._answers.close()
            if self._writer is not None:
                self._writer.close()
        except OSError as error:
            self._fail(str(error))
        self._writer = None
