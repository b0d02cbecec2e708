"""A session of an earlier version of the package, as tests/previous/record.py left it."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rgpu.checkpoint.store.checkpoint_store import DirectoryStore, user_key, user_prefix, user_tag
from rgpu.client.data_link import connection as dl
from rgpu.client.session.delivery import AnswerAssembler
from rgpu.link.keys import KeyPair
from rgpu.link.messages.data import ANSWER, CALLS, PING, PONG
from rgpu.migrate.records.keys import session_key
from rgpu.migrate.records.schema import SessionRecord, decode
from rgpu.session.answers import answer_digest
from rgpu.session.journal.record import pack_record
from rgpu.session.journal.recording import Recording

FOLDER = Path(__file__).parents[1] / "previous"
VERSIONS = sorted(path.parent.name for path in FOLDER.glob("*/record"))
SESSION = "old"


@dataclass(frozen=True)
class Previous:
    """One version's session."""

    folder: Path
    record: SessionRecord
    secret: bytes
    calls: tuple[bytes, ...]  #: as they stand on the wire, the first is position 1
    answers: dict[int, bytes]  #: digests of what the program was given, by position
    kind: str  #: of the digests

    @classmethod
    def load(cls, version: str) -> Previous:
        folder = FOLDER / version
        recording = Recording(folder / f"{SESSION}.rgpuj")
        assert recording.verify().complete and recording.session == SESSION
        record = decode((folder / "record").read_bytes(), SessionRecord, session_key(SESSION))
        answers = recording.answers()
        return cls(folder, record, (folder / "secret").read_bytes(), tuple(pack_record(call) for call in recording),
                   answers.digests, answers.kind)

    @property
    def position(self) -> int:
        """Of the checkpoint."""
        assert self.record.checkpoint is not None
        return self.record.checkpoint.position

    def store(self) -> DirectoryStore:
        """The user's part of the checkpoints."""
        tag = user_tag(self.record.agent)
        return DirectoryStore(self.folder / "images" / user_prefix(tag), user_key(self.secret, tag))

    def key(self, path: Path) -> KeyPair:
        """The user's key from ``path``, where its mode is private (git keeps no such modes)."""
        path.write_bytes((self.folder / "keys" / "user.key").read_bytes())
        path.chmod(0o600)
        return KeyPair.load(path)


class Replayer:
    """What an agent does with a kept journal: attach to the owner, ship from where it wants it, take the answers."""

    def __init__(self, previous: Previous) -> None:
        self.previous = previous
        self.given: dict[int, bytes] = {}
        self.repeated = 0  #: answers that came again
        self._connection: Any = None
        self._next = self._offset = 0

    def attach(self, reply: dict[str, Any]) -> int:
        """``reply``: of session.owner with a ticket; the position that the worker wants next."""
        self.close()
        address = (str(reply["address"][0]), int(reply["address"][1]))
        self._connection, epoch, self._next = dl.attach(
            address, reply["ticket"], reply["secret"], SESSION, int(reply["epoch"]), len(self.previous.calls),
            "previous")
        assert epoch == reply["epoch"]
        self._offset = 0
        return self._next

    def ship(self, until: int) -> None:
        """Ship up to ``until`` and wait for everything that comes of it."""
        calls = self.previous.calls[self._next - 1:until]
        wanted = {seq for seq in self.previous.answers if self._next <= seq <= until}
        data = b"".join(calls)
        self._connection.send(CALLS, struct.pack("<Q", self._offset), data)
        self._connection.send(PING, struct.pack("<Q", until))
        self._offset += len(data)
        applied, assembler = 0, AnswerAssembler()
        while applied < until or wanted - set(self.given):
            kind, body = self._connection.recv(30.0)
            if kind == PONG:
                applied = max(applied, int.from_bytes(body[:8], "little"))
            elif kind == ANSWER and (answer := assembler.feed(memoryview(bytes(body)))) is not None:
                digest = answer_digest(answer.result, answer.reply, answer.payload, self.previous.kind)
                self.repeated += answer.seq in self.given
                assert self.given.setdefault(answer.seq, digest) == digest, f"another answer of {answer.seq}"
        self._next = until + 1

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
