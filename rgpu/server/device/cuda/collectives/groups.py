"""Groups of collectives as work of the ``cuda`` device's streams.

A group becomes, in its streams: copies of its ranks' inputs to host memory, a gate (:mod:`.gates`), copies of their
outputs from host memory. Once the gate is reached, a thread executes the collectives on the host memory, then opens the
gate. So a group begins when all its streams have reached it, and the thread that executes it makes no driver call.

The ranks' data passes through the host, which logs it: the recovery and moves of the ``cpu`` device, by the log of
contributions, apply here too (docs/developers/objects/collectives.md). Long contributions of ranks on one node are
exchanged directly (:mod:`.direct`), and not logged.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog
from cuda.bindings import driver

from rgpu.server.collectives.communicators import Communicators, Group
from rgpu.server.collectives.shared import RankLost
from rgpu.server.device.cuda.collectives.direct import DirectCollectives, Plan, Work
from rgpu.server.device.cuda.collectives.gates import Gates
from rgpu.server.device.cuda.collectives.staging import Buffer, Staging
from rgpu.server.device.cuda.engine import Engine
from rgpu.server.device.cuda.errors import STICKY, check
from rgpu.server.device.cuda.gpus import Gpus
from rgpu.server.device.cuda.ordered import OrderedWork
from rgpu.server.device.cuda.work.streams import Completion
from rgpu.session.errors import DeviceError
from rgpu.session.objects.collectives import Operation, Reduction

log = structlog.get_logger(__name__)

POLL = 0.00005  #: seconds between two polls of the gates
MOST_STAGED = 768 << 20  #: bytes of groups that were submitted and are not complete
PATIENCE = 1.0  #: seconds that a group over that limit waits for another one to complete
CUDA_ERROR_UNKNOWN = 999
NO_GATE = -1


class Staged:
    """The host memory of one operation; implements :class:`rgpu.server.collectives.matching.Memory`."""

    def __init__(self, operation: Operation, reads: int, writes: int) -> None:
        self._operation, self._reads, self._writes = operation, reads, writes
        self._data: Buffer | None = None
        self._scalar: Buffer | None = None
        on_device = operation.reduction is Reduction.PREMULSUM and operation.on_device
        self._scalar_size = operation.data_type.size if on_device else 0

    @property
    def sizes(self) -> list[int]:
        """Bytes of each buffer that is needed; one for data, since a group reads all of it before it writes any."""
        return [size for size in (max(self._reads, self._writes), self._scalar_size) if size]

    def use(self, buffers: Iterator[Buffer]) -> None:
        """Take the next buffers, which have the :attr:`sizes`."""
        self._data = next(buffers) if self._reads or self._writes else None
        self._scalar = next(buffers) if self._scalar_size else None

    def source(self, address: int, size: int) -> np.ndarray[Any, Any]:
        """See :meth:`rgpu.server.collectives.matching.Memory.source`."""
        buffer = self._data if address == self._operation.send and self._reads else self._scalar
        assert buffer is not None, "an operation reads what it did not name"
        return buffer.bytes[:size]

    def target(self, address: int, size: int) -> np.ndarray[Any, Any]:
        """See :meth:`rgpu.server.collectives.matching.Memory.target`."""
        assert self._data is not None, "an operation writes what it did not name"
        return self._data.bytes[:size]

    def bring(self, stream: Any) -> None:
        """Make the stream copy what the operation reads. Raises :class:`DeviceError`."""
        operation = self._operation
        for buffer, address, size in ((self._data, operation.send, self._reads),
                                      (self._scalar, operation.scalar, self._scalar_size)):
            if buffer is not None and size:
                check(driver.cuMemcpyDtoHAsync(buffer.address, address, size, stream), "cuMemcpyDtoHAsync")

    def deliver(self, stream: Any) -> None:
        """Make the stream copy what was written. Raises :class:`DeviceError`."""
        if self._data is not None and self._writes:
            check(driver.cuMemcpyHtoDAsync(self._operation.receive, self._data.address, self._writes, stream),
                  "cuMemcpyHtoDAsync")


@dataclass(frozen=True, eq=False, slots=True)
class _Given:
    """A group submitted to its streams as call ``seq``, or the part of it before the driver refused the rest.

    ``work``: where the group's data is exchanged directly; then there is no gate.
    """

    seq: int
    group: Group
    gate: int
    buffers: Sequence[Buffer]
    work: Work | None = None


class Collectives:
    """See the module docstring. Called by the applying thread, unless a method says otherwise."""

    def __init__(self, gpus: Gpus, engine: Engine, completion: Completion, work: OrderedWork) -> None:
        self.communicators = Communicators(engine.check_range)
        self._gpus, self._engine, self._completion, self._work = gpus, engine, completion, work
        self._gates, self._staging = Gates(), Staging()
        self._direct = DirectCollectives(gpus[0].ordinal) if len(gpus) == 1 else None
        self._given: list[_Given] = []  #: whose buffers and gate are in use; two of a call that is tried again
        self._changed = threading.Condition()
        self._coming: list[_Given] = []  #: whose gates are not reached
        self._stopped = False
        self._threads: set[threading.Thread] = set()
        self._watching: threading.Thread | None = None

    def create(self, communicator: int, context: int, ranks: int, rank: int, unique: bytes,
               members: Sequence[str]) -> None:
        """Make one rank of a communicator. Raises :class:`DeviceError`."""
        self._gpus.use_context(context)
        self._gates.prepare()
        self.communicators.create(communicator, context, ranks, rank, unique, members)
        if self._direct is not None and members and self.communicators.exchange is not None:
            self._direct.create(communicator, self.communicators.member(communicator),
                                self.communicators.exchange.direct)
        if self._watching is None:
            self._watching = threading.Thread(target=self._watch, name="cuda-collectives", daemon=True)
            self._watching.start()

    def destroy(self, communicator: int, abort: bool) -> None:
        """End one rank of a communicator. Raises :class:`DeviceError`."""
        self.communicators.destroy(communicator, abort)
        if self._direct is not None:
            self._direct.destroy(communicator)

    def destroy_context(self, context: int) -> None:
        """End the ranks that were made in a context."""
        for communicator in self.communicators.of_context(context):
            self.destroy(communicator, True)

    def give(self, seq: int, operations: Sequence[Operation]) -> None:
        """Submit a group to its streams. Raises :class:`DeviceError`; then none of its operations is executed."""
        if self._work.error.result:
            return
        group = self.communicators.group(operations)
        handles = {stream: self._work.stream(stream) for stream in group.streams}
        staged = [Staged(*extent) for extent in group.extents()]
        sizes = [size for one in staged for size in one.sizes]
        self._await_room(sizes)
        work = self._plan(group)
        gate = self._gates.take() if work is None else NO_GATE
        buffers: list[Buffer] = []
        try:
            buffers += self._staging.take(sizes)
            left = iter(buffers)
            for one in staged:
                one.use(left)
            for stream in handles:
                self._engine.boundary(stream)
            if self._direct is not None and work is not None:
                self._direct.submit(work, handles[group.streams[0]], buffers[0].address)
            else:
                self._enqueue(group, staged, gate, handles)
        except DeviceError as error:
            self._open(gate)
            self._note(_Given(seq, group, gate, buffers), False)
            if error.result not in STICKY:
                raise
            self._work.error.note(error.result, error.message)
            return
        if self._direct is not None and work is None:
            self._direct.passes(group)
        group.post(staged)
        self._note(_Given(seq, group, gate, buffers, work), True)

    def _plan(self, group: Group) -> Work | None:
        """Return the work of a group that is exchanged directly; waits while many are under way, as for room."""
        since = time.monotonic()
        while self._direct is not None and not self._work.error.result:
            found = self._direct.plan(group)
            if isinstance(found, Work):
                return found
            if found is Plan.NOT or time.monotonic() - since > PATIENCE:
                break
            time.sleep(POLL)
            self._recycle(self._engine.is_complete)
        return None

    def _note(self, given: _Given, whole: bool) -> None:
        """Note a group, so that its gate and buffers are used again once the streams have passed all of its work."""
        for stream in given.group.streams:
            self._completion.submitted(stream, given.seq)
        with self._changed:
            self._given.append(given)
            if whole and self._direct is not None and given.work is not None:
                self._direct.begin(given.work, given.group, given.seq)
            elif whole:
                self._coming.append(given)
            self._changed.notify_all()

    def _start(self, target: Callable[[Any], None], what: Any) -> None:
        """Start the thread of a group."""
        thread = threading.Thread(target=target, args=(what,), name="cuda-collective", daemon=True)
        with self._changed:
            self._threads.add(thread)
        thread.start()

    @property
    def _exchanging(self) -> bool:
        return self._direct is not None and bool(self._direct.under_way)

    def _open(self, gate: int) -> None:
        if gate != NO_GATE:
            self._gates.open(gate)

    def unfinished(self, seq: int) -> str:
        """Return the name of call ``seq``'s group, in any thread; empty for another call."""
        with self._changed:
            return next((str(given.group) for given in self._given if given.seq == seq), "")

    def stop(self) -> None:
        """Let every stream continue, and end the threads."""
        with self._changed:
            self._stopped = True
            threads = list(self._threads) + ([self._watching] if self._watching is not None else [])
            self._changed.notify_all()
        for thread in threads:
            thread.join(5)
        for given in self._given:
            self._open(given.gate)

    def close(self) -> None:
        """Free the host memory; nothing uses it any more."""
        self._gpus.use()
        self._recycle(lambda seq: True)
        if self._direct is not None:
            self._direct.close()
        self._staging.close()
        self._gates.close()

    # -- submitting -----------------------------------------------------------------
    def _enqueue(self, group: Group, staged: Sequence[Staged], gate: int, handles: dict[int, Any]) -> None:
        """Enqueue copies and the gate, after all streams arrived; the first waits at the gate, others for the first."""
        streams = [operation.stream for operation, _, _ in group.extents()]
        first, *others = handles
        self._meet(first, others)
        for stream, one in zip(streams, staged, strict=True):
            one.bring(self._work.stream(stream))
        for other in others:
            self._after(other, first)
        self._gates.enqueue(gate, self._work.stream(first))
        for other in others:
            self._after(first, other)
        for stream, one in zip(streams, staged, strict=True):
            one.deliver(self._work.stream(stream))

    def _meet(self, first: int, others: Sequence[int]) -> None:
        """Make each stream wait for all earlier work of all of them."""
        for other in others:
            self._after(other, first)
        for other in others:
            self._after(first, other)

    def _after(self, earlier: int, later: int) -> None:
        """Make one stream wait for the earlier work of another."""
        handle = self._work.stream(earlier)
        event = check(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING), "cuEventCreate")
        try:
            check(driver.cuEventRecord(event, handle), "cuEventRecord")
            check(driver.cuStreamWaitEvent(self._work.stream(later), event, 0), "cuStreamWaitEvent")
        finally:
            driver.cuEventDestroy(event)

    def _await_room(self, sizes: Sequence[int]) -> None:
        """Wait while much is under way; bounded, since its completion may depend on a later call of the journal."""
        self._recycle(self._engine.is_complete)
        since, before = time.monotonic(), len(self._given)
        while self._given and (self._gates.full or self._staging.used + sum(sizes) > MOST_STAGED
                               or not self._staging.fits(sizes)):
            time.sleep(POLL)
            self._recycle(self._engine.is_complete)
            if len(self._given) != before:
                since, before = time.monotonic(), len(self._given)
            if not self._gates.full and time.monotonic() - since > PATIENCE:
                return
        if not self._given:
            self._staging.trim(sizes)

    def _recycle(self, complete: Any) -> None:
        for given in [given for given in self._given if complete(given.seq)
                      and (given.work is None or given.work.finished)]:
            with self._changed:
                self._given.remove(given)
                if given in self._coming:  # after an error gates are not reached any more
                    self._coming.remove(given)
            if given.gate != NO_GATE:
                self._gates.give(given.gate)
            self._staging.give(given.buffers)
        if not self._given:
            self._staging.trim()
            if self._direct is not None:
                self._direct.trim()

    # -- execution, in threads of its own ----------------------------------------------
    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._coming or self._exchanging)
                if self._stopped:
                    break
                over = bool(self._engine.error())
                reached = [given for given in self._coming if over or self._gates.reached(given.gate)]
                self._coming = [given for given in self._coming if given not in reached]
                for given in [] if over else reached:
                    self._rest(given, True)
                    self._start(self._take_part, given)
            for given in reached if over else []:
                self._gates.open(given.gate)
            moved = self._direct is not None and self._direct.look(self)
            if not reached and not moved:
                time.sleep(POLL)
        if self._direct is not None:
            self._direct.look(self)

    # -- hooks of direct collectives, called by the watching thread ------------------------
    def cancelled(self) -> bool:
        """See :meth:`.direct.Hooks.cancelled`."""
        return self._stopped or bool(self._engine.error())

    def rest(self, work: Work, resting: bool) -> None:
        """See :meth:`.direct.Hooks.rest`."""
        self._engine.rest(work.operation.stream, resting)

    def failed(self, work: Work, error: Exception) -> None:
        """See :meth:`.direct.Hooks.failed`."""
        self._note_error(f"call {work.seq}", error)

    def through_host(self, work: Work) -> None:
        """See :meth:`.direct.Hooks.through_host`."""
        self._start(self._take_part_through_host, work)

    def _take_part_through_host(self, work: Work) -> None:
        assert self._direct is not None
        try:
            self._direct.through_host(work, self.cancelled)
        except Exception as error:
            self._note_error(str(work.group), error)
        finally:
            self._direct.end(work)
            with self._changed:
                self._threads.discard(threading.current_thread())

    def _rest(self, given: _Given, resting: bool) -> None:
        """Notify the engine that streams wait for other ranks: that does not count as the GPU's time."""
        for stream in given.group.streams:
            self._engine.rest(stream, resting)

    def _take_part(self, given: _Given) -> None:
        try:
            given.group.run(given.seq, self.cancelled)
        except Exception as error:
            self._note_error(str(given.group), error)
        finally:
            self._open(given.gate)
            self._rest(given, False)
            with self._changed:
                self._threads.discard(threading.current_thread())

    def _note_error(self, what: str, error: Exception) -> None:
        """Note an error as the device's: else the program waits for ever."""
        if isinstance(error, RankLost):
            self._work.error.note(error.result, error.detail)
            return
        log.exception("a collective failed", group=what)
        self._work.error.note(CUDA_ERROR_UNKNOWN, f"{what}: {error}")
