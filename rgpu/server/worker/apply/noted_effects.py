"""Writes applied and answered positions to a log where a test requests it (:mod:`rgpu.session.effects`)."""

from __future__ import annotations

from rgpu.link.effects import EffectsLog
from rgpu.server.apply_path import ApplyPath
from rgpu.session.effects import Kind


class NotedEffects:
    """See the module docstring. Without a ``log`` nothing is written. ``epoch``: at which this worker applies."""

    def __init__(self, path: ApplyPath, epoch: int) -> None:
        self.log: EffectsLog | None = None
        self.epoch = epoch
        self._path = path

    def applying(self, seq: int) -> None:
        """Note that the record, which the path handed back, is applied next."""
        if self.log is not None and self._path.every_record:
            self.log.applying(self.epoch, seq)

    def fed(self) -> None:
        """Write the position that was reached."""
        if self.log is not None:
            self.log.reached(self.epoch, self._path.applied)
            self.log.flush()

    def answering(self, seq: int) -> None:
        """Note that the answer to that call is about to be sent."""
        if self.log is not None:
            self.log.reached(self.epoch, seq)
            self.log.note(Kind.ANSWERED, self.epoch, seq)

    def note(self, kind: Kind, note: str = "") -> None:
        """Note an event at the present position."""
        if self.log is not None:
            if kind not in (Kind.BEGUN, Kind.REBUILT):
                self.log.reached(self.epoch, self._path.applied)
            self.log.note(kind, self.epoch, self._path.applied, note)
