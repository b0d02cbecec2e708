"""The wire calls: every kind of record that a journal may hold.

A *driver function* (``cuMemcpyHtoD_v2``) is what the program calls; a *wire
call* (``memcpy_h2d``) is what the shim appends to the journal for it. Several
driver functions share one wire call. The table below is the only place that
declares them: the generator (:mod:`rgpu.session.calls.generate`) makes the
C++ encoders and the Python decoders from it, and the replay and compaction
rules (:mod:`rgpu.session.objects.object_calls`) read ``effect`` from it.

Call ids are append-only: an id once released never changes its meaning.

Argument types
    ``u8 u16 u32 u64 i32 i64 f32 f64``  little-endian scalars
    ``addr``                            device address, u64
    ``context stream event module``     client-side handle numbers, u64
    ``blob``                            u32 length + bytes; blobs come last

Fixed-size arguments are packed without padding in the order given, then the
blobs. A call with ``payload=True`` carries bulk bytes after its arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Answer(Enum):
    """Whether the program's thread waits for an answer, and for how long."""

    ASYNC = "async"  #: sent, not awaited
    SYNC = "sync"  #: awaited; answered as soon as the worker has applied it
    WAIT = "wait"  #: awaited; answered when the work it names is complete


class Effect(Enum):
    """Effect of a call on the session; decides compaction and replay."""

    NONE = "none"  #: leaves nothing behind (waits, observations)
    WRITES = "writes"  #: changes memory only: the pages hold the result
    CREATES = "creates"  #: makes object ``args[0]`` of kind ``object_kind``
    CONFIGURES = "configures"  #: changes object ``args[0]``
    DESTROYS = "destroys"  #: ends object ``args[0]``
    STRUCTURAL = "structural"  #: kept in the history for ever (SEMANTICS 12)


@dataclass(frozen=True, slots=True)
class Arg:
    """An argument of a wire call: name and type."""

    name: str
    type: str


@dataclass(frozen=True, slots=True)
class Call:
    """One wire call: see the module docstring for the encoding."""

    id: int
    name: str
    answer: Answer
    effect: Effect
    args: tuple[Arg, ...] = ()
    reply: tuple[Arg, ...] = ()
    payload: bool = False  #: the record carries bulk bytes
    reply_payload: bool = False  #: the answer carries bulk bytes
    volatile: bool = False  #: the answer may differ on replay (SEMANTICS 5)
    object_kind: str | None = None
    reserved: bool = False  #: may use the journal's reserved space (SEMANTICS 19)
    doc: str = ""


def _args(text: str) -> tuple[Arg, ...]:
    """Parse ``"dst:addr stream:stream"`` into a tuple of :class:`Arg`."""
    return tuple(Arg(*item.split(":")) for item in text.split())


A, S, W = Answer.ASYNC, Answer.SYNC, Answer.WAIT
E = Effect

CALLS: tuple[Call, ...] = (
    Call(1, "session_open", A, E.STRUCTURAL, _args("version:u32 pid:u32 environment:blob"),
         doc="First record of every journal (seq 1). environment: NUL-separated K=V read at context creation."),
    Call(2, "completed", A, E.NONE, _args("observed:u64"), reserved=True,
         doc="The program learned that the work of call number `observed` is complete (SEMANTICS 1)."),
    Call(3, "context_create", A, E.CREATES, _args("context:context device:i32 flags:u32 primary:u8"),
         object_kind="context"),
    Call(4, "context_destroy", A, E.DESTROYS, _args("context:context"), object_kind="context",
         doc="Also primary-context reset or last release: destroys the context's objects."),
    Call(5, "context_limit", A, E.CONFIGURES, _args("context:context limit:i32 value:u64"), object_kind="context"),
    Call(6, "context_flags", A, E.CONFIGURES, _args("context:context flags:u32"), object_kind="context"),
    Call(7, "context_synchronize", W, E.NONE, _args("context:context"), doc="Waits for all work of its device."),
    Call(8, "memory_map", A, E.CREATES, _args("address:addr size:u64 device:i32"), object_kind="mapping",
         doc="Back [address, address+size) with zeroed physical memory; both multiples of 2 MiB."),
    Call(9, "memory_unmap", A, E.DESTROYS, _args("address:addr size:u64"), object_kind="mapping"),
    Call(10, "memory_allocate", A, E.CREATES, _args("address:addr size:u64"), object_kind="memory",
         doc="Make [address, address+size), inside mapped memory, valid for the program."),
    Call(11, "memory_free", A, E.DESTROYS, _args("address:addr"), object_kind="memory",
         doc="Only when no unfinished work is left (SEMANTICS 2)."),
    Call(12, "memory_free_wait", W, E.DESTROYS, _args("address:addr"), object_kind="memory",
         doc="Waits for all work of the device whose range it is in, then frees."),
    Call(13, "memset", A, E.WRITES, _args(
        "destination:addr pitch:u64 width:u64 height:u64 element:u8 value:u32 stream:stream"),
         doc="width counts elements of `element` (1, 2, 4) bytes; height 1 for the plain forms."),
    Call(14, "memcpy_h2d", A, E.WRITES, _args("destination:addr stream:stream"), payload=True),
    Call(15, "memcpy_d2h", W, E.NONE, _args("source:addr size:u64 stream:stream"), reply_payload=True),
    Call(16, "memcpy_d2d", A, E.WRITES, _args("destination:addr source:addr size:u64 stream:stream")),
    Call(17, "memcpy2d_h2d", A, E.WRITES, _args("destination:addr pitch:u64 width:u64 height:u64 stream:stream"),
         payload=True, doc="payload: height rows of width bytes, packed."),
    Call(18, "memcpy2d_d2h", W, E.NONE, _args("source:addr pitch:u64 width:u64 height:u64 stream:stream"),
         reply_payload=True),
    Call(19, "memcpy2d_d2d", A, E.WRITES, _args(
        "destination:addr destination_pitch:u64 source:addr source_pitch:u64 width:u64 height:u64 stream:stream")),
    Call(20, "module_load", S, E.CREATES, _args("module:module context:context library:u8 options:blob"),
         _args("table:blob log:blob"), payload=True, object_kind="module",
         doc="payload: fat binary, cubin or PTX text. table: see rgpu.session.objects.module_table."),
    Call(21, "module_unload", A, E.DESTROYS, _args("module:module"), object_kind="module"),
    Call(22, "function_attribute", A, E.CONFIGURES, _args("module:module function:u32 attribute:i32 value:i32"),
         object_kind="module"),
    Call(23, "launch", A, E.WRITES, _args(
        "module:module function:u32 grid_x:u32 grid_y:u32 grid_z:u32 block_x:u32 block_y:u32 block_z:u32 "
        "shared:u32 flags:u32 stream:stream parameters:blob attributes:blob"),
         doc="function: index in the module's table; flags bit 0: cooperative; "
             "attributes: raw CUlaunchAttribute entries, 72 bytes each."),
    Call(24, "stream_create", A, E.CREATES, _args("stream:stream context:context flags:u32 priority:i32"),
         object_kind="stream"),
    Call(25, "stream_destroy", A, E.DESTROYS, _args("stream:stream"), object_kind="stream",
         doc="Returns at once; the stream's work still runs to its end."),
    Call(26, "stream_synchronize", W, E.NONE, _args("stream:stream")),
    Call(27, "stream_wait_event", A, E.NONE, _args("stream:stream event:event flags:u32")),
    Call(28, "event_create", A, E.CREATES, _args("event:event context:context flags:u32"), object_kind="event"),
    Call(29, "event_destroy", A, E.DESTROYS, _args("event:event"), object_kind="event"),
    Call(30, "event_record", A, E.NONE, _args("event:event stream:stream flags:u32")),
    Call(31, "event_synchronize", W, E.NONE, _args("event:event")),
    Call(32, "event_elapsed", S, E.NONE, _args("start:event end:event"), _args("milliseconds:f32"), volatile=True),
    Call(33, "host_function", W, E.NONE, _args("stream:stream"),
         doc="The answer tells the shim to run the function; the stream goes on at host_function_done."),
    Call(34, "host_function_done", A, E.NONE, _args("call:u64"), reserved=True),
    Call(35, "host_allocate", A, E.CREATES, _args("address:addr size:u64 flags:u32"), object_kind="host_memory",
         doc="A pinned range: mirrored at its own address in the worker."),
    Call(36, "host_free", A, E.DESTROYS, _args("address:addr"), object_kind="host_memory"),
    Call(37, "link", S, E.NONE, _args("options:blob"), _args("image:blob log:blob"), payload=True,
         doc="cuLinkComplete: payload is a sequence of (u32 type, u32 name length, name, u64 length, data)."),
    Call(38, "host_mirror_write", A, E.WRITES, _args("address:addr stream:stream"), payload=True,
         doc="Bytes of a pinned range that a launch is about to read."),
    Call(39, "host_mirror_read", W, E.NONE, _args("address:addr size:u64 stream:stream"), reply_payload=True),
    Call(40, "graph_instantiate", A, E.CREATES, _args("exec:u64 context:context flags:u64"), payload=True,
         object_kind="graph_exec",
         doc="payload: nodes, see rgpu.session.objects.graphs. flags: CUgraphInstantiate_flags without the shim's."),
    Call(41, "graph_exec_update", A, E.CONFIGURES, _args("exec:u64"), payload=True, object_kind="graph_exec",
         doc="payload: (index, node) of each node that changes, see rgpu.session.objects.graphs."),
    Call(42, "graph_launch", A, E.WRITES, _args("exec:u64 stream:stream"),
         doc="Ordered behind the stream's work and behind earlier launches of the same exec."),
    Call(43, "graph_exec_destroy", A, E.DESTROYS, _args("exec:u64"), object_kind="graph_exec",
         doc="Returns at once; a launch of it that still runs goes on to its end."),
    Call(44, "host_word_write", A, E.WRITES, _args("address:addr stream:stream"), payload=True,
         doc="Part of a word of a pinned range that a kernel under way may poll: in the order of no other stream."),
    Call(50, "tensor_map", S, E.NONE, _args("form:u32 arguments:blob"), _args("map:blob"),
         doc="cuTensorMapEncode*: a descriptor of 128 bytes; arguments: docs/developers/devices.md, Tensor maps."),
    Call(51, "stream_memory_operation", A, E.WRITES, _args("stream:stream kind:u8 address:addr value:u64 flags:u32"),
         doc="kind: 0, 1 write of 32, 64 bits; 2, 3 wait for 32, 64 bits; flags as the driver's."),
    Call(70, "function_load", S, E.NONE, _args("module:module function:u32"), _args("attributes:blob"),
         doc="Load a function that the driver loads lazily; attributes: 16 x i32, as in the module table."),
    Call(71, "cluster_occupancy", S, E.NONE, _args(
        "module:module function:u32 form:u32 grid_x:u32 grid_y:u32 grid_z:u32 block_x:u32 block_y:u32 block_z:u32 "
        "shared:u32 cluster_x:u32 cluster_y:u32 cluster_z:u32"), _args("value:i32"),
         doc="form 0: cuOccupancyMaxActiveClusters, 1: cuOccupancyMaxPotentialClusterSize; "
             "cluster 0, 0, 0: none among the launch's attributes."),
    Call(80, "array_create", S, E.CREATES, _args(
        "array:u64 context:context address:addr width:u64 height:u64 depth:u64 format:u32 channels:u32 flags:u32 "
        "levels:u32"), object_kind="array",
         doc="A CUDA array, mipmapped unless levels is 0; address: of its memory (docs/developers/objects/arrays.md)."),
    Call(81, "array_destroy", A, E.DESTROYS, _args("array:u64"), object_kind="array",
         doc="Only when no unfinished work is left; its memory is freed by a call of its own."),
    Call(82, "array_to_memory", A, E.WRITES, _args(
        "array:u64 level:u32 x:u64 y:u64 z:u64 width:u64 height:u64 depth:u64 stream:stream"),
         doc="Brings a box of the array's memory up to date; x and width are bytes."),
    Call(83, "memory_to_array", A, E.WRITES, _args(
        "array:u64 level:u32 x:u64 y:u64 z:u64 width:u64 height:u64 depth:u64 stream:stream"),
         doc="Brings a box of the array up to date from its memory; x and width are bytes."),
    Call(84, "texture_create", S, E.CREATES, _args(
        "texture:u64 context:context surface:u8 resource:blob sampling:blob view:blob"), _args("handle:u64"),
         volatile=True, object_kind="texture",
         doc="A texture object (surface 0) or surface object (1); the blobs: docs/developers/objects/arrays.md."),
    Call(85, "texture_place", A, E.CONFIGURES, _args("texture:u64 handle:u64"), object_kind="texture",
         doc="The program was given this handle: follows each texture_create that succeeded."),
    Call(86, "texture_destroy", A, E.DESTROYS, _args("texture:u64"), object_kind="texture"),
    Call(100, "memory_alias", A, E.CREATES, _args("address:addr size:u64 source:addr"), object_kind="alias",
         doc="The mapping at `source`, all `size` bytes of it, stands at `address` as well; in multiples of 2 MiB. "
             "The mapping outlives its aliases, and may move beside them (memory_move)."),
    Call(101, "memory_unalias", A, E.DESTROYS, _args("address:addr size:u64"), object_kind="alias",
         doc="Takes an alias away as it was made, when no unfinished work uses it."),
    Call(102, "memory_move", A, E.CONFIGURES, _args("address:addr size:u64 to:addr"), object_kind="mapping",
         doc="A mapping, in which nothing is allocated, stands at `to` from now on, with its bytes; its aliases stay."),
    Call(110, "communicator_create", S, E.CREATES, _args(
        "communicator:u64 context:context ranks:u32 rank:u32 unique:blob members:blob"), object_kind="communicator",
         doc="One rank of an NCCL communicator. unique: the same for all its ranks, for no other communicator. "
             "members: the session of each rank (u16 length, UTF-8), or empty: all are in this one."),
    Call(111, "communicator_destroy", A, E.DESTROYS, _args("communicator:u64 abort:u8"), object_kind="communicator",
         doc="abort: its unfinished operations end without a result."),
    Call(112, "collective_group", A, E.WRITES, _args("stream:stream operations:blob"),
         doc="All between ncclGroupStart and ncclGroupEnd, or one collective; stream: the first operation's. "
             "operations: docs/developers/objects/collectives.md."),
    Call(120, "memory_export", S, E.CREATES, _args("address:addr size:u64 secret:blob"), _args("token:blob"),
         object_kind="export",
         doc="cuIpcGetMemHandle of the allocation at `address`: other sessions may map it who show the token, which "
             "holds the 16 random bytes of `secret`. It ends with the allocation."),
    Call(121, "memory_import", S, E.CREATES, _args("address:addr size:u64 device:i32 token:blob"),
         object_kind="import",
         doc="cuIpcOpenMemHandle: the mappings that hold another session's allocation stand at `address`, `size` bytes "
             "in all; what of them may be used says a memory_allocate."),
    Call(122, "memory_unimport", A, E.DESTROYS, _args("address:addr"), object_kind="import",
         doc="cuIpcCloseMemHandle, when no unfinished work uses it and nothing is allocated there."),
    Call(123, "event_export", S, E.CREATES, _args("event:event context:context secret:blob"), _args("token:blob"),
         object_kind="event_export",
         doc="cuIpcGetEventHandle: other sessions may wait for the event who show the token. Ends with the event."),
    Call(124, "event_mark", A, E.NONE, _args("event:event"),
         doc="Follows event_export, and each event_record of an exported event: once it is applied, who waits for the "
             "event elsewhere waits for that record."),
    Call(125, "event_import", S, E.CREATES, _args("event:event context:context token:blob"),
         object_kind="event_import", doc="cuIpcOpenEventHandle: another session's event, with a number of this one's."),
    Call(126, "event_unimport", A, E.DESTROYS, _args("event:event"), object_kind="event_import"),
    Call(127, "imported_event_wait", A, E.NONE, _args("stream:stream event:event"),
         doc="The stream waits for the record that is the last one marked when this is applied."),
    Call(128, "imported_event_synchronize", W, E.NONE, _args("event:event")),
    Call(129, "imported_event_query", S, E.NONE, _args("event:event"), _args("complete:u8"), volatile=True),
    Call(130, "applied", S, E.NONE,
         doc="Answered when all calls before it have been applied; says nothing of their work."),
    Call(160, "timed", W, E.WRITES, _args("call:u16 stream:stream arguments:blob"), _args("times:blob"), payload=True,
         reply_payload=True, volatile=True,
         doc="A launch, copy or memset (`call`, its `arguments` and payload) whose times a profiler is to see; "
             "when its work is complete. times: rgpu.session.objects.spans."),
)

BY_ID: dict[int, Call] = {call.id: call for call in CALLS}
BY_NAME: dict[str, Call] = {call.name: call for call in CALLS}
#: Ids of calls that are answered, also where no thread of the program waits for the answer.
ANSWERED = frozenset(call.id for call in CALLS if call.answer is not Answer.ASYNC)

#: Streams that need no stream_create: the legacy stream of the session's device n has the number n.
LEGACY_STREAM = 0
#: The first number that the shim hands out to a created object.
FIRST_HANDLE = 16
