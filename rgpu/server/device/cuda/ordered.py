"""Ordered work that Python submits to the streams of the ``cuda`` device, and the error that ends all of it.

Hot calls are passed to the native engine (:mod:`.engine`) as a record would be; work for which the engine has no call
is submitted to the driver, and the engine is notified that the stream has work of the journal's call
(:meth:`OrderedWork.run`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cuda.bindings import driver

from rgpu.checkpoint.device import Done, TimesDone
from rgpu.server.device.cuda.engine import Engine
from rgpu.server.device.cuda.errors import STICKY
from rgpu.server.device.cuda.gpus import Gpus
from rgpu.server.device.cuda.times.activity import Activity
from rgpu.server.device.cuda.times.timing import Brought, Timings
from rgpu.server.device.cuda.work.streams import Completion
from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_NAME
from rgpu.session.errors import DeviceError

CUDA_ERROR_INVALID_VALUE = 1
CUDA_ERROR_INVALID_HANDLE = 400
#: By the kind of a stream_memory_operation.
_MEMORY_OPERATIONS = ("cuStreamWriteValue32", "cuStreamWriteValue64", "cuStreamWaitValue32", "cuStreamWaitValue64")


class StickyError:
    """The error that made a session's contexts unusable: the engine holds its number, this object its description."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._detail = ""

    def note(self, result: int, detail: str) -> None:
        """Record a sticky error that Python received; the first one stays."""
        if not self.result:
            self._detail = detail
            self._engine.fail(result)

    @property
    def result(self) -> int:
        """The CUresult; 0 while there is none."""
        return int(self._engine.error())

    def detail(self) -> str:
        """Return the description of the error, its name where there is no other; empty without an error."""
        if self._detail or not self.result:
            return self._detail
        try:
            return str(driver.CUresult(self.result).name)
        except ValueError:
            return f"CUresult {self.result}"


class OrderedWork:
    """Submits work to streams, by their numbers. Every method raises :class:`DeviceError` for an invalid call; a sticky
    error is recorded instead.
    """

    def __init__(self, engine: Engine, gpus: Gpus, completion: Completion) -> None:
        self._engine, self._gpus, self._completion = engine, gpus, completion
        self.error = StickyError(engine)
        self._activity = Activity(engine)
        self._timings: dict[int, Timings] = {}  #: by the session's number of the GPU
        self._brought: Brought | None = None  #: of the timed call that is being submitted to the GPU

    def stream(self, number: int) -> Any:
        """Return a stream's handle; its context is current."""
        state = self._completion.streams.get(number)
        if state is None:
            raise DeviceError(f"stream {number} does not exist", CUDA_ERROR_INVALID_HANDLE)
        self._gpus.use(state.device)
        return state.handle

    def run(self, seq: int, stream: int, result: tuple[Any, ...], what: str) -> None:
        """Record work ``seq``, which the driver took with ``result``."""
        self._check(result, what)
        self._completion.submitted(stream, seq)

    def stops(self, seq: int, stream: int, result: tuple[Any, ...], what: str) -> None:
        """Record host function ``seq``, at which the stream stops; the driver took that with ``result``."""
        self._check(result, what)
        self._engine.stops(stream, seq)

    def _check(self, result: tuple[Any, ...], what: str) -> None:
        """Note a sticky error, raise :class:`DeviceError` for another."""
        code = int(result[0])
        if code in STICKY:
            self.error.note(code, what)
        elif code:
            raise DeviceError(f"{what}: {driver.CUresult(code).name}", code)

    def call(self, name: str, seq: int, payload: Any = b"", **args: Any) -> None:
        """Apply a hot call through the engine."""
        self._engine.apply(BY_NAME[name].id, seq, decoders.encode_args(name, **args), payload)

    def answered(self, name: str, seq: int, done: Done, **args: Any) -> None:
        """Apply a hot call with an answer, which is passed to ``done``."""
        if self._brought is not None:
            self._brought.expected, done = True, self._brought.bytes
        self._completion.expect(seq, done)
        try:
            self.call(name, seq, **args)
        except DeviceError:
            self._completion.unexpect(seq)
            raise

    def memory_operation(self, seq: int, stream: int, kind: int, address: int, value: int, flags: int) -> None:
        """See :meth:`rgpu.checkpoint.device.Device.memory_operation`."""
        if not 0 <= kind < len(_MEMORY_OPERATIONS):
            raise DeviceError(f"stream memory operation {kind}", CUDA_ERROR_INVALID_VALUE)
        self._engine.check_range(address, 8 if kind & 1 else 4)
        name = _MEMORY_OPERATIONS[kind]
        self.run(seq, stream, getattr(driver, name)(self.stream(stream), address, value, flags), name)

    def timed(self, stream: int, work: Callable[[], None], done: TimesDone) -> None:
        """See :meth:`rgpu.checkpoint.device.Device.timed`."""
        handle = self.stream(stream)
        device = self._completion.streams[stream].device
        if device not in self._timings:
            self._timings[device] = Timings(self._gpus[device].context, self._engine, self._activity)
        self._brought = brought = Brought(done)
        try:
            self._timings[device].around(handle, work, brought.times)
        finally:
            self._brought = None

    def drain(self, seconds: float) -> bool:
        """Whether all work completed within ``seconds``, and each GPU's timed calls were answered within as many."""
        until = int(seconds * 1e9)
        return bool(self._engine.drain(until)) and bool(self._engine.times_drained(until)) and all(
            timings.drain(seconds) for timings in self._timings.values())

    def stop(self) -> None:
        """Stop timing; open timed calls are never answered."""
        for timings in self._timings.values():
            timings.stop()
        self._activity.stop()
