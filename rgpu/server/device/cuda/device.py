"""The ``cuda`` device: a session's calls on a real GPU, through ``cuda.bindings``.

A facade, for :class:`rgpu.checkpoint.device.Device`. Each worker process has one context (the device's primary one), or
one for each of the session's GPUs (:mod:`.gpus`), and the session's own addresses for its memory
(:mod:`rgpu.server.device.cuda.memory.allocations`). Ordered work and completion are the native engine's
(:mod:`.engine`): the methods here serve calls from Python (:mod:`.ordered`); the record stream is fed to the engine
directly, as :attr:`CudaDevice.fast_path`. Modules are in :mod:`.work.loading` and :mod:`.work.loaded`, the bytes of the
state in :mod:`.state`, events and the clock in :mod:`.events`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from cuda.bindings import driver

from rgpu.checkpoint.codec.frames import FramePool
from rgpu.checkpoint.device import Done, Launch, Region, TimesDone
from rgpu.checkpoint.pages.pagehash import PageHashes, Ranges
from rgpu.server.collectives.exchange import Exchange
from rgpu.server.derived import Derived
from rgpu.server.device.cuda.collectives.groups import Collectives
from rgpu.server.device.cuda.engine import Engine
from rgpu.server.device.cuda.errors import check
from rgpu.server.device.cuda.events import Clock, Events
from rgpu.server.device.cuda.facts import facts
from rgpu.server.device.cuda.gpus import Gpus
from rgpu.server.device.cuda.limits import Limits
from rgpu.server.device.cuda.memory import pinned
from rgpu.server.device.cuda.memory.arrays import Arrays
from rgpu.server.device.cuda.memory.frames import CudaFrames
from rgpu.server.device.cuda.memory.hashers import SeveralHashers
from rgpu.server.device.cuda.memory.pagehash import Hasher, PageHasher
from rgpu.server.device.cuda.memory.peer import CudaPeer
from rgpu.server.device.cuda.memory.placing import Placing, one_heap
from rgpu.server.device.cuda.memory.ring import CudaRing
from rgpu.server.device.cuda.memory.staging import Staging
from rgpu.server.device.cuda.memory.zeroing import Zeroing
from rgpu.server.device.cuda.ordered import OrderedWork
from rgpu.server.device.cuda.state import StateBytes
from rgpu.server.device.cuda.work import modules, tensormap
from rgpu.server.device.cuda.work.binaries import Trait
from rgpu.server.device.cuda.work.graphs import Graphs
from rgpu.server.device.cuda.work.hostfunctions import HostFunctions
from rgpu.server.device.cuda.work.loaded import LoadedModules
from rgpu.server.device.cuda.work.loading import Endings, Loading
from rgpu.server.device.cuda.work.printed import CapturedStdout, Printed
from rgpu.server.device.cuda.work.streams import Completion
from rgpu.server.device.loads import LoadNotes
from rgpu.session.calls.wire import LEGACY_STREAM
from rgpu.session.errors import DeviceError
from rgpu.session.objects.arrays import ArrayShape, Box
from rgpu.session.objects.collectives import Operation
from rgpu.session.objects.graphs import Node
from rgpu.session.objects.module_table import GlobalVariable, ModuleTable

FOREVER = 1e9  #: seconds
NON_BLOCKING = 1


class CudaDevice:
    """Implements :class:`rgpu.checkpoint.device.Device` on the GPUs with these ordinals, mostly one.

    ``stdout``: the captured standard output, to which the driver writes what kernels print; without it that text stays
    in this process's standard output.
    """

    def __init__(self, ordinals: int | Sequence[int] = 0, stdout: CapturedStdout | None = None) -> None:
        one_heap()
        pinned.reserve()
        check(driver.cuInit(0), "cuInit")
        self.gpus = Gpus([ordinals] if isinstance(ordinals, int) else ordinals)
        ordinal, self._context = self.gpus[0].ordinal, self.gpus[0].context
        self.every_facts = tuple(facts(gpu.ordinal) for gpu in self.gpus)
        self.facts = self.every_facts[0]
        hashers = [PageHasher(gpu.context, found.compute_capability, found.attributes.get(16, 1))
                   for gpu, found in zip(self.gpus, self.every_facts, strict=True)]
        self.hasher: Hasher = hashers[0] if len(hashers) == 1 else SeveralHashers(hashers, self.gpus.homes.of)
        self._ring = CudaRing(self._context)
        self.engine = Engine(int(self._context))
        self._closing, self._closed = threading.Lock(), False  #: readers of its busy time may outlive the device
        self.fast_path = self.engine
        self.text = Printed(stdout, [gpu.context for gpu in self.gpus], self.engine) if stdout is not None else None
        for gpu in self.gpus:
            gpu.use()
            gpu.open_memory(self.engine, Zeroing(self._every_stream), self.gpus)
        self.gpus.use()
        self.staging = Staging([gpu.ordinal for gpu in self.gpus])
        #: pages of several GPUs are moved over the connection
        self.peer = CudaPeer(self.gpus.use, ordinal, self.gpus[0].memory, self.gpus[0].zeroing) if len(self.gpus) == 1 \
            else None
        self._frames = CudaFrames(self._context, self._ring, self.hasher, self.gpus.fence)
        self.mirrors = pinned.Mirrors()
        self.completion = Completion(self.engine)
        for gpu in self.gpus:
            self.completion.add(LEGACY_STREAM + gpu.number, driver.CUstream(driver.CU_STREAM_LEGACY),
                                int(gpu.context), gpu.number)
        self._work = OrderedWork(self.engine, self.gpus, self.completion)
        self._collectives = Collectives(self.gpus, self.engine, self.completion, self._work)
        self._host_functions = self.host_gates = HostFunctions(
            self._context, self.is_complete, self._work.error.note, self.engine.host_functions, self.engine.returned)
        self._modules = LoadedModules(self.gpus, self.engine)
        self._state = StateBytes(self.gpus, self.mirrors, self._modules, self.hasher)
        self._endings = Endings(self.gpus, self._host_functions, self._state.in_place.going)
        self._limits = Limits(self.gpus)
        self._events, self._clock = Events(self.gpus, self.engine), Clock(self.gpus)
        self._arrays = Arrays(self.gpus.use_context, lambda context: self.gpus.of_context(context).handles)
        self._graphs = Graphs(self.gpus.use_context, self._modules.kernel, self._graph_made, self.engine.remove_graph)
        for gpu in reversed(self.gpus):
            gpu.use()
            gpu.refer()
            gpu.reference_time = self.clock()
        self.completion.start()
        self.notes, self.derived = LoadNotes(), Derived()
        loader = modules.Loader(self.facts.compute_capability, self.facts.driver_version, self.derived, self.notes)
        self._loading = Loading(self.gpus, loader, Placing(), self._host_functions, self.drain)

    def _every_stream(self) -> Iterator[Any]:
        """Yield each stream's handle, its context current."""
        for state in list(self.completion.streams.values()):
            self.gpus.use(state.device)
            yield state.handle

    @property
    def error(self) -> int:
        return self._work.error.result

    def error_detail(self) -> str:
        return self._work.error.detail()

    # -- limits ---------------------------------------------------------------
    def resize(self, memory: int) -> None:
        """Set the session's quota in bytes of each GPU: for mappings, and as much for arrays and module variables."""
        self._limits.resize(memory)
        self._arrays.total = memory * len(self.gpus)

    def limit_host(self, size: int) -> None:
        """Set the bytes that pinned memory may take; 0: no bound."""
        self.mirrors.total = size

    # -- memory ---------------------------------------------------------------
    def map(self, address: int, size: int) -> None:
        self.gpus.at(address).memory.map(address, size)
        self.hasher.wrote()

    def unmap(self, address: int, size: int) -> None:
        with self._state.in_place.going():
            self.gpus.at(address).memory.unmap(address, size)

    def alias(self, address: int, size: int, source: int) -> None:
        self.gpus.at(source).memory.alias(address, size, source)

    def unalias(self, address: int, size: int) -> None:
        self.gpus.at(address).memory.unalias(address, size)

    def share(self, address: int, size: int) -> list[tuple[int, int]]:
        return self.gpus.at(address).memory.holding(address, size)

    def allocated(self, address: int, size: int) -> bool:
        return any(gpu.memory.allocations.get(address) == size for gpu in self.gpus)

    def shared(self, address: int, size: int) -> int:
        return self.gpus.at(address).memory.export(address, size)[1]

    def map_shared(self, address: int, pieces: Sequence[tuple[int, int]]) -> None:
        self.gpus.at(address).foreign.map(address, pieces)

    def unmap_shared(self, address: int) -> None:
        with self._state.in_place.going():
            self.gpus.at(address).foreign.unmap(address)

    def move_mapping(self, address: int, size: int, to: int) -> None:
        with self._state.in_place.going():
            self.gpus.at(address).memory.move(address, size, to)
        self.hasher.wrote()

    def allocate(self, address: int, size: int) -> None:
        self.gpus.at(address).memory.allocate(address, size)

    def free(self, address: int) -> None:
        self.gpus.at(address).memory.free(address)

    def host_allocate(self, address: int, size: int) -> None:
        self.gpus.use()
        self.mirrors.allocate(address, size)
        self.engine.add_range(address, size)

    def host_free(self, address: int) -> None:
        self.gpus.use()
        self.engine.remove_range(address)
        self.mirrors.free(address)

    def mirror_write(self, seq: int, stream: int, address: int, data: Any) -> None:
        self.gpus.use()
        self.mirrors.check(address, len(data))
        self._work.run(seq, stream, self.mirrors.upload(address, data, self._work.stream(stream)), "write to a mirror")

    def mirror_read(self, seq: int, stream: int, address: int, size: int, done: Done) -> None:
        self.gpus.use()
        self.mirrors.check(address, size)
        self._work.stream(stream)

        def reached(result: int) -> None:
            done(result, None if result else self.mirrors.read(address, size))

        self.completion.mark(stream, seq, reached)

    # -- objects ----------------------------------------------------------------
    def create_context(self, context: int, flags: int, primary: bool, device: int = 0) -> None:
        """Contexts of a session share the worker's one context on their GPU."""
        self.engine.add_context(context, int(self.gpus.add_context(context, device).context))

    def destroy_context(self, context: int) -> None:
        """Forget a context; its streams, events and memory are destroyed by calls of their own."""
        self._graphs.destroy_context(context)
        self._arrays.destroy_context(context)
        self._collectives.destroy_context(context)
        self.engine.remove_context(context)
        self.gpus.remove_context(context)

    def set_limit(self, context: int, limit: int, value: int) -> None:
        self._limits.check_limit(limit, value)
        self.gpus.use_context(context)
        check(driver.cuCtxSetLimit(driver.CUlimit(limit), value), "cuCtxSetLimit")

    def create_stream(self, stream: int, context: int, flags: int, priority: int) -> None:
        self.gpus.use_context(context)
        handle = check(driver.cuStreamCreateWithPriority(flags & NON_BLOCKING, priority), "cuStreamCreateWithPriority")
        self.gpus.fence(handle)
        gpu = self.gpus.of_context(context)
        self.completion.add(stream, handle, int(gpu.context), gpu.number)

    def destroy_stream(self, stream: int) -> None:
        handle, home = self._work.stream(stream), self.completion.streams[stream].device
        self.completion.remove(stream)
        self.gpus.use(home)
        check(driver.cuStreamDestroy(handle), "cuStreamDestroy")

    def create_event(self, event: int, context: int, flags: int) -> None:
        self._events.create(event, context, flags)

    def destroy_event(self, event: int) -> None:
        self._events.destroy(event)

    def load(self, module: int, binary: bytes, options: bytes, library: bool, device: int = 0,
             places: Sequence[GlobalVariable] = ()) -> tuple[ModuleTable, str]:
        loaded, text = self._loading.load(device, binary, options, library, places)
        variables = [variable.size for _, variable in self._modules.variables()]
        variables += [variable.size for variable in loaded.table.globals]
        try:
            self._limits.check(sum(variables), "module variables")
        except DeviceError:
            modules.unload(loaded)
            raise
        if loaded.traits & Trait.PRINTS and self.text is not None:
            self.text.loaded()
        self._modules.add(module, loaded, device)
        return loaded.table, text

    def placed(self) -> None:
        self._loading.placed()

    def unload(self, module: int) -> None:
        self._endings.add(*self._modules.remove(module))

    def link(self, inputs: list[tuple[int, str, bytes]], options: bytes) -> tuple[bytes, str]:
        self.gpus.use()
        return modules.link(inputs), ""

    def function_attributes(self, module: int, function: int) -> tuple[int, ...]:
        return self._modules.attributes(module, function)

    def tensor_map(self, form: int, arguments: bytes) -> bytes:
        self.gpus.use()
        return tensormap.encode(form, arguments)

    def cluster_occupancy(self, module: int, function: int, form: int, grid: tuple[int, int, int],
                          block: tuple[int, int, int], shared: int, cluster: tuple[int, int, int]) -> int:
        return self._modules.cluster_occupancy(module, function, form, grid, block, shared, cluster)

    def set_function_attribute(self, module: int, function: int, attribute: int, value: int) -> None:
        self._modules.set_attribute(module, function, attribute, value)

    def instantiate_graph(self, graph: int, context: int, flags: int, nodes: list[Node]) -> None:
        self._graphs.instantiate(graph, context, flags, nodes)

    def update_graph(self, graph: int, changes: dict[int, Node]) -> None:
        self._graphs.update(graph, changes)

    def destroy_graph(self, graph: int) -> None:
        self._graphs.destroy(graph)

    # -- arrays, textures, surfaces -------------------------------------------------
    def create_array(self, array: int, context: int, address: int, shape: ArrayShape) -> None:
        self.engine.check_range(address, shape.size)
        self._arrays.create(array, context, address, shape)

    def destroy_array(self, array: int) -> None:
        self._arrays.destroy(array)

    def array_to_memory(self, seq: int, stream: int, array: int, box: Box) -> None:
        handle = self._work.stream(stream)
        self._work.run(seq, stream, self._arrays.copy(array, box, handle, False), "copy from an array")

    def memory_to_array(self, seq: int, stream: int, array: int, box: Box) -> None:
        handle = self._work.stream(stream)
        self._work.run(seq, stream, self._arrays.copy(array, box, handle, True), "copy to an array")

    def spread_arrays(self) -> None:
        self._arrays.spread()

    def reserve_handles(self, context: int, reserved: bool | None, owner: int) -> None:
        self._arrays.reserve_handles(context, reserved, owner)

    def create_texture(self, texture: int, context: int, surface: bool, resource: bytes, sampling: bytes,
                       view: bytes) -> int:
        return self._arrays.create_texture(texture, context, surface, resource, sampling, view)

    def place_texture(self, texture: int, handle: int) -> None:
        self._arrays.place(texture, handle)

    def destroy_texture(self, texture: int) -> None:
        self._arrays.destroy_texture(texture)

    # -- ordered work -------------------------------------------------------------
    def launch(self, seq: int, launch: Launch) -> None:
        grid, block = launch.grid, launch.block
        self._work.call("launch", seq, module=launch.module, function=launch.function, grid_x=grid[0], grid_y=grid[1],
                      grid_z=grid[2], block_x=block[0], block_y=block[1], block_z=block[2], shared=launch.shared,
                      flags=int(launch.cooperative), stream=launch.stream, parameters=launch.parameters,
                      attributes=launch.attributes)

    def launch_graph(self, seq: int, graph: int, stream: int) -> None:
        self._work.call("graph_launch", seq, exec=graph, stream=stream)

    def _graph_made(self, graph: int, executable: Any, nodes: Sequence[Node]) -> None:
        self.engine.add_graph(graph, int(executable), self._modules.traits(nodes))

    def copy_in(self, seq: int, stream: int, destination: int, pitch: int, width: int, height: int, data: Any) -> None:
        """Copy host bytes to the device; ``data`` may be reused when this returns."""
        if height == 1:
            self._work.call("memcpy_h2d", seq, data, destination=destination, stream=stream)
        else:
            self._work.call("memcpy2d_h2d", seq, data, destination=destination, pitch=pitch, width=width,
                          height=height, stream=stream)

    def copy_out(self, seq: int, stream: int, source: int, pitch: int, width: int, height: int, done: Done) -> None:
        self._work.answered("memcpy2d_d2h", seq, done, source=source, pitch=pitch, width=width, height=height,
                       stream=stream)

    def copy(self, seq: int, stream: int, destination: int, destination_pitch: int, source: int, source_pitch: int,
             width: int, height: int) -> None:
        self._work.call("memcpy2d_d2d", seq, destination=destination, destination_pitch=destination_pitch,
                      source=source, source_pitch=source_pitch, width=width, height=height, stream=stream)

    def fill(self, seq: int, stream: int, destination: int, pitch: int, width: int, height: int, element: int,
             value: int) -> None:
        self._work.call("memset", seq, destination=destination, pitch=pitch, width=width, height=height,
                      element=element, value=value, stream=stream)

    def memory_operation(self, seq: int, stream: int, kind: int, address: int, value: int, flags: int) -> None:
        self._work.memory_operation(seq, stream, kind, address, value, flags)

    def record_event(self, seq: int, event: int, stream: int) -> None:
        self._work.call("event_record", seq, event=event, stream=stream, flags=0)

    def wait_event(self, seq: int, stream: int, event: int) -> None:
        self._work.call("stream_wait_event", seq, stream=stream, event=event, flags=0)

    def host_function(self, seq: int, stream: int, reached: Done) -> None:
        if self.error:
            reached(self.error, None)
            return
        handle = self._work.stream(stream)
        self.engine.boundary(stream)
        self._work.stops(seq, stream, self._host_functions.enqueue(seq, handle, reached), "cuStreamWaitValue32")

    def host_function_done(self, seq: int) -> None:
        self._host_functions.done(seq)
        self._endings.end()

    def synchronize(self, seq: int, stream: int | None, done: Done) -> None:
        self.completion.mark(stream, seq, lambda result: done(result, None))

    def synchronize_device(self, seq: int, device: int, done: Done) -> None:
        context = int(self.gpus[device if device < len(self.gpus) else 0].context)
        self.completion.mark_context(context, seq, lambda result: done(result, None))

    def synchronize_event(self, seq: int, event: int, done: Done) -> None:
        self._work.answered("event_synchronize", seq, lambda result, data: done(result, None), event=event)

    def timed(self, seq: int, stream: int, work: Callable[[], None], done: TimesDone) -> None:
        self._work.timed(stream, work, done)

    # -- progress -------------------------------------------------------------------
    def on_progress(self, notify: Callable[[], None]) -> None:
        self.completion.on_progress(notify)

    def progress(self) -> tuple[set[int], dict[int, int]]:
        return self.engine.progress()

    def unfinished(self) -> tuple[int, str] | None:
        pending, _ = self.engine.progress()
        if not pending:
            return None
        seq = min(pending)
        return seq, self._collectives.unfinished(seq) or self._modules.describe(self.engine.launched(seq))

    def is_complete(self, seq: int) -> bool:
        return bool(self.engine.is_complete(seq))

    def wait_complete(self, seq: int, timeout: float | None = None) -> bool:
        return bool(self.engine.wait_complete(seq, int((FOREVER if timeout is None else timeout) * 1e9)))

    def busy_seconds(self) -> float:
        with self._closing:
            return 0.0 if self._closed else int(self.engine.worked()) / 1e9

    def drain(self, timeout: float) -> bool:
        drained = self._work.drain(timeout)
        if drained and not self.error:
            for gpu in self.gpus:
                gpu.use()
                gpu.zeroing.settle()
            try:
                self._arrays.gather()
            except DeviceError as error:
                self._work.error.note(error.result, error.message)
        return drained

    # -- state ------------------------------------------------------------------------
    def regions(self) -> list[Region]:
        return self._state.regions()

    def reach_ranks(self, exchange: Exchange) -> None:
        self._collectives.communicators.exchange = exchange

    def create_communicator(self, communicator: int, context: int, ranks: int, rank: int, unique: bytes,
                            members: Sequence[str] = ()) -> None:
        self._collectives.create(communicator, context, ranks, rank, unique, members)

    def destroy_communicator(self, communicator: int, abort: bool) -> None:
        self._collectives.destroy(communicator, abort)

    def collectives(self, seq: int, operations: Sequence[Operation]) -> None:
        self._collectives.give(seq, operations)

    def communicators(self) -> list[dict[str, Any]]:
        return self._collectives.communicators.figures()

    def pins(self) -> list[str]:
        return self._modules.pins()

    def read(self, address: int, size: int) -> bytes:
        return self._state.read(address, size)

    def write(self, address: int, data: Any) -> None:
        self._state.write(address, data)

    def hash_pages(self, region: Region, key: bytes) -> np.ndarray:
        return self.hash_regions([region], key)[0].hashes

    def hash_regions(self, regions: Sequence[Region], key: bytes) -> list[PageHashes]:
        return self._state.hash(regions, key)

    def copy_and_hash(self, pages: Ranges, staging: int, key: bytes) -> PageHashes:
        return self.hasher.copy_and_hash(pages, staging, key)

    def frames(self) -> FramePool:
        return self._frames.pool

    def page_ring(self) -> CudaRing:
        return self._ring

    def write_pages(self, runs: Sequence[tuple[int, int, Any]]) -> None:
        self._state.write_runs(runs, self._ring)

    def free_memory(self) -> int:
        self.gpus.use()
        return int(check(driver.cuMemGetInfo(), "cuMemGetInfo")[0])

    def stage(self, size: int) -> int:
        """Allocate memory of this context, outside the session's quota; other sessions of the device compete for it."""
        self.gpus.use()
        return self.staging.stage(size)

    def unstage(self, address: int) -> None:
        self.gpus.use()
        self.staging.unstage(address)

    def read_staged(self, address: int, size: int) -> bytes:
        self.gpus.use()
        return self.staging.read(address, size)

    def elapsed(self, start: int, end: int) -> float:
        return self._events.elapsed(start, end)

    def event_states(self) -> dict[int, int | None]:
        return self._events.states()

    def restore_event_states(self, states: dict[int, int | None]) -> None:
        self._events.restore(states)

    def clock(self) -> int:
        return self._clock.now()

    def set_clock(self, now: int) -> None:
        self._clock.set(now)

    def close(self) -> None:
        self._collectives.stop()
        self.drain(1.0)  # copies under way use memory that is freed below
        self._host_functions.stop()
        self._work.stop()
        self.completion.stop()
        self.gpus.use()
        if self.text is not None:
            self.text.close()
        self._collectives.close()
        self._frames.close()
        self.hasher.close()
        self._ring.close()
        with self._closing:
            self._closed = True
            self.engine.close()
        self.staging.close()
        if self.peer is not None:
            self.peer.close()
        for gpu in self.gpus:
            gpu.close()
