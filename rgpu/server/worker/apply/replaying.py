"""Replays a recorded session on a device, without its program, for its memory contents and its answers.

The same runtime that serves a session applies the records, all of them as a
replay: host functions stop nothing, memory is freed when nothing uses it. At chosen
positions the device is drained and a snapshot taken. Answers are compared with
the recorded digests; volatile ones never (SEMANTICS 5).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import blake3

from rgpu.checkpoint.device import Device
from rgpu.checkpoint.manifest import cut
from rgpu.checkpoint.session import snapshot
from rgpu.checkpoint.session.snapshot import Snapshot
from rgpu.checkpoint.store.checkpoint_store import DirectoryStore, write_checkpoint
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.session.answers import Divergence, answer_digest
from rgpu.session.calls.wire import BY_ID
from rgpu.session.errors import RecoveryFailed, TimedOut
from rgpu.session.journal.record import Record
from rgpu.session.journal.recording import Recording, RecordingReport

DRAIN_SECONDS = 600.0


@dataclass(slots=True)
class Replayed:
    """The result of a replay. ``error``: the sticky CUresult it ended with, 0 for none."""

    session: str
    position: int = 0
    seconds: float = 0.0
    error: int = 0
    error_detail: str = ""
    answers: int = 0
    answers_compared: int = 0
    answers_digest: str = ""  #: of all answers that are not volatile, in order
    snapshots: list[Snapshot] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)


class Replay:
    """One replay of ``recording`` on an unused device; :meth:`run` it once."""

    def __init__(self, recording: Recording, device: Device, source: str = "") -> None:
        """Verify it. Raises :class:`Corrupt` if it is damaged, :class:`RecoveryFailed` if its beginning is missing."""
        self.recording = recording
        self.report: RecordingReport = recording.verify()
        if self.report.first_seq != 1:
            raise RecoveryFailed(f"the journal begins with position {self.report.first_seq}: what was before it stands "
                                 "in a checkpoint, and without that nothing can be replayed", reason="not kept")
        #: every call through Python, whatever path the device has: each answer is compared
        self.runtime = SessionRuntime(recording.session, 1, device, native=False)
        self.runtime.text.discard()
        self._source = source
        self._calls: dict[int, int] = {}  #: position → call id
        self._digests: dict[int, bytes] = {}
        self._given = recording.answers()

    def run(self, positions: Iterable[int] = ()) -> Replayed:
        """Apply every record, with a snapshot behind each of ``positions`` and at the end.

        Positions behind the end are left out. Raises :class:`Corrupt`, :class:`TimedOut`.
        """
        runtime, last = self.runtime, self.report.last_seq
        stops = sorted({position for position in positions if 0 < position < last} | {last})
        runtime.attach(self._answered, last)
        result = Replayed(self.recording.session)
        records = iter(self.recording)
        began, spent = time.monotonic(), 0.0
        reached = 0
        for stop in stops:
            runtime.feed(self._noting(itertools.islice(records, stop - reached)))
            reached = stop
            if not runtime.device.drain(DRAIN_SECONDS):
                raise TimedOut(f"position {stop}: work was still running after {DRAIN_SECONDS:.0f} s", position=stop)
            looked = time.monotonic()
            result.snapshots.append(snapshot.take(runtime.device, runtime.session, stop, runtime.live, self._source))
            spent += time.monotonic() - looked
        result.position, result.seconds = reached, time.monotonic() - began - spent
        result.error, result.error_detail = runtime.executor.error, runtime.device.error_detail()
        self._compare(result)
        return result

    def write_checkpoint(self, store: Path, name: str) -> None:
        """Write the end state as checkpoint ``name`` into the directory ``store``. Raises :class:`StoreError` and the
        errors of a checkpoint's writer.
        """
        runtime = self.runtime
        state = cut.take(runtime.device, session=runtime.session, epoch=1, position=runtime.applied,
                         hash_key=runtime.hash_key, live=runtime.objects(), answers=runtime.answers(),
                         printed=runtime.text.state())
        write_checkpoint(DirectoryStore(store), name, runtime.device, state)

    def _noting(self, records: Iterator[Record]) -> Iterator[Record]:
        for record in records:
            self._calls[record.seq] = record.call_id
            yield record

    def _answered(self, seq: int, outcome: int, reply: bytes, payload: object) -> None:
        self._digests[seq] = answer_digest(outcome, reply, payload, self._given.kind)

    def _compare(self, result: Replayed) -> None:
        given = self._given.digests
        total = blake3.blake3()
        for seq, digest in sorted(self._digests.items()):
            call = BY_ID[self._calls[seq]]
            if call.volatile:
                continue
            total.update(seq.to_bytes(8, "little") + digest)
            if seq in given:
                result.answers_compared += 1
                if given[seq] != digest:
                    result.divergences.append(Divergence(
                        seq, call.name, f"the replay of {call.name} (position {seq}) gives another answer than the "
                                        "program was given"))
        result.answers, result.answers_digest = len(self._digests), total.hexdigest(length=16)
