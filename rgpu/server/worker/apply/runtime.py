"""The session inside a worker: applies the journal to a device, can pause at a record, and holds the session's state.

Threads: one *applying* thread (the agent's link) calls :meth:`SessionRuntime.feed`; device
threads call back with answers; others call :meth:`SessionRuntime.quiesce` and :meth:`SessionRuntime.resume`
for a consistent snapshot. The parts: :mod:`.apply_loop`, :mod:`.boundary`, :mod:`.kept_answers`, :mod:`.rebuilding`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any

from rgpu.checkpoint.device import Device
from rgpu.checkpoint.manifest.state import SessionState
from rgpu.checkpoint.phases import Phases
from rgpu.checkpoint.session.restore import Mend
from rgpu.server.apply_path import ApplyPath
from rgpu.server.collectives.contributions import Log
from rgpu.server.collectives.given import Given
from rgpu.server.fast_path import FastPath
from rgpu.server.position_page import Place, PositionPage
from rgpu.server.worker.apply import quiescing
from rgpu.server.worker.apply.apply_loop import EVER, ApplyLoop
from rgpu.server.worker.apply.boundary import Boundary
from rgpu.server.worker.apply.executor import Executor
from rgpu.server.worker.apply.kept_answers import Deliver, KeptAnswers
from rgpu.server.worker.apply.noted_effects import NotedEffects
from rgpu.server.worker.apply.ordering import PILE_UP, SLOW, Ordering
from rgpu.server.worker.apply.rebuilding import Pages, Rebuilding
from rgpu.server.worker.apply.slow_path import SlowPath
from rgpu.server.worker.pulse import Pulse
from rgpu.server.worker.session_text import SessionText
from rgpu.server.worker.sharing.sharing import Sharing
from rgpu.session.answers import RetainedAnswers
from rgpu.session.effects import Kind
from rgpu.session.journal import issue_order
from rgpu.session.journal.apply_order import ApplyGate
from rgpu.session.journal.record import Record
from rgpu.session.objects.ahead import Ahead
from rgpu.session.objects.live import LiveObjects


class SessionRuntime:
    """See the module docstring. ``applied`` is the session's position: every call ≤ it was applied."""

    def __init__(self, session: str, epoch: int, device: Device, hash_key: bytes | None = None,
                 native: bool = True) -> None:
        """Make it. ``native``: use the device's own path for calls where it has one; else all go through Python."""
        self.session = session
        self.device = device
        self.hash_key = hash_key or secrets.token_bytes(32)
        #: the device's own path, which also keeps answers to be sent; None: there is none
        self.fast: FastPath | None = getattr(device, "fast_path", None) if native else None
        self.path: ApplyPath = self.fast if self.fast is not None else SlowPath(device)
        self.order = Ordering(device, self.path)  #: keeps a backlog in order
        self.pulse: Pulse | None = None  #: of the process, where it is a worker
        self.text = SessionText(getattr(device, "text", None))  #: text that kernels print
        #: called with every error before the program receives it; does not return where the hardware is at fault
        self.judge: Callable[[int], None] = lambda result: None
        self.executor = Executor(device, self._answered)
        self.effects = NotedEffects(self.path, epoch)
        self.boundary = Boundary(self.path.interrupt)
        self.kept = KeptAnswers(self.path)
        self.loop = ApplyLoop(device, self.path, self.executor, self.kept, self.order, self.boundary, self.text,
                              self.effects)
        self.executor.textures.epoch = lambda: self.epoch
        self.executor.textures.replayed = lambda seq: seq <= self.loop.gate.replay_until
        self.sharing = Sharing(session, lambda number, token: False, lambda: True, lambda peer: None,
                               lambda peer: None)  #: until :meth:`share`: there is no session to share with
        self.contributions = Log()  #: the ranks' contributions to collectives with other sessions
        self.given = self.executor.communicators.given = Given(session)  #: counts of those collectives
        self.contributions.kept_from = self.given.kept_from
        self._rebuilding = Rebuilding(device, self.path, self.loop, self.executor, self.kept, self.order, self.text,
                                      self.contributions, self.given)

    @property
    def epoch(self) -> int:
        """Epoch at which this worker applies calls."""
        return self.effects.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.effects.epoch = epoch

    def keep_place(self, page: PositionPage) -> None:
        """Write the position of the work into ``page`` from now on."""
        self.loop.place = page
        self.path.keep_place(page.begun_address)

    @property
    def place(self) -> Place:
        """Object that receives the position of the work."""
        return self.loop.place

    # -- applying -------------------------------------------------------------
    @property
    def applied(self) -> int:
        """The session's position: every call ≤ it was applied."""
        return self.path.applied

    def open_stream(self) -> Callable[[Any], int]:
        """Begin a connection's stream of records. Return the function that takes its bytes, cut anywhere.

        That function returns how many awaited calls the path has under way, and
        raises :class:`Corrupt` for bytes that are no record, or not the next one.
        """
        return self.loop.open_stream()

    def feed(self, records: Iterable[Record]) -> None:
        """Apply records in order; those at or below the position are skipped.

        Raises :class:`Corrupt` for a gap in the sequence or an undecodable record.
        """
        self.loop.feed(records)

    def applying(self, feed: Callable[[Any], int], data: Any) -> int:
        """Feed ``data``, and note calls that piled up behind a long driver call (a kernel loaded at its launch)."""
        began, waited = time.monotonic(), self.waited
        awaiting = feed(data)
        if (took := time.monotonic() - began) > SLOW and (took := took - (self.waited - waited)) > SLOW:
            self.stood_still("the driver", took)
        return awaiting

    @property
    def waited(self) -> float:
        """Seconds that the applying thread has waited for work so far."""
        return self.boundary.waited + self.path.waited() / 1e9

    def look(self) -> None:
        """Check whether this process was suspended, before calls are applied that were received just now."""
        if self.pulse is not None:
            self.pulse.look()

    def stood_still(self, who: str, seconds: float) -> None:
        """Note that calls did not arrive, or were not applied, for ``seconds``: they have piled up."""
        self.order.feed(issue_order.Gap(self.applied, who, seconds, self.order.distance.usual))

    def take_over(self, seconds: float = 10.0) -> None:
        """Become the applying thread; an earlier one that waits has to end. Raises :class:`TimedOut`."""
        self.boundary.take_over(seconds)

    def hand_back(self) -> None:
        """End the applying thread's turn."""
        self.boundary.hand_back()

    def stop(self) -> None:
        """End a waiting applying thread; nothing can be applied usefully after it."""
        self.boundary.stop()

    # -- rebuilding -------------------------------------------------------------
    def restore(self, state: SessionState, pages: Pages, mend: Mend | None = None, phases: Phases | None = None,
                ahead: Ahead | None = None) -> None:
        """Become the session that ``state`` describes, on an unused device; every page is verified.

        ``mend``, ``phases``: as :func:`rgpu.checkpoint.session.restore.restore` takes them. ``ahead``: the objects that
        :meth:`make` has made already. Raises :class:`RecoveryFailed`, :class:`Corrupt`.
        """
        self._rebuilding.restore(state, pages, mend, phases, ahead)
        self.hash_key = state.hash_key
        self.effect(Kind.REBUILT)

    def make(self, ahead: Ahead) -> None:
        """Make objects of a session that may arrive, on an unused device. Raises :class:`RecoveryFailed`."""
        self._rebuilding.make(ahead)

    def replay(self) -> None:
        """Begin a replay: calls fed from now on were applied by another owner before, until :meth:`settle`."""
        self._rebuilding.replay()

    def settle(self, state: SessionState) -> None:
        """End the replay at ``state.position``. Raises :class:`DeviceError`, :class:`Corrupt`."""
        self._rebuilding.settle(state)

    # -- answers ----------------------------------------------------------------
    def _answered(self, seq: int, result: int, reply: bytes, payload: Any) -> None:
        self.loop.live.answered(seq, result, reply)
        self.kept.answered(seq, result, reply, b"" if payload is None else bytes(payload))

    def answering(self, seq: int) -> None:
        """Note that the answer of that call is about to be sent; called once for each answer, whatever its length."""
        if self.order.catching_up and self.applied == seq:  # the program waits for it, and has issued nothing else
            self.order.feed(issue_order.Dry(*self.reach()))
        self.effects.answering(seq)

    def attach(self, deliver: Deliver, published: int) -> list[tuple[int, int, bytes, bytes]]:
        """Send answers to ``deliver`` from now on. Return those that were not yet observed.

        ``published``: the highest position that the program's side had published: up to
        there an earlier owner may have applied the calls, so they are a replay.
        """
        gate = self.loop.gate
        gate.replay_until = max(gate.replay_until, published)
        self.order.feed(issue_order.Attached(self.applied, published))
        return self.kept.attach(deliver)

    @property
    def replaying(self) -> str:
        """How far a replay is, as a sentence; empty where no call is left that an earlier owner may have applied."""
        until, applied = self.loop.gate.replay_until, self.applied
        return f"it is replaying: call {applied} of {until} is applied" if applied < until else ""

    def detach(self, deliver: Deliver) -> None:
        """Undo :meth:`attach`, unless another link is attached by now."""
        self.kept.detach(deliver)

    # -- pauses ------------------------------------------------------------------
    def pause(self, brief: bool = False) -> None:
        """Pause: on return no record is being applied, and none will be until :meth:`resume`.

        ``brief``: it ends after some seconds whatever happens; :meth:`resume` is told so, too.
        """
        self.boundary.pause(brief)

    def hold(self) -> None:
        """Pause at the next boundary, without waiting for it (:meth:`stands` does); undone by :meth:`resume`."""
        self.boundary.hold()

    def stands(self, seconds: float) -> bool:
        """Whether, within that time, no record is being applied and none will be."""
        return self.boundary.stands(seconds)

    @property
    def paused(self) -> bool:
        """Whether a pause is in force."""
        return self.boundary.paused

    @property
    def paused_for_long(self) -> bool:
        """Whether a pause is in force that may last until another process decides, as that of a move."""
        return self.boundary.paused_for_long

    def resume(self, brief: bool = False) -> None:
        """Undo one :meth:`pause`; calls may have piled up meanwhile."""
        if (stood := self.boundary.stood) > PILE_UP:
            self.order.feed(issue_order.Resumed(self.applied, stood, self.order.distance.usual))
        self.boundary.resume(brief)

    def quiesce(self, limit: float, settle: float = 0.1) -> None:
        """Pause, with all submitted work complete: see :func:`.quiescing.quiesce`. Raises :class:`TimedOut`."""
        quiescing.quiesce(self, self.device, self.path, limit, settle)

    # -- the state ------------------------------------------------------------------
    @property
    def live(self) -> LiveObjects:
        """The objects that the session has now."""
        return self.loop.live

    @property
    def gate(self) -> ApplyGate:
        """The rules by which records are applied."""
        return self.loop.gate

    @property
    def retained(self) -> RetainedAnswers:
        """Answers made in Python that the program might not have."""
        return self.kept.retained

    def answers(self) -> list[list[Any]]:
        """Return every answer that the program might not have, for a checkpoint or a move: rows of seq, result, reply,
        payload.
        """
        return self.kept.rows()

    def objects(self) -> dict[str, Any]:
        """Return the live objects, for a checkpoint or a move."""
        self.live.position = self.applied
        return self.live.to_dict()

    def effect(self, kind: Kind, note: str = "") -> None:
        """Write an event at this position to the effects log, where a test requests one."""
        self.effects.note(kind, note)

    # -- sharing -----------------------------------------------------------------
    def share(self, sharing: Sharing) -> None:
        """Use ``sharing`` to reach other sessions."""
        self.sharing = self.executor.shares.sharing = sharing

    def pins(self) -> list[str]:
        """Why the session cannot leave, one reason each; empty when it can."""
        return [*self.device.pins(), *self.sharing.pins()]

    # -- progress ----------------------------------------------------------------
    def watermark(self) -> tuple[int, int, dict[int, int]]:
        """Return (every call ≤ this is complete, sticky error or 0, {stream: seq})."""
        applied = self.applied  # read first: what is applied later is pending or not counted
        pending, streams = self.device.progress()
        done = min(pending) - 1 if pending else applied
        self.place.complete(done)
        return done, self.executor.error, streams

    def reach(self) -> tuple[int, int]:
        """Return (every call ≤ this was applied, all work of calls ≤ this is complete)."""
        applied = self.applied
        return applied, min(min(self.device.progress()[0], default=EVER) - 1, applied)

    def memory_bytes(self) -> int:
        """Return the bytes of device memory mapped for the session."""
        return sum(region.size for region in self.device.regions() if region.kind == "mapped")
