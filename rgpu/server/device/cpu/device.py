"""The ``cpu`` device: executes PTX and copies on the host's own cores and memory.

A facade: memory and its checks are in :mod:`.memory`, the order of streams in :mod:`.schedule`, threads in
:mod:`.streams`, the work that they execute in :mod:`.work`, modules and launch checks in :mod:`.modules`, copies of
pages in :mod:`.staged`. See :class:`rgpu.checkpoint.device.Device` for the contract.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import structlog

from rgpu.checkpoint.codec.frames import FramePool, host_pool
from rgpu.checkpoint.device import Done, Launch, ModuleTable, Region, TimesDone
from rgpu.checkpoint.pages import pagehash
from rgpu.checkpoint.pages.ring import HostRing
from rgpu.server.collectives.communicators import Communicators
from rgpu.server.collectives.exchange import Exchange
from rgpu.server.derived import Derived
from rgpu.server.device.cpu.facts import available_memory, make_facts
from rgpu.server.device.cpu.graphs import Graphs
from rgpu.server.device.cpu.memory import Memory
from rgpu.server.device.cpu.modules import Engine, Modules
from rgpu.server.device.cpu.peer import CpuPeer
from rgpu.server.device.cpu.printed import Printed
from rgpu.server.device.cpu.schedule import Op
from rgpu.server.device.cpu.staged import StagedPages
from rgpu.server.device.cpu.streams import Streams
from rgpu.server.device.cpu.textures.objects import Textures
from rgpu.server.device.cpu.work import collectives, words
from rgpu.server.device.cpu.work.copies import Copies
from rgpu.server.device.cpu.work.launches import Launches
from rgpu.server.device.loads import LoadNotes
from rgpu.session.errors import DeviceError
from rgpu.session.objects.arrays import ArrayShape, Box
from rgpu.session.objects.collectives import Operation
from rgpu.session.objects.graphs import Node
from rgpu.session.objects.module_table import GlobalVariable

log = structlog.get_logger(__name__)

INVALID_DEVICE, INVALID_HANDLE, INVALID_CONTEXT, NOT_READY = 101, 400, 201, 600
CLOSE_SECONDS = 5.0
SETTLED = 10.0  #: seconds to wait for work that uses memory which is to be mapped twice; the client has waited


class CpuDevice:
    """One ``cpu`` device, for one session.

    ``ordinal``: which device of the host this is (uuid, PCI numbers).
    ``memory``: bytes for mappings and globals. ``threads``: host threads a
    kernel may use. ``host``: the node's name, part of the uuid. ``index``: the
    session's own number for the device, which decides the address range.
    ``others``: the session's further devices of the host; all of them
    are this machine's cores and memory, and reach each other's.
    ``engine``: the PTX engine. ``text``: what kernels print.
    """

    shares_processors = True  #: kernels run where pages are hashed and copied

    def __init__(self, ordinal: int = 0, memory: int = 4 << 30, threads: int = 2, *, host: str = "", index: int = 0,
                 engine: Engine | None = None, others: Sequence[int] = ()) -> None:
        self.facts = make_facts(ordinal, memory, host)
        count = 1 + len(others)
        ptx: Any = engine or importlib.import_module("rgpu.server.device.cpu.ptx")
        self._memory = Memory(memory, index, count)
        self._first, self._count = index, count
        self.peer = CpuPeer(self._memory)
        self.notes, self.derived = LoadNotes(), Derived()
        if engine is None:
            importlib.import_module("rgpu.server.device.cpu.ptx").keep_in(self.derived)
        self._modules = Modules(self._memory, ptx, self.notes)
        self._staged = StagedPages(self._memory)
        self._streams = self.order_gates = Streams(count)
        self._textures = Textures()
        self.text = Printed()
        self._copies = Copies(self._memory)
        self._launches = Launches(ptx, self._memory, self._modules, self._textures, self.text, threads,
                                  self._streams.cancel)
        self._graphs = Graphs(self._launches, self._copies, self._cancelled)
        self._communicators = Communicators(lambda address, size: self._memory.check(address, size, "buffer"))
        self._collective_memory = collectives.CollectiveMemory(self._copies)
        self._contexts: dict[int, dict[int, int]] = {}
        self._device_of: dict[int, int] = {}  #: context → device
        self._clock_offset = -time.monotonic_ns()
        self._ring = HostRing()
        self._frames = host_pool(self)
        self._closed = False

    def resize(self, memory: int) -> None:
        """Set the quota for mappings and globals, in bytes; only while nothing is mapped (a warm worker's device)."""
        self._memory.resize(memory)
        self.facts = replace(self.facts, total_memory=memory)

    def limit_host(self, size: int) -> None:
        """Set the bytes that pinned memory may take; 0: no bound."""
        self._memory.pinned_total = size

    # -- memory ---------------------------------------------------------------------
    def map(self, address: int, size: int) -> None:
        self._memory.map(address, size)

    def unmap(self, address: int, size: int) -> None:
        self._memory.unmap(address, size)

    def alias(self, address: int, size: int, source: int) -> None:
        if not self._memory.is_shared(source) and not self._streams.drain(SETTLED):
            raise DeviceError(f"work uses the memory at {source:#x}, which is to have a second address",
                              NOT_READY)
        self._memory.alias(address, size, source)

    def unalias(self, address: int, size: int) -> None:
        self._memory.unalias(address, size)

    def share(self, address: int, size: int) -> list[tuple[int, int]]:
        found = self._memory.holding(address, size)
        if not all(self._memory.is_shared(at) for at, _ in found) and not self._streams.drain(SETTLED):
            raise DeviceError(f"work uses the memory at {address:#x}, which others are to map", NOT_READY)
        for at, length in found:
            self._memory.share(at, length)
        return found

    def allocated(self, address: int, size: int) -> bool:
        return self._memory.allocated(address, size)

    def shared(self, address: int, size: int) -> int:
        return self._memory.descriptor(address, size)

    def map_shared(self, address: int, pieces: Sequence[tuple[int, int]]) -> None:
        self._memory.map_foreign(address, pieces)

    def unmap_shared(self, address: int) -> None:
        self._memory.unmap_foreign(address)

    def move_mapping(self, address: int, size: int, to: int) -> None:
        self._memory.move(address, size, to)

    def allocate(self, address: int, size: int) -> None:
        self._memory.allocate(address, size)

    def free(self, address: int) -> None:
        self._memory.free(address)

    def host_allocate(self, address: int, size: int) -> None:
        self._memory.host_allocate(address, size)

    def host_free(self, address: int) -> None:
        self._memory.host_free(address)

    def tensor_map(self, form: int, arguments: bytes) -> bytes:
        raise DeviceError("this device has no tensor maps", 801)

    def cluster_occupancy(self, module: int, function: int, form: int, grid: tuple[int, int, int],
                          block: tuple[int, int, int], shared: int, cluster: tuple[int, int, int]) -> int:
        raise DeviceError("this device has no clusters", 801)

    def memory_operation(self, seq: int, stream: int, kind: int, address: int, value: int, flags: int) -> None:
        size = words.size_of(kind)
        self._memory.check_rows(address, size, size, 1, "word")
        run = words.work(kind, lambda: self._copies.rows(address, size, size, 1, "word"), value, flags,
                         self._streams.cancel)
        self._streams.submit(Op(seq, run, what="a stream memory operation"), stream)

    def mirror_write(self, seq: int, stream: int, address: int, data: Any) -> None:
        self.copy_in(seq, stream, address, len(data), len(data), 1, data)

    def mirror_read(self, seq: int, stream: int, address: int, size: int, done: Done) -> None:
        self.copy_out(seq, stream, address, size, size, 1, done)

    # -- objects ----------------------------------------------------------------------
    def create_context(self, context: int, flags: int, primary: bool, device: int = 0) -> None:
        if context in self._contexts:
            raise DeviceError(f"context {context} exists", INVALID_CONTEXT)
        self._check_device(device)
        self._contexts[context], self._device_of[context] = {}, device

    def _check_device(self, device: int) -> None:
        if not 0 <= device < self._count:
            raise DeviceError(f"the session has {self._count} devices, and no device {device}", INVALID_DEVICE)

    def destroy_context(self, context: int) -> None:
        """Destroy a context with its streams and events; with the last context, every module and allocation as well."""
        if self._contexts.pop(context, None) is None:
            raise DeviceError(f"no context {context}", INVALID_CONTEXT)
        del self._device_of[context]
        with self._streams.schedule.mutex:
            self._streams.schedule.destroy_context(context)
        self._graphs.destroy_context(context)
        self._textures.destroy_context(context)
        self._communicators.destroy_context(context)
        if not self._contexts:
            self._modules.unload_all()
            self._memory.free_all()

    def set_limit(self, context: int, limit: int, value: int) -> None:
        """Keep the value of a CUlimit; nothing here depends on it."""
        limits = self._contexts.get(context)
        if limits is None:
            raise DeviceError(f"no context {context}", INVALID_CONTEXT)
        limits[limit] = value

    def create_stream(self, stream: int, context: int, flags: int, priority: int) -> None:
        with self._streams.schedule.mutex:
            self._streams.schedule.create_stream(stream, context, flags, self._device_of.get(context, 0))

    def destroy_stream(self, stream: int) -> None:
        with self._streams.schedule.mutex:
            self._streams.schedule.destroy_stream(stream)

    def create_event(self, event: int, context: int, flags: int) -> None:
        with self._streams.schedule.mutex:
            self._streams.schedule.create_event(event, context, flags)

    def destroy_event(self, event: int) -> None:
        with self._streams.schedule.mutex:
            self._streams.schedule.destroy_event(event)

    def load(self, module: int, binary: bytes, options: bytes, library: bool, device: int = 0,
             places: Sequence[GlobalVariable] = ()) -> tuple[ModuleTable, str]:
        """Load a module. Its variables' addresses follow from the order of loads alone: ``places`` is not used."""
        self._check_device(device)
        return self._modules.load(module, bytes(binary), self._first + device, options)

    def placed(self) -> None:
        """Do nothing: no addresses were held for variables."""

    def unload(self, module: int) -> None:
        self._modules.unload(module)

    def link(self, inputs: list[tuple[int, str, bytes]], options: bytes) -> tuple[bytes, str]:
        return self._modules.link(inputs, options)

    def function_attributes(self, module: int, function: int) -> tuple[int, ...]:
        return self._modules.attributes(module, function)

    def set_function_attribute(self, module: int, function: int, attribute: int, value: int) -> None:
        self._modules.set_attribute(module, function, attribute, value)

    def instantiate_graph(self, graph: int, context: int, flags: int, nodes: list[Node]) -> None:
        if context not in self._contexts:
            raise DeviceError(f"no context {context}", INVALID_CONTEXT)
        self._graphs.instantiate(graph, context, nodes)

    def update_graph(self, graph: int, changes: dict[int, Node]) -> None:
        self._graphs.update(graph, changes)

    def destroy_graph(self, graph: int) -> None:
        self._graphs.destroy(graph)

    # -- arrays, textures, surfaces: an array is its memory -------------------------------
    def create_array(self, array: int, context: int, address: int, shape: ArrayShape) -> None:
        shape.check()
        self._memory.check(address, shape.size, "memory of an array")
        self._textures.create_array(array, context, address, shape)

    def destroy_array(self, array: int) -> None:
        self._textures.destroy_array(array)

    def array_to_memory(self, seq: int, stream: int, array: int, box: Box) -> None:
        box.check(self._textures.shape(array))
        self._streams.submit(Op(seq), stream)

    def memory_to_array(self, seq: int, stream: int, array: int, box: Box) -> None:
        self.array_to_memory(seq, stream, array, box)

    def spread_arrays(self) -> None:
        """Do nothing: an array is its memory."""

    def reserve_handles(self, context: int, reserved: bool | None, owner: int) -> None:
        """Do nothing: handles are the session's own."""

    def create_texture(self, texture: int, context: int, surface: bool, resource: bytes, sampling: bytes,
                       view: bytes) -> int:
        return self._textures.create(texture, context, surface, resource, sampling, view)

    def place_texture(self, texture: int, handle: int) -> None:
        self._textures.place(texture, handle)

    def destroy_texture(self, texture: int) -> None:
        self._textures.destroy(texture)

    # -- ordered work -------------------------------------------------------------------
    def launch(self, seq: int, launch: Launch) -> None:
        work = self._launches.launch_work(launch)
        what = f"kernel {self._modules.kernel(launch.module, launch.function)[1].name}"
        self._streams.submit(Op(seq, work, what=what), launch.stream)

    def launch_graph(self, seq: int, graph: int, stream: int) -> None:
        op, before = self._graphs.launch(seq, graph, self._streams.timing)
        self._streams.submit(op, stream, before)

    def _cancelled(self) -> bool:
        """Whether the device is being closed, so that work which never ends by itself must end."""
        return self._streams.cancel.is_set()

    def copy_in(self, seq: int, stream: int, destination: int, pitch: int, width: int, height: int, data: Any) -> None:
        self._streams.submit(Op(seq, self._copies.copy_in_work(destination, pitch, width, height, data)), stream)

    def copy_out(self, seq: int, stream: int, source: int, pitch: int, width: int, height: int, done: Done) -> None:
        self._streams.submit(Op(seq, self._copies.copy_out_work(source, pitch, width, height), done), stream)

    def copy(self, seq: int, stream: int, destination: int, destination_pitch: int,
             source: int, source_pitch: int, width: int, height: int) -> None:
        run = self._copies.copy_work(destination, destination_pitch, source, source_pitch, width, height)
        self._streams.submit(Op(seq, run), stream)

    def fill(self, seq: int, stream: int, destination: int, pitch: int, width: int, height: int,
             element: int, value: int) -> None:
        run = self._copies.fill_work(destination, pitch, width, height, element, value)
        self._streams.submit(Op(seq, run), stream)

    def reach_ranks(self, exchange: Exchange) -> None:
        self._communicators.exchange = exchange

    def create_communicator(self, communicator: int, context: int, ranks: int, rank: int, unique: bytes,
                            members: Sequence[str] = ()) -> None:
        if context not in self._contexts:
            raise DeviceError(f"no context {context}", INVALID_CONTEXT)
        self._communicators.create(communicator, context, ranks, rank, unique, members)

    def destroy_communicator(self, communicator: int, abort: bool) -> None:
        self._communicators.destroy(communicator, abort)

    def collectives(self, seq: int, operations: Sequence[Operation]) -> None:
        collectives.submit(self._communicators.group(operations), seq, self._collective_memory, self._streams)

    def communicators(self) -> list[dict[str, Any]]:
        return self._communicators.figures()

    def record_event(self, seq: int, event: int, stream: int) -> None:
        self._streams.record_event(seq, event, stream, self.clock)

    def wait_event(self, seq: int, stream: int, event: int) -> None:
        self._streams.stream_await_event(Op(seq), stream, event)

    def host_function(self, seq: int, stream: int, reached: Done) -> None:
        self._streams.host_function(seq, stream, reached)

    def host_function_done(self, seq: int) -> None:
        self._streams.release_host_function(seq)

    def synchronize(self, seq: int, stream: int | None, done: Done) -> None:
        self._streams.await_stream(Op(seq, done=done), stream)

    def synchronize_device(self, seq: int, device: int, done: Done) -> None:
        self._check_device(device)
        self._streams.await_device(Op(seq, done=done), device)

    def synchronize_event(self, seq: int, event: int, done: Done) -> None:
        self._streams.await_event(Op(seq, done=done), event)

    def timed(self, seq: int, stream: int, work: Callable[[], None], done: TimesDone) -> None:
        self._streams.timed(work, done)

    # -- progress -------------------------------------------------------------------------
    def on_progress(self, notify: Callable[[], None]) -> None:
        self._streams.on_progress(notify)

    def progress(self) -> tuple[set[int], dict[int, int]]:
        return self._streams.progress()

    def unfinished(self) -> tuple[int, str] | None:
        return self._streams.unfinished()

    def is_complete(self, seq: int) -> bool:
        return self._streams.is_complete(seq)

    def wait_complete(self, seq: int, timeout: float | None = None) -> bool:
        return self._streams.wait_complete(seq, timeout)

    def busy_seconds(self) -> float:
        return self._streams.busy_seconds()

    def drain(self, timeout: float) -> bool:
        return self._streams.drain(timeout)

    @property
    def error(self) -> int:
        return self._streams.schedule.error

    def error_detail(self) -> str:
        return self._streams.schedule.detail

    # -- state --------------------------------------------------------------------------------
    def regions(self) -> list[Region]:
        return self._memory.regions()

    def pins(self) -> list[str]:
        return []

    def read(self, address: int, size: int) -> bytes:
        return self._memory.state_view(address, size).tobytes() if size else b""

    def write(self, address: int, data: Any) -> None:
        source = np.frombuffer(data, np.uint8)
        if source.size:
            self._memory.state_view(address, source.size)[:] = source

    def hash_pages(self, region: Region, key: bytes) -> np.ndarray:
        return pagehash.hash_pages(self._memory.state_view(region.address, region.size), key)

    def hash_regions(self, regions: Sequence[Region], key: bytes) -> list[pagehash.PageHashes]:
        return [pagehash.examine_pages(self._memory.state_view(region.address, region.size), key) for region in regions]

    def copy_and_hash(self, pages: pagehash.Ranges, staging: int, key: bytes) -> pagehash.PageHashes:
        return self._staged.copy_and_hash(pages, staging, key)

    def frames(self) -> FramePool:
        return self._frames

    def page_ring(self) -> HostRing:
        return self._ring

    def write_pages(self, runs: Sequence[tuple[int, int, Any]]) -> None:
        for address, size, data in runs:
            self._memory.state_view(address, size)[:] = 0 if data is None else np.frombuffer(data, np.uint8)

    def free_memory(self) -> int:
        """Return half of the memory that the host could give, since other sessions of this host need memory as well."""
        return available_memory() // 2

    def stage(self, size: int) -> int:
        return self._staged.stage(size)

    def unstage(self, address: int) -> None:
        self._staged.unstage(address)

    def read_staged(self, address: int, size: int) -> bytes:
        return self._staged.readable(address, size).tobytes()

    def elapsed(self, start: int, end: int) -> float:
        with self._streams.schedule.mutex:
            first, last = (self._streams.schedule.event(number) for number in (start, end))
            for number, event in ((start, first), (end, last)):
                if not event.timing or (event.op is None and event.time is None):
                    raise DeviceError(f"event {number} has no recorded time", INVALID_HANDLE)
                if (event.op is not None and not event.op.complete) or event.time is None:
                    raise DeviceError(f"event {number} is not complete", NOT_READY)
            return ((last.time or 0) - (first.time or 0)) / 1e6

    def event_states(self) -> dict[int, int | None]:
        with self._streams.schedule.mutex:
            return {number: event.time for number, event in self._streams.schedule.events().items()}

    def restore_event_states(self, states: dict[int, int | None]) -> None:
        with self._streams.schedule.mutex:
            for number, time_ns in states.items():
                event = self._streams.schedule.event(number)
                event.op, event.time = None, time_ns

    def clock(self) -> int:
        return time.monotonic_ns() + self._clock_offset

    def set_clock(self, now: int) -> None:
        self._clock_offset = now - time.monotonic_ns()

    def close(self) -> None:
        """End all work and release the memory; where a kernel does not stop, its memory is left as it is."""
        if self._closed:
            return
        self._closed = True
        if self._streams.close(CLOSE_SECONDS):
            self._memory.close()
        else:
            log.error("a kernel did not stop: its memory stays until the process ends")
