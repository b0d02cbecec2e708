"""A session rebuilt on an unused device: from a state and its pages, or by a replay that a state ends."""

from __future__ import annotations

from collections.abc import Iterable

from rgpu.checkpoint.device import Device
from rgpu.checkpoint.manifest.state import SessionState
from rgpu.checkpoint.phases import Phases
from rgpu.checkpoint.session import restore
from rgpu.checkpoint.store.reader import StoredCheckpoint
from rgpu.server.apply_path import ApplyPath
from rgpu.server.collectives.contributions import Log
from rgpu.server.collectives.given import Given
from rgpu.server.worker.apply.apply_loop import EVER, ApplyLoop
from rgpu.server.worker.apply.executor import Executor
from rgpu.server.worker.apply.kept_answers import KeptAnswers
from rgpu.server.worker.apply.ordering import Ordering
from rgpu.server.worker.session_text import SessionText
from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_NAME
from rgpu.session.journal import issue_order
from rgpu.session.journal.apply_order import ApplyGate
from rgpu.session.objects.ahead import Ahead
from rgpu.session.objects.live import LiveObjects

_EVENT_CREATE = BY_NAME["event_create"].id

#: (address, size, bytes or None for zeros) of each run of pages, or an object that delivers them
Pages = Iterable[tuple[int, int, bytes | None]] | restore.Deliver | StoredCheckpoint


class Rebuilding:
    """See the module docstring."""

    def __init__(self, device: Device, path: ApplyPath, loop: ApplyLoop, executor: Executor, answers: KeptAnswers,
                 order: Ordering, text: SessionText, contributions: Log, given: Given) -> None:
        self._device, self._path, self._loop, self._executor = device, path, loop, executor
        self._answers, self._order, self._text = answers, order, text
        self._contributions, self._given = contributions, given

    def restore(self, state: SessionState, pages: Pages, mend: restore.Mend | None, phases: Phases | None,
                ahead: Ahead | None) -> None:
        """Become the session that ``state`` describes: see :meth:`.runtime.SessionRuntime.restore`."""
        self._contributions.restore(state.contributions)
        self._given.restore(state.given)
        objects, digests = (state.live, []) if ahead is None else ahead.lengthen(state.live)
        live = LiveObjects.from_dict(objects, digests)
        calls = live.structural_calls() if ahead is None else ahead.rest(live.structural_calls())
        self._executor.modules.places = live.variables()
        self._executor.textures.recovering = ahead is None
        try:
            restore.restore(self._device, state, calls, self._executor.replay, pages, mend, phases)
        finally:
            self._executor.modules.places = {}
            self._device.placed()
            self._given.rebuilt()
        self._executor.memory.premapped = []
        self._executor.streams.restored = state.position
        self._loop.live = live
        observable = self._answers.replace(state.answers)
        self._text.restore(state.printed)
        self._loop.gate = ApplyGate(state.position)
        self._loop.place.restored(state.position)
        self._path.position(state.position, observable)

    def make(self, ahead: Ahead) -> None:
        """Make objects of a session that may arrive, on an unused device. Raises :class:`RecoveryFailed`."""
        self._executor.modules.places = ahead.variables()
        restore.apply_calls(self._device, ahead.calls(), self._executor.replay)

    def replay(self) -> None:
        """Begin a replay: calls fed from now on were applied by another owner before, and wait where that owner waited.

        Their answers and printed text are not sent; :meth:`settle` replaces them by the owner's.
        """
        self._loop.gate = ApplyGate(self._path.applied, replay_until=EVER)
        self._text.discard()
        self._order.feed(issue_order.Replaying(self._path.applied))

    def settle(self, state: SessionState) -> None:
        """End the replay at ``state.position``: take answers, text, events and clock from the owner's state.

        Raises :class:`DeviceError`, :class:`Corrupt`.
        """
        device = self._device
        for record in self._loop.live.structural_calls():
            # An event that was recorded in the replay has its time by another clock: it is made anew.
            if record.call_id == _EVENT_CREATE:
                device.destroy_event(decoders.decode(record.call_id, record.args).event)
                self._executor.replay(record)
        present = device.event_states().keys()
        device.restore_event_states({event: when for event, when in state.events.items() if event in present})
        device.set_clock(state.clock)
        self._text.restore(state.printed)
        observable = self._answers.replace(state.answers)
        self._loop.gate = ApplyGate(state.position)
        self._path.position(state.position, observable)
        self._order.feed(issue_order.Settled(state.position))
