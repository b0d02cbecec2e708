"""Applies wire calls to a device: one method for each call, nothing else.

The executor knows no sockets and no journal order: the worker
(:mod:`rgpu.server.worker.main`) decides *when* a record is applied, the executor
*what* it does. Every method is named like its wire call and takes the decoded
arguments; :func:`Executor.apply` dispatches. Errors of a call are answered
with the CUresult that the driver would give. An error in a call that nobody
awaits is the shim's oversight (it checks arguments before it publishes): it is
logged as our bug and never made sticky (SEMANTICS 4), except where the device
could not provide what the program was promised (memory, an object), which
sticks.
"""

from __future__ import annotations

import secrets
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from rgpu.checkpoint.device import Device, Launch
from rgpu.server.device.loads import LoadFigures, LoadNotes, kind_of
from rgpu.session.addresses import device_of
from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_ID, Answer
from rgpu.session.errors import Corrupt, DeviceError
from rgpu.session.journal.record import Record
from rgpu.session.objects import collectives, graphs, module_table, spans
from rgpu.session.objects.arrays import ArrayShape, Box
from rgpu.session.objects.module_table import GlobalVariable

log = structlog.get_logger(__name__)

CUDA_SUCCESS = 0
CUDA_ERROR_INVALID_VALUE = 1
CUDA_ERROR_OUT_OF_MEMORY = 2
CUDA_ERROR_INVALID_CONTEXT = 201
CUDA_ERROR_INVALID_HANDLE = 400
CUDA_ERROR_NOT_SUPPORTED = 801
CUDA_ERROR_UNKNOWN = 999

#: (seq, CUresult, encoded reply arguments, reply payload)
AnswerCallback = Callable[[int, int, bytes, Any], None]


class Executor:
    """See the module docstring.

    ``broken`` is a sticky CUresult of the executor's own (a mapping or an
    object that could not be made); the device's own sticky error is
    ``device.error``.
    """

    def __init__(self, device: Device, answer: AnswerCallback) -> None:
        self.device = device
        self._answer = answer
        self.broken = 0
        self.broken_detail = ""
        self.bugs = 0  #: argument errors that the shim let through
        self.loaded: Callable[[bytes], None] = lambda binary: None  #: told every module binary that was loaded
        self.figures = LoadFigures()
        self.travelled: Callable[[], float] = lambda: 0.0  #: s that the binary of the load under way took to come here
        self.digest: Callable[[int], bytes] = lambda seq: b""  #: of the binary of the load at a position, where known
        self.premapped: list[tuple[int, int]] = []  #: ranges that a move mapped ahead of the rebuild
        self.make_room: Callable[[], bool] = lambda: False  #: asked when the device has no memory left: try again?
        self._contexts: dict[int, int] = {}  #: the session's number of each one's device
        #: where variables of modules stood, by the position of a load that is still to be applied again
        self.places: dict[int, tuple[GlobalVariable, ...]] = {}
        self.clock = secrets.randbits(63)  #: names the clock of this process, which times are given on
        self.replayed: Callable[[int], bool] = lambda seq: False  #: whether an earlier owner may have applied that call
        self.epoch: Callable[[], int] = lambda: 0
        self.recovering = False  #: a replay may follow the rebuild under way
        self._rebuilding = False  #: a call of the live objects is being applied
        self.restored = 0  #: the position that the session was rebuilt at: work up to there is over

    @property
    def error(self) -> int:
        """The session's sticky CUresult, 0 while there is none."""
        return self.device.error or self.broken

    def apply(self, record: Record) -> None:
        """Apply one record. Raises :class:`Corrupt` if it does not decode; nothing else."""
        call = BY_ID.get(record.call_id)
        if call is None:
            raise Corrupt(f"journal position {record.seq}: unknown call id {record.call_id}", seq=record.seq,
                          reason="unknown call")
        args = decoders.decode(record.call_id, record.args)
        placed = record.seq in self.places
        try:
            if call.answer is not Answer.ASYNC and self.error and call.name != "host_function":
                raise DeviceError("an earlier error sticks", self.error)
            self._call(call.name, record, args)
        except DeviceError as error:
            self._failed(record, call, error)
        except Exception as error:  # noqa: BLE001 - a bug here must not take the session's memory with it
            log.exception("executor bug", call=call.name, seq=record.seq)
            self._failed(record, call, DeviceError(str(error), CUDA_ERROR_UNKNOWN))
        if placed:
            self.device.placed()

    def _call(self, name: str, record: Record, args: Any) -> None:
        """Apply it; once more if the device was out of memory and somebody gave some back."""
        try:
            getattr(self, name)(record, args)
        except DeviceError as error:
            if error.result != CUDA_ERROR_OUT_OF_MEMORY or not self.make_room():
                raise
            getattr(self, name)(record, args)

    def replay(self, record: Record) -> None:
        """Apply a call of the live objects during a rebuild. Raises :class:`DeviceError`; nothing is answered."""
        call = BY_ID[record.call_id]
        failures: list[DeviceError] = []
        answer, self._answer = self._answer, lambda seq, result, reply, payload: failures.append(
            DeviceError(f"{call.name} was answered with {result}", result)) if result else None
        self._rebuilding = True
        try:
            getattr(self, call.name)(record, decoders.decode(record.call_id, record.args))
        finally:
            self._answer, self._rebuilding = answer, False
        if failures:
            raise failures[0]

    def _failed(self, record: Record, call: Any, error: DeviceError) -> None:
        if call.answer is not Answer.ASYNC:
            self._answer(record.seq, error.result, b"", None)
            inner = BY_ID.get(decoders.decode(call.id, record.args).call) if call.name == "timed" else None
            if inner is None or inner.answer is not Answer.ASYNC:  # else nobody but a profiler is told
                return
            call = inner
        if call.name in _PROMISED or error.result == CUDA_ERROR_OUT_OF_MEMORY:  # a launch must not be lost silently
            self.broken = self.broken or error.result
            self.broken_detail = f"{call.name} at position {record.seq}: {error.message}"
            log.error("the device cannot provide what the program was promised", call=call.name, seq=record.seq,
                      result=error.result, reason=error.message)
            return
        self.bugs += 1
        log.warning("argument error that the shim missed (our bug)", call=call.name, seq=record.seq,
                    result=error.result, reason=error.message)

    def give_up(self, record: Record, why: str) -> None:
        """Do not apply a call by which the session would have more than it may: it is out of memory from here on."""
        if not self.broken:
            self.broken, self.broken_detail = CUDA_ERROR_OUT_OF_MEMORY, f"position {record.seq}: {why}"
            log.error("the session has more than it may", seq=record.seq, reason=why)
        if BY_ID[record.call_id].answer is not Answer.ASYNC:
            self._answer(record.seq, CUDA_ERROR_OUT_OF_MEMORY, b"", None)

    def _reply(self, record: Record, call: str, payload: Any = None, **values: Any) -> None:
        self._answer(record.seq, CUDA_SUCCESS, decoders.encode_reply(call, **values), payload)

    def _when_done(self, record: Record) -> Callable[[int, Any], None]:
        seq = record.seq

        def done(result: int, data: Any) -> None:
            self._answer(seq, result, b"", data)

        return done

    # -- the session ----------------------------------------------------------
    def session_open(self, record: Record, args: Any) -> None:
        """The environment matters to contexts made later; the cpu device needs none of it."""

    def completed(self, record: Record, args: Any) -> None:
        """Order only: the worker has waited already."""

    def context_create(self, record: Record, args: Any) -> None:
        """Create a context, primary or not, on its device."""
        self.device.create_context(args.context, args.flags, bool(args.primary), args.device)
        self._contexts[args.context] = args.device

    def context_destroy(self, record: Record, args: Any) -> None:
        """Destroy a context."""
        self.device.destroy_context(args.context)
        self._contexts.pop(args.context, None)

    def context_limit(self, record: Record, args: Any) -> None:
        """Set a limit of a context."""
        self.device.set_limit(args.context, args.limit, args.value)

    def context_flags(self, record: Record, args: Any) -> None:
        """Scheduling flags concern the waiting thread, which is the client's."""

    def context_synchronize(self, record: Record, args: Any) -> None:
        """Answer when all work of a context's device is complete."""
        device = self._contexts.get(args.context)
        if device is None:
            raise DeviceError(f"no context {args.context}", CUDA_ERROR_INVALID_CONTEXT)
        self.device.synchronize_device(record.seq, device, self._when_done(record))

    # -- memory ---------------------------------------------------------------
    def memory_map(self, record: Record, args: Any) -> None:
        """Map memory, unless it was mapped ahead."""
        if any(at <= args.address and args.address + args.size <= at + size for at, size in self.premapped):
            return
        self.device.map(args.address, args.size)

    def memory_unmap(self, record: Record, args: Any) -> None:
        """Unmap memory."""
        self.device.unmap(args.address, args.size)

    def memory_alias(self, record: Record, args: Any) -> None:
        """Give bytes of a mapping a second address."""
        self.device.alias(args.address, args.size, args.source)

    def memory_unalias(self, record: Record, args: Any) -> None:
        """Take a second address away."""
        self.device.unalias(args.address, args.size)

    def memory_move(self, record: Record, args: Any) -> None:
        """Give a mapping another address."""
        self.device.move_mapping(args.address, args.size, args.to)

    def memory_allocate(self, record: Record, args: Any) -> None:
        """Make an allocation valid."""
        self.device.allocate(args.address, args.size)

    def memory_free(self, record: Record, args: Any) -> None:
        """Free an allocation."""
        self.device.free(args.address)

    def memory_free_wait(self, record: Record, args: Any) -> None:
        """Free an allocation when the device's work is complete, and answer then."""
        address = args.address
        seq = record.seq

        def done(result: int, data: Any) -> None:
            try:
                self.device.free(address)
            except DeviceError as error:
                result = result or error.result
            self._answer(seq, result, b"", None)

        self.device.synchronize_device(record.seq, device_of(address) or 0, done)

    def memset(self, record: Record, args: Any) -> None:
        """Set rows of elements, in stream order."""
        self.device.fill(record.seq, args.stream, args.destination, args.pitch, args.width, args.height,
                         args.element, args.value)

    def memcpy_h2d(self, record: Record, args: Any) -> None:
        """Copy the payload to the device."""
        size = len(record.payload)
        self.device.copy_in(record.seq, args.stream, args.destination, size, size, 1, record.payload)

    def memcpy_d2h(self, record: Record, args: Any) -> None:
        """Answer with bytes of the device."""
        self.device.copy_out(record.seq, args.stream, args.source, args.size, args.size, 1, self._when_done(record))

    def memcpy_d2d(self, record: Record, args: Any) -> None:
        """Copy bytes within device memory."""
        self.device.copy(record.seq, args.stream, args.destination, args.size, args.source, args.size, args.size, 1)

    def memcpy2d_h2d(self, record: Record, args: Any) -> None:
        """Copy the payload's rows to the device. Raises :class:`DeviceError` for another length."""
        if len(record.payload) != args.width * args.height:
            raise DeviceError(f"payload of {len(record.payload)} bytes for {args.width} x {args.height}",
                              CUDA_ERROR_INVALID_VALUE)
        self.device.copy_in(record.seq, args.stream, args.destination, args.pitch, args.width, args.height,
                            record.payload)

    def memcpy2d_d2h(self, record: Record, args: Any) -> None:
        """Answer with rows of device memory."""
        self.device.copy_out(record.seq, args.stream, args.source, args.pitch, args.width, args.height,
                             self._when_done(record))

    def memcpy2d_d2d(self, record: Record, args: Any) -> None:
        """Copy rows within device memory."""
        self.device.copy(record.seq, args.stream, args.destination, args.destination_pitch, args.source,
                         args.source_pitch, args.width, args.height)

    def host_allocate(self, record: Record, args: Any) -> None:
        """Make the mirror of a pinned range."""
        self.device.host_allocate(args.address, args.size)

    def host_free(self, record: Record, args: Any) -> None:
        """Free the mirror of a pinned range."""
        self.device.host_free(args.address)

    def host_mirror_write(self, record: Record, args: Any) -> None:
        """Write what the program's CPU wrote into its mirror."""
        self.device.mirror_write(record.seq, args.stream, args.address, record.payload)

    def host_mirror_read(self, record: Record, args: Any) -> None:
        """Answer with bytes of a mirror."""
        self.device.mirror_read(record.seq, args.stream, args.address, args.size, self._when_done(record))

    # -- modules --------------------------------------------------------------
    def module_load(self, record: Record, args: Any) -> None:
        """Load a module and answer with its table and the compiler's log."""
        binary = bytes(record.payload)  # the buffer that it came in may be used again
        notes, kind, library = getattr(self.device, "notes", None) or LoadNotes(), kind_of(binary), bool(args.library)
        notes.begin(self.digest(record.seq))
        notes.seconds["travel"] = self.travelled()
        try:
            table, text = self.device.load(args.module, binary, bytes(args.options), library,
                                           self._contexts.get(args.context, 0), self.places.pop(record.seq, ()))
        except DeviceError as error:
            self.figures.add(record.seq, kind, len(binary), 0, library, notes, failed=True)
            log.warning("a module binary does not load", seq=record.seq, bytes=len(record.payload), result=error.result,
                        reason=error.message[:400])
            reply = decoders.encode_reply("module_load", table=b"", log=error.message.encode())
            self._answer(record.seq, error.result, reply, None)
            return
        self.figures.add(record.seq, kind, len(binary), len(table.functions), library, notes)
        self.loaded(binary)
        self._reply(record, "module_load", table=module_table.encode(table), log=text.encode())

    def module_unload(self, record: Record, args: Any) -> None:
        """Unload a module."""
        self.device.unload(args.module)

    def function_attribute(self, record: Record, args: Any) -> None:
        """Set an attribute of a kernel."""
        self.device.set_function_attribute(args.module, args.function, args.attribute, args.value)

    def function_load(self, record: Record, args: Any) -> None:
        """Answer with a kernel's attributes, loading it if it is not yet."""
        attributes = self.device.function_attributes(args.module, args.function)
        self._reply(record, "function_load", attributes=struct.pack(f"<{len(attributes)}i", *attributes))

    def link(self, record: Record, args: Any) -> None:
        """Link module binaries and answer with the result and the log."""
        try:
            binary, text = self.device.link(parse_link_inputs(record.payload), bytes(args.options))
        except DeviceError as error:
            reply = decoders.encode_reply("link", image=b"", log=error.message.encode())
            self._answer(record.seq, error.result, reply, None)
            return
        self._reply(record, "link", image=binary, log=text.encode())

    def cluster_occupancy(self, record: Record, args: Any) -> None:
        """Answer with a kernel's occupancy in clusters."""
        value = self.device.cluster_occupancy(
            args.module, args.function, args.form, (args.grid_x, args.grid_y, args.grid_z),
            (args.block_x, args.block_y, args.block_z), args.shared, (args.cluster_x, args.cluster_y, args.cluster_z))
        self._reply(record, "cluster_occupancy", value=value)

    def launch(self, record: Record, args: Any) -> None:
        """Launch a kernel."""
        self.device.launch(record.seq, Launch(
            module=args.module, function=args.function, grid=(args.grid_x, args.grid_y, args.grid_z),
            block=(args.block_x, args.block_y, args.block_z), shared=args.shared, stream=args.stream,
            parameters=bytes(args.parameters), cooperative=bool(args.flags & 1), attributes=bytes(args.attributes)))

    def tensor_map(self, record: Record, args: Any) -> None:
        """Encode a tensor map and answer with it."""
        self._reply(record, "tensor_map", map=self.device.tensor_map(args.form, bytes(args.arguments)))

    # -- arrays, textures, surfaces -----------------------------------------------
    def array_create(self, record: Record, args: Any) -> None:
        """Make an array of memory that was allocated for it."""
        self._reserve_handles(record, args)
        self.device.create_array(args.array, args.context, args.address, ArrayShape(
            args.width, args.height, args.depth, args.format, args.channels, args.flags, args.levels))
        self._reply(record, "array_create")

    def array_destroy(self, record: Record, args: Any) -> None:
        """Destroy an array."""
        self.device.destroy_array(args.array)

    def array_to_memory(self, record: Record, args: Any) -> None:
        """Bring a box of an array's memory up to date."""
        self.device.array_to_memory(record.seq, args.stream, args.array, _box(args))

    def memory_to_array(self, record: Record, args: Any) -> None:
        """Bring a box of an array up to date."""
        self.device.memory_to_array(record.seq, args.stream, args.array, _box(args))

    def texture_create(self, record: Record, args: Any) -> None:
        """Make a texture or surface object and answer with its handle."""
        self._reserve_handles(record, args)
        handle = self.device.create_texture(args.texture, args.context, bool(args.surface), bytes(args.resource),
                                            bytes(args.sampling), bytes(args.view))
        self._reply(record, "texture_create", handle=handle)

    def _reserve_handles(self, record: Record, args: Any) -> None:
        moved = self._rebuilding and not self.recovering
        self.device.reserve_handles(args.context, None if moved else self._rebuilding or self.replayed(record.seq),
                                    self.epoch())

    def texture_place(self, record: Record, args: Any) -> None:
        """See to it that an object has the handle that the program was given."""
        self.device.place_texture(args.texture, args.handle)

    def texture_destroy(self, record: Record, args: Any) -> None:
        """Destroy a texture or surface object."""
        self.device.destroy_texture(args.texture)

    # -- graphs -----------------------------------------------------------------
    def graph_instantiate(self, record: Record, args: Any) -> None:
        """Make an executable graph of its nodes."""
        self.device.instantiate_graph(args.exec, args.context, args.flags, _read(graphs.decode, record))

    def graph_exec_update(self, record: Record, args: Any) -> None:
        """Replace nodes of an executable graph."""
        changes = _read(graphs.decode_changes, record)
        try:
            self.device.update_graph(args.exec, changes)
        except Corrupt as error:  # changes that do not fit the nodes
            raise DeviceError(error.message, CUDA_ERROR_INVALID_VALUE) from error

    def graph_launch(self, record: Record, args: Any) -> None:
        """Launch an executable graph."""
        self.device.launch_graph(record.seq, args.exec, args.stream)

    def graph_exec_destroy(self, record: Record, args: Any) -> None:
        """Destroy an executable graph."""
        self.device.destroy_graph(args.exec)

    # -- profiling ----------------------------------------------------------------
    def timed(self, record: Record, args: Any) -> None:
        """Do what another call does, and answer with when the device did it.

        Raises :class:`DeviceError`: the inner call's, INVALID_VALUE for one that cannot be timed.
        """
        received, inner = time.monotonic_ns(), BY_ID.get(args.call)
        if inner is None or inner.name not in TIMED:
            raise DeviceError(f"call {args.call} cannot be timed", CUDA_ERROR_INVALID_VALUE)
        work = Record(record.seq, inner.id, bytes(args.arguments), record.payload, record.thread, record.flags)
        decoded = decoders.decode(inner.id, work.args)

        def done(result: int, times: Sequence[spans.Span], data: Any) -> None:
            reply = b"" if result else decoders.encode_reply("timed", times=spans.encode(
                self.clock, received, time.monotonic_ns(), times))
            self._answer(record.seq, result, reply, data)

        self.device.timed(record.seq, args.stream, lambda: getattr(self, inner.name)(work, decoded), done)

    # -- streams and events ---------------------------------------------------
    def stream_create(self, record: Record, args: Any) -> None:
        """Make a stream."""
        self.device.create_stream(args.stream, args.context, args.flags, args.priority)

    def stream_destroy(self, record: Record, args: Any) -> None:
        """Destroy a stream."""
        self.device.destroy_stream(args.stream)

    def stream_synchronize(self, record: Record, args: Any) -> None:
        """Answer when a stream's work is complete."""
        self.device.synchronize(record.seq, args.stream, self._when_done(record))

    def stream_wait_event(self, record: Record, args: Any) -> None:
        """Let a stream wait for an event."""
        self.device.wait_event(record.seq, args.stream, args.event)

    def stream_memory_operation(self, record: Record, args: Any) -> None:
        """Write a value to memory, or wait for one, in stream order."""
        self.device.memory_operation(record.seq, args.stream, args.kind, args.address, args.value, args.flags)

    # -- collectives ------------------------------------------------------------
    def communicator_create(self, record: Record, args: Any) -> None:
        """Make one rank of a communicator."""
        try:
            members = collectives.decode_members(args.members, args.ranks)
        except Corrupt as error:
            raise DeviceError(f"journal position {record.seq}: {error.message}", CUDA_ERROR_INVALID_VALUE) from error
        self.device.create_communicator(args.communicator, args.context, args.ranks, args.rank, bytes(args.unique),
                                        members)
        self._reply(record, "communicator_create")

    def communicator_destroy(self, record: Record, args: Any) -> None:
        """End one rank of a communicator."""
        self.device.destroy_communicator(args.communicator, bool(args.abort))

    def collective_group(self, record: Record, args: Any) -> None:
        """Give a group of collectives to its streams. Raises :class:`DeviceError`, also for what does not decode."""
        try:
            operations = collectives.decode(args.operations)
        except Corrupt as error:
            raise DeviceError(f"journal position {record.seq}: {error.message}", CUDA_ERROR_INVALID_VALUE) from error
        if operations[0].stream != args.stream:
            raise DeviceError(f"stream {args.stream} is not the first operation's", CUDA_ERROR_INVALID_VALUE)
        self.device.collectives(record.seq, operations)

    def event_create(self, record: Record, args: Any) -> None:
        """Make an event."""
        self.device.create_event(args.event, args.context, args.flags)

    def event_destroy(self, record: Record, args: Any) -> None:
        """Destroy an event."""
        self.device.destroy_event(args.event)

    def event_record(self, record: Record, args: Any) -> None:
        """Record an event in a stream."""
        self.device.record_event(record.seq, args.event, args.stream)

    def event_synchronize(self, record: Record, args: Any) -> None:
        """Answer when an event is complete."""
        self.device.synchronize_event(record.seq, args.event, self._when_done(record))

    def event_elapsed(self, record: Record, args: Any) -> None:
        """Answer with the time between two events, ms."""
        self._reply(record, "event_elapsed", milliseconds=self.device.elapsed(args.start, args.end))

    def host_function(self, record: Record, args: Any) -> None:
        """Have the program run a host function, in stream order."""
        self.device.host_function(record.seq, args.stream, self._when_done(record))

    def host_function_done(self, record: Record, args: Any) -> None:
        """Note that the program ran a host function."""
        if args.call > self.restored:  # else its stream was let go before the module binary was made (lookahead.py)
            self.device.host_function_done(args.call)


#: Calls that a profiler may have timed.
TIMED = frozenset({"launch", "graph_launch", "memset", "memcpy_h2d", "memcpy_d2h", "memcpy_d2d", "memcpy2d_h2d",
                   "memcpy2d_d2h", "memcpy2d_d2d"})

#: Calls that no one awaits but whose failure breaks a promise made to the program.
_PROMISED = frozenset({"memory_map", "memory_allocate", "host_allocate", "context_create", "stream_create",
                       "event_create", "graph_instantiate", "graph_exec_update", "texture_place"})


def _box(args: Any) -> Box:
    return Box(args.level, args.x, args.y, args.z, args.width, args.height, args.depth)


def _read(decode: Callable[[Any], Any], record: Record) -> Any:
    try:
        return decode(record.payload)
    except Corrupt as error:
        raise DeviceError(f"journal position {record.seq}: {error.message}", CUDA_ERROR_INVALID_VALUE) from error


def parse_link_inputs(payload: Any) -> list[tuple[int, str, bytes]]:
    """The payload of ``link``: (u32 type, u32 name length, name, u64 length, data) …, bounds checked."""
    data = memoryview(payload)
    inputs: list[tuple[int, str, bytes]] = []
    at = 0
    while at < len(data):
        if at + 8 > len(data):
            raise DeviceError(f"link input at offset {at} is cut short", CUDA_ERROR_INVALID_VALUE)
        kind, name_length = struct.unpack_from("<II", data, at)
        at += 8
        if at + name_length + 8 > len(data):
            raise DeviceError(f"link input at offset {at} is cut short", CUDA_ERROR_INVALID_VALUE)
        name = bytes(data[at:at + name_length]).decode(errors="replace")
        at += name_length
        (length,) = struct.unpack_from("<Q", data, at)
        at += 8
        if length > len(data) - at:
            raise DeviceError(f"link input {name!r} at offset {at} is cut short", CUDA_ERROR_INVALID_VALUE)
        inputs.append((kind, name, bytes(data[at:at + length])))
        at += length
    return inputs
