"""The protocol that a device implements for a session (``cpu`` and ``cuda`` do).

A device belongs to one worker and so to one session. Where the session has several GPUs of a host, the device
stands for all of them, and an address, a context or a legacy stream (numbered as the GPU) selects the one
that is meant. Objects are named by the client's numbers. Two kinds of method: *immediate* ones take effect before they
return; *ordered* ones take ``seq`` (the call's journal position) and a stream,
return at once, and are executed in stream order as CUDA defines it (the legacy
stream 0 orders with blocking streams; streams run independently otherwise).

Ordered methods never raise for errors that appear only in execution: such an
error becomes the device's sticky error. They raise :class:`DeviceError` (with the
CUresult that the driver would give) for an error of the call itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rgpu.checkpoint.codec.frames import FramePool
from rgpu.checkpoint.pages.pagehash import PageHashes, Ranges
from rgpu.checkpoint.pages.ring import PageRing
from rgpu.session.addresses import GRANULE, PAGE
from rgpu.session.objects.arrays import ArrayShape, Box
from rgpu.session.objects.collectives import Operation
from rgpu.session.objects.graphs import Node
from rgpu.session.objects.module_table import FunctionInfo, GlobalVariable, ModuleTable
from rgpu.session.objects.spans import Span

__all__ = ["GRANULE", "PAGE", "Device", "DeviceFacts", "Done", "FunctionInfo", "GlobalVariable", "Launch",
           "ModuleTable", "Region"]


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Facts that a client may query about a device, read once at session start."""

    name: str
    uuid: bytes  #: 16 bytes
    total_memory: int  #: bytes
    pci: tuple[int, int, int]  #: domain, bus, device
    compute_capability: tuple[int, int]
    driver_version: int  #: as cuDriverGetVersion, 13000 = 13.0
    attributes: dict[int, int] = field(default_factory=dict)  #: CUdevice_attribute → value


@dataclass(frozen=True, slots=True)
class Region:
    """A range of device memory whose bytes belong to the session's state.

    ``kind``: ``mapped`` (granules of the allocator), ``global`` (a module's
    variable; its address is the device's choice), ``pinned`` (a mirror).
    """

    address: int
    size: int
    kind: str
    owner: int = 0  #: module handle for ``global``
    name: str = ""  #: the variable's name for ``global``


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: function, grid, block (in threads), dynamic shared memory (bytes), stream, parameters."""

    module: int
    function: int  #: index in the module's table
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int  #: dynamic shared memory, bytes
    stream: int
    parameters: bytes  #: packed in the layout of the function's parameter table
    cooperative: bool = False
    attributes: bytes = b""  #: raw CUlaunchAttribute entries, 72 bytes each


#: Called from any thread when ordered work is complete: (CUresult, data or None).
Done = Callable[[int, Any], None]


#: Called once the work is complete: (CUresult, spans of the work, bytes that a copy to the host read or None).
TimesDone = Callable[[int, Sequence[Span], Any], None]


class Device(Protocol):
    """See the module docstring. Thread-safe: one applying thread, many others."""

    facts: DeviceFacts

    # -- memory (immediate) -------------------------------------------------
    def map(self, address: int, size: int) -> None:
        """Back [address, address+size) with zeros. Both multiples of GRANULE."""

    def unmap(self, address: int, size: int) -> None:
        """Remove the mapping of ``size`` bytes at ``address``, as it was made. Raises :class:`DeviceError`."""

    def alias(self, address: int, size: int, source: int) -> None:
        """Map the first ``size`` bytes of the mapping at ``source`` at ``address``, too; all multiples of GRANULE.

        The region is the mapping alone: its pages are read, hashed and written once. Raises :class:`DeviceError`.
        """

    def unalias(self, address: int, size: int) -> None:
        """Remove an alias, as it was made, that contains no valid allocation. Raises :class:`DeviceError`."""

    def share(self, address: int, size: int) -> list[tuple[int, int]]:
        """Make the mappings that hold an allocation mappable by other workers; return (address, bytes) of each.

        Raises :class:`DeviceError`: INVALID_VALUE where there is no such allocation, NOT_READY where work uses it.
        """

    def allocated(self, address: int, size: int) -> bool:
        """Return whether [address, address+size) is an allocation as it was made. For any thread."""

    def shared(self, address: int, size: int) -> int:
        """Return a file descriptor of the memory of a shared mapping; the caller closes it. For any thread.

        Raises :class:`DeviceError` if the mapping no longer exists.
        """

    def map_shared(self, address: int, pieces: Sequence[tuple[int, int]]) -> None:
        """Map memory of other workers, (descriptor, bytes) of each piece, one behind the other from ``address`` on.

        It does not become a region of this session. Raises :class:`DeviceError`.
        """

    def unmap_shared(self, address: int) -> None:
        """Remove a mapping of :meth:`map_shared` that contains no valid allocation. Raises :class:`DeviceError`."""

    def move_mapping(self, address: int, size: int, to: int) -> None:
        """Move a mapping that contains no valid allocation to the address ``to``; its bytes and aliases stay.

        Raises :class:`DeviceError`.
        """

    def allocate(self, address: int, size: int) -> None:
        """Make a sub-range of mapped memory valid for kernels and copies."""

    def free(self, address: int) -> None:
        """Free the allocation that begins at ``address``. Raises :class:`DeviceError`."""

    def host_allocate(self, address: int, size: int) -> None:
        """Make the mirror of a pinned host range, at the range's own address."""

    def host_free(self, address: int) -> None:
        """Free the mirror of the pinned range that begins at ``address``. Raises :class:`DeviceError`."""

    def mirror_write(self, seq: int, stream: int, address: int, data: Any) -> None:
        """Ordered: write bytes of a pinned range, as the program's CPU wrote them, into its mirror."""

    def mirror_read(self, seq: int, stream: int, address: int, size: int, done: Done) -> None:
        """Ordered: read a mirror; calls done(result, its bytes; None with an error)."""

    # -- objects (immediate) ------------------------------------------------
    def create_context(self, context: int, flags: int, primary: bool, device: int = 0) -> None:
        """Make a context. ``device``: the session's number of the GPU, where it has several."""

    def destroy_context(self, context: int) -> None:
        """Destroy a context and what belongs to it. Raises :class:`DeviceError`."""

    def set_limit(self, context: int, limit: int, value: int) -> None:
        """Set a CUlimit of a context. Raises :class:`DeviceError`."""

    def create_stream(self, stream: int, context: int, flags: int, priority: int) -> None:
        """Make a stream; ``flags`` and ``priority`` as for cuStreamCreateWithPriority. Raises :class:`DeviceError`."""

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream; its work is completed. Raises :class:`DeviceError`."""

    def create_event(self, event: int, context: int, flags: int) -> None:
        """Make an event; ``flags`` as for cuEventCreate. Raises :class:`DeviceError`."""

    def destroy_event(self, event: int) -> None:
        """Destroy an event. Raises :class:`DeviceError`."""

    def load(self, module: int, binary: bytes, options: bytes, library: bool, device: int = 0,
             places: Sequence[GlobalVariable] = ()) -> tuple[ModuleTable, str]:
        """Load on one of the session's devices; returns the table and the compiler's log. Raises DeviceError.

        ``places``: the former addresses of its variables; in a rebuild the device tries to put them there again.
        """

    def placed(self) -> None:
        """Free the memory that was taken to place variables: the modules of a rebuild are loaded."""

    def unload(self, module: int) -> None:
        """Unload a module and free its variables. Raises :class:`DeviceError`."""

    def link(self, inputs: list[tuple[int, str, bytes]], options: bytes) -> tuple[bytes, str]:
        """Link (cuLink*): (CUjitInputType, name, data) → a module binary that load() takes, and a log."""

    def function_attributes(self, module: int, function: int) -> tuple[int, ...]:
        """Load the function and return its 16 attributes: the table of a lazy load has -1 for some."""

    def tensor_map(self, form: int, arguments: bytes) -> bytes:
        """Return the 128 bytes that the driver encodes (docs/developers/devices.md, "Tensor maps").

        Raises DeviceError.
        """

    def cluster_occupancy(self, module: int, function: int, form: int, grid: tuple[int, int, int],
                          block: tuple[int, int, int], shared: int, cluster: tuple[int, int, int]) -> int:
        """Return the driver's answer to ``cuOccupancyMaxActiveClusters`` (form 0), ``…PotentialClusterSize`` (1).

        Only the driver has the data: which multiprocessors can share a cluster. Raises DeviceError.
        """

    def set_function_attribute(self, module: int, function: int, attribute: int, value: int) -> None:
        """Set a CUfunction_attribute of a module's function. Raises :class:`DeviceError`."""

    def instantiate_graph(self, graph: int, context: int, flags: int, nodes: list[Node]) -> None:
        """Make an executable graph of these nodes. ``flags``: CUgraphInstantiate_flags."""

    def update_graph(self, graph: int, changes: dict[int, Node]) -> None:
        """Set other parameters for these nodes (by index), from the next launch on; earlier launches keep theirs."""

    def destroy_graph(self, graph: int) -> None:
        """Destroy an executable graph; launches given before complete."""

    # -- arrays, texture and surface objects (docs/developers/objects/arrays.md) --------
    def create_array(self, array: int, context: int, address: int, shape: ArrayShape) -> None:
        """Make an array whose memory is the allocation at ``address``. Raises :class:`DeviceError`."""

    def destroy_array(self, array: int) -> None:
        """Destroy an array; its memory stays. Raises :class:`DeviceError`."""

    def array_to_memory(self, seq: int, stream: int, array: int, box: Box) -> None:
        """Ordered: bring a box of the array's memory up to date. Raises :class:`DeviceError`."""

    def memory_to_array(self, seq: int, stream: int, array: int, box: Box) -> None:
        """Ordered: bring a box of the array up to date from its memory. Raises :class:`DeviceError`."""

    def spread_arrays(self) -> None:
        """Copy every array's memory into the array, after pages were written. Only while drained; the inverse is part
        of :meth:`drain`."""

    def reserve_handles(self, context: int, reserved: bool | None, owner: int) -> None:
        """Give no new object a handle of a texture that the program may still hold, until that texture was made again.

        Called before an array or a texture is made: True in a recovery or a replay, None in a move, which has all
        objects in their order. ``owner``: number of owners that the session had. Raises :class:`DeviceError`.
        """

    def create_texture(self, texture: int, context: int, surface: bool, resource: bytes, sampling: bytes,
                       view: bytes) -> int:
        """Make a texture or surface object; returns the handle that kernels use. Raises DeviceError."""

    def place_texture(self, texture: int, handle: int) -> None:
        """Give the object ``handle``, which the program holds. Raises DeviceError where that is impossible."""

    def destroy_texture(self, texture: int) -> None:
        """Destroy a texture or surface object. Raises :class:`DeviceError`."""

    # -- ordered work -------------------------------------------------------
    def launch_graph(self, seq: int, graph: int, stream: int) -> None:
        """Launch a graph behind the stream's work and behind the graph's own earlier launches in any stream."""

    def launch(self, seq: int, launch: Launch) -> None:
        """Launch a kernel in its stream's order, as call ``seq``. Raises :class:`DeviceError`."""

    def copy_in(self, seq: int, stream: int, destination: int, pitch: int, width: int, height: int, data: Any) -> None:
        """Copy host bytes (``height`` rows of ``width`` bytes, packed) to device memory of that pitch.

        ``data`` must not change before ``seq`` is complete.
        """

    def copy_out(self, seq: int, stream: int, source: int, pitch: int, width: int, height: int, done: Done) -> None:
        """Copy rows to the host; calls done(result, packed bytes: a bytes-like object; None with an error)."""

    def copy(self, seq: int, stream: int, destination: int, destination_pitch: int,
             source: int, source_pitch: int, width: int, height: int) -> None:
        """Copy ``height`` rows of ``width`` bytes within device memory, in stream order; pitches in bytes."""

    def fill(self, seq: int, stream: int, destination: int, pitch: int, width: int, height: int,
             element: int, value: int) -> None:
        """Set ``width`` × ``height`` elements to ``value``, in stream order; ``width`` counts elements of ``element``
        bytes.
        """

    def memory_operation(self, seq: int, stream: int, kind: int, address: int, value: int, flags: int) -> None:
        """Write a word (kind 0: 32, 1: 64 bits), or hold the stream until one compares (2, 3; flags: how)."""

    def reach_ranks(self, exchange: Any) -> None:
        """Set the connection to ranks in other sessions, a :class:`rgpu.server.collectives.exchange.Exchange`."""

    def create_communicator(self, communicator: int, context: int, ranks: int, rank: int, unique: bytes,
                            members: Sequence[str] = ()) -> None:
        """Make one rank of the communicator that ``unique`` names. ``members``: the session of each rank; empty: all
        are in this session.
        """

    def destroy_communicator(self, communicator: int, abort: bool) -> None:
        """End one rank. ``abort``: its unfinished operations, and those that wait for it, end without a result."""

    def collectives(self, seq: int, operations: Sequence[Operation]) -> None:
        """Ordered, in the streams of all operations: execute an NCCL group, complete when all its operations are."""

    def communicators(self) -> list[dict[str, Any]]:
        """Return, for each communicator, the last operation of each rank: number, call, bytes, missing ranks."""

    def record_event(self, seq: int, event: int, stream: int) -> None:
        """Record an event behind the stream's work so far."""

    def wait_event(self, seq: int, stream: int, event: int) -> None:
        """Let the stream's later work wait for an event's last record."""

    def host_function(self, seq: int, stream: int, reached: Done) -> None:
        """Call reached(0, None) when the stream arrives at the call; the stream waits for host_function_done(seq).

        After a sticky error it is reached(error, None), and the stream does not wait.
        """

    def host_function_done(self, seq: int) -> None:
        """Let the stream go on behind host function ``seq``. Raises DeviceError(400) if none waits.

        May be called before the stream arrives there (in a replay): then the stream does not wait.
        """

    def synchronize(self, seq: int, stream: int | None, done: Done) -> None:
        """Call done() when all work given so far to the stream (None: to any) is complete."""

    def synchronize_device(self, seq: int, device: int, done: Done) -> None:
        """Call done() when all work given so far to all streams of one of the session's devices is complete."""

    def synchronize_event(self, seq: int, event: int, done: Done) -> None:
        """Call ``done(result, None)`` when the event's last record is complete."""

    def timed(self, seq: int, stream: int, work: Callable[[], None], done: TimesDone) -> None:
        """Run ``work``, which gives the device call ``seq`` in that stream, and time it. The call's own done() is
        replaced by ``done``, which is called in the stream's order.

        Raises :class:`DeviceError`, and whatever ``work`` raises.
        """

    # -- progress -----------------------------------------------------------
    def on_progress(self, notify: Callable[[], None]) -> None:
        """Set ``notify``, which is called (from any thread, coalesced) when progress() may have changed."""

    def progress(self) -> tuple[set[int], dict[int, int]]:
        """Return (seqs of ordered work not yet complete, {stream: highest seq complete in it})."""

    def unfinished(self) -> tuple[int, str] | None:
        """Return the oldest call of ordered work that is not complete, and what it is: "kernel NAME", …, empty where
        that is not known. None if all work is complete."""

    def is_complete(self, seq: int) -> bool:
        """Return whether the work of call ``seq`` is complete."""

    def wait_complete(self, seq: int, timeout: float | None = None) -> bool:
        """Wait for the work of call ``seq``, ``timeout`` seconds at most (None: for ever); returns whether it is
        complete.
        """

    def drain(self, timeout: float) -> bool:
        """Wait until no ordered work is left and every done() has returned; False after ``timeout`` seconds.

        On success every array's contents have been copied to its memory.
        """

    def busy_seconds(self) -> float:
        """Return the seconds so far in which the session had work on the device, or work that waited for its own."""

    @property
    def error(self) -> int:
        """The sticky CUresult, 0 while there is none."""

    def error_detail(self) -> str:
        """Return what is known of the sticky error, in words; empty without one."""

    # -- state: exact only while drained; read() and hash_pages() may be used while work runs, as a hint ----
    def regions(self) -> list[Region]:
        """List the memory whose bytes belong to the session's state."""

    def pins(self) -> list[str]:
        """List the reasons why the session cannot leave this device; empty when it can."""

    def read(self, address: int, size: int) -> bytes:
        """Return bytes of a region while no work changes them. Raises :class:`DeviceError`."""

    def write(self, address: int, data: Any) -> None:
        """Set bytes of a region while no work uses them. Raises :class:`DeviceError`."""

    def hash_pages(self, region: Region, key: bytes) -> np.ndarray:
        """Return (pages, 2) uint64: the keyed 128-bit hash of each PAGE of the region (see pagehash)."""

    def hash_regions(self, regions: Sequence[Region], key: bytes) -> list[PageHashes]:
        """Hash the pages of many regions in one batch; also return which of their pages are all zeros."""

    def copy_and_hash(self, pages: Ranges, staging: int, key: bytes) -> PageHashes:
        """Copy the pages of (address, bytes) ranges, in order, and hash the copies; page i to ``staging`` + PAGE · i.

        ``staging``: the address of memory that the device can write, a multiple of 16; a short last page is filled
        up with zeros there. The hash is that of the bytes at ``staging``, even if work changes the source meanwhile.
        """

    def frames(self) -> FramePool:
        """Return the frames through which checkpoints are read and written. One checkpoint at a time uses them."""

    def page_ring(self) -> PageRing:
        """Return the device's one staging ring, made when the device was opened. One page stream uses it at a time."""

    def write_pages(self, runs: Sequence[tuple[int, int, Any]]) -> None:
        """Write (address, size, bytes or None for zeros) of state, in order, in one batch.

        Returns when the bytes were read and are in place for all work given to the device later. Threads may call
        it concurrently as long as their ranges do not overlap.
        """

    # -- memory for copies of pages, outside the session's state (see rgpu.checkpoint.pages.frozen) ------------------
    def free_memory(self) -> int:
        """Return the bytes that :meth:`stage` can still allocate, as far as is known now."""

    def stage(self, size: int) -> int:
        """Allocate memory for ``copy_and_hash``; return its address, a multiple of 256. Raises DeviceError (2) when
        there is not enough.
        """

    def unstage(self, address: int) -> None:
        """Free the staging memory at ``address``."""

    def read_staged(self, address: int, size: int) -> bytes:
        """Return bytes of staged memory."""

    def elapsed(self, start: int, end: int) -> float:
        """Return the milliseconds between two recorded timing events. Raises DeviceError (400, 600 not ready)."""

    def event_states(self) -> dict[int, int | None]:
        """Return {event: nanoseconds on the session clock when its last record completed, or None}."""

    def restore_event_states(self, states: dict[int, int | None]) -> None:
        """Set the completion times of events; the form is that of :meth:`event_states`."""

    def clock(self) -> int:
        """Return the session clock, ns."""

    def set_clock(self, now: int) -> None:
        """Set the session's clock to ``now``, ns."""

    def close(self) -> None:
        """Free everything on the device; running work is given one second to complete."""
