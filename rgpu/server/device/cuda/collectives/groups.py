"""Groups of collectives as work of the ``cuda`` device's streams.

A group becomes, in its streams: copies of what its ranks bring to host memory, a gate (:mod:`.gates`), copies of what
they get from host memory. A thread takes part for them once the gate is reached, and opens it. So a group begins when
all its streams have come to it, and no thread that takes part calls the driver.

The ranks' data passes the host, whatever the GPUs could do among themselves: so it is known, and what recovers and
moves by the log of contributions on the ``cpu`` device does so here (docs/developers/objects/collectives.md).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog
from cuda.bindings import driver

from rgpu.server.collectives.communicators import Communicators, Group
from rgpu.server.collectives.shared import RankLost
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

POLL = 0.00005  #: seconds between two looks at the gates
MOST_STAGED = 512 << 20  #: bytes of groups that were given and are not complete
PATIENCE = 1.0  #: seconds that a group over that waits for another one to be complete
CUDA_ERROR_UNKNOWN = 999


class Staged:
    """The host memory of one operation: does what :class:`rgpu.server.collectives.matching.Memory` promises."""

    def __init__(self, operation: Operation, reads: int, writes: int, staging: Staging) -> None:
        self._operation, self._reads, self._writes = operation, reads, writes
        self.buffers: list[Buffer] = []
        scalar = operation.data_type.size if operation.reduction is Reduction.PREMULSUM and operation.on_device else 0
        # One buffer for both: all of a group is read before anything of it is written.
        self._data, self._scalar = self._take(max(reads, writes), staging), self._take(scalar, staging)
        self._scalar_size = scalar

    def _take(self, size: int, staging: Staging) -> Buffer | None:
        if not size:
            return None
        self.buffers.append(staging.take(size))
        return self.buffers[-1]

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
        """Have the stream copy what the operation reads. Raises :class:`DeviceError`."""
        operation = self._operation
        for buffer, address, size in ((self._data, operation.send, self._reads),
                                      (self._scalar, operation.scalar, self._scalar_size)):
            if buffer is not None and size:
                check(driver.cuMemcpyDtoHAsync(buffer.address, address, size, stream), "cuMemcpyDtoHAsync")

    def deliver(self, stream: Any) -> None:
        """Have the stream copy what was written. Raises :class:`DeviceError`."""
        if self._data is not None and self._writes:
            check(driver.cuMemcpyHtoDAsync(self._operation.receive, self._data.address, self._writes, stream),
                  "cuMemcpyHtoDAsync")


@dataclass(frozen=True, eq=False, slots=True)
class _Given:
    """A group that was given to its streams as call ``seq``."""

    seq: int
    group: Group
    gate: int
    staged: Sequence[Staged]


class Collectives:
    """See the module docstring. Called by the applying thread, except where it is said."""

    def __init__(self, gpus: Gpus, engine: Engine, completion: Completion, work: OrderedWork) -> None:
        self.communicators = Communicators(engine.check_range)
        self._gpus, self._engine, self._completion, self._work = gpus, engine, completion, work
        self._gates, self._staging = Gates(), Staging()
        self._given: dict[int, _Given] = {}  #: whose buffers and gate are in use, by call
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
        if self._watching is None:
            self._watching = threading.Thread(target=self._watch, name="cuda-collectives", daemon=True)
            self._watching.start()

    def give(self, seq: int, operations: Sequence[Operation]) -> None:
        """Give a group to its streams. Raises :class:`DeviceError`; then nothing of it takes part."""
        if self._work.error.result:
            return
        group = self.communicators.group(operations)
        handles = {stream: self._work.stream(stream) for stream in group.streams}
        self._await_room(sum(max(reads, writes) for _, reads, writes in group.extents()))
        staged: list[Staged] = []
        gate = self._gates.take()
        try:
            for operation, reads, writes in group.extents():
                staged.append(Staged(operation, reads, writes, self._staging))
            for stream in handles:
                self._engine.boundary(stream)
            self._enqueue(group, staged, gate, handles)
        except DeviceError as error:
            self._gates.open(gate)  # it, and the buffers, are not used again: streams may have been given a part
            if error.result not in STICKY:
                raise
            self._work.error.note(error.result, error.message)
            return
        group.post(staged)
        for stream in handles:
            self._completion.submitted(stream, seq)
        with self._changed:
            self._given[seq] = given = _Given(seq, group, gate, staged)
            self._coming.append(given)
            self._changed.notify_all()

    def unfinished(self, seq: int) -> str:
        """Name the group that call ``seq`` is, any thread; empty for another call."""
        given = self._given.get(seq)
        return str(given.group) if given is not None else ""

    def stop(self) -> None:
        """Let every stream go on, and end the threads."""
        with self._changed:
            self._stopped = True
            threads = list(self._threads) + ([self._watching] if self._watching is not None else [])
            self._changed.notify_all()
        for thread in threads:
            thread.join(5)
        for given in self._given.values():
            self._gates.open(given.gate)

    def close(self) -> None:
        """Give the host memory back; nothing uses it any more."""
        self._gpus.use()
        self._recycle(lambda seq: True)
        self._staging.trim(0)
        self._gates.close()

    # -- giving ---------------------------------------------------------------------
    def _enqueue(self, group: Group, staged: Sequence[Staged], gate: int, handles: dict[int, Any]) -> None:
        """Nothing is read before all streams have come; the first stands at the gate, and the others wait for it."""
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
        """Have each stream wait for what all of them were given."""
        for other in others:
            self._after(other, first)
        for other in others:
            self._after(first, other)

    def _after(self, earlier: int, later: int) -> None:
        """Have one stream wait for what another one was given."""
        handle = self._work.stream(earlier)
        event = check(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING), "cuEventCreate")
        try:
            check(driver.cuEventRecord(event, handle), "cuEventRecord")
            check(driver.cuStreamWaitEvent(self._work.stream(later), event, 0), "cuStreamWaitEvent")
        finally:
            driver.cuEventDestroy(event)

    def _await_room(self, size: int) -> None:
        """Wait while much is given already; not for ever, since what completes it may be behind this in the journal."""
        self._recycle(self._engine.is_complete)
        since, before = time.monotonic(), len(self._given)
        while self._given and (self._gates.full or self._staging.used + size > MOST_STAGED):
            time.sleep(POLL)
            self._recycle(self._engine.is_complete)
            if len(self._given) != before:
                since, before = time.monotonic(), len(self._given)
            if not self._gates.full and time.monotonic() - since > PATIENCE:
                return

    def _recycle(self, complete: Any) -> None:
        for seq in [seq for seq in self._given if complete(seq)]:
            with self._changed:
                given = self._given.pop(seq)
                if given in self._coming:  # after an error nothing comes
                    self._coming.remove(given)
            self._gates.give(given.gate)
            for one in given.staged:
                for buffer in one.buffers:
                    self._staging.give(buffer)
        if not self._given:
            self._staging.trim()

    # -- taking part, in threads of its own --------------------------------------------
    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._coming)
                if self._stopped:
                    return
                over = bool(self._engine.error())
                reached = [given for given in self._coming if over or self._gates.reached(given.gate)]
                self._coming = [given for given in self._coming if given not in reached]
                for given in [] if over else reached:
                    self._rest(given, True)
                    thread = threading.Thread(target=self._take_part, args=(given,), name="cuda-collective",
                                              daemon=True)
                    self._threads.add(thread)
                    thread.start()
            for given in reached if over else []:
                self._gates.open(given.gate)
            if not reached:
                time.sleep(POLL)

    def _rest(self, given: _Given, resting: bool) -> None:
        """Tell the engine that streams wait for other ranks: that is no time of the GPU's."""
        for stream in given.group.streams:
            self._engine.rest(stream, resting)

    def _take_part(self, given: _Given) -> None:
        try:
            given.group.run(given.seq, lambda: self._stopped or bool(self._engine.error()))
        except RankLost as lost:
            self._work.error.note(lost.result, lost.detail)
        except Exception as error:  # else the program waits for ever
            log.exception("a collective failed", call=given.seq, group=str(given.group))
            self._work.error.note(CUDA_ERROR_UNKNOWN, f"{given.group}: {error}")
        finally:
            self._gates.open(given.gate)
            self._rest(given, False)
            with self._changed:
                self._threads.discard(threading.current_thread())
