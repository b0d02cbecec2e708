"""The ``cuda`` device: a session's calls on a real GPU, through ``cuda.bindings``.

One context (the device's primary one) for each worker process, or one for each of
the session's GPUs (:mod:`.gpus`), the session's own addresses for its memory
(:mod:`rgpu.server.device.cuda.memory.allocations`). Ordered work and completion are
the native engine's (:mod:`.engine`): the methods here serve calls from Python;
the record stream goes to the engine directly, as :attr:`CudaDevice.fast_path`.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from cuda.bindings import driver

from rgpu.checkpoint.codec.frames import FramePool
from rgpu.checkpoint.device import Done, Launch, Region, TimesDone
from rgpu.checkpoint.pages.pagehash import PageHashes, Ranges
from rgpu.server.derived import Derived
from rgpu.server.device.cuda.engine import GRAPH, Engine
from rgpu.server.device.cuda.errors import STICKY, check
from rgpu.server.device.cuda.facts import facts
from rgpu.server.device.cuda.gpus import Gpu, open_gpus
from rgpu.server.device.cuda.memory import pinned
from rgpu.server.device.cuda.memory.arrays import Arrays
from rgpu.server.device.cuda.memory.frames import CudaFrames
from rgpu.server.device.cuda.memory.hashers import Homes, SeveralHashers
from rgpu.server.device.cuda.memory.inplace import InPlace
from rgpu.server.device.cuda.memory.pagehash import Hasher, PageHasher, hash_regions
from rgpu.server.device.cuda.memory.peer import CudaPeer
from rgpu.server.device.cuda.memory.placing import Placing, one_heap
from rgpu.server.device.cuda.memory.ring import CudaRing
from rgpu.server.device.cuda.memory.staging import Staging
from rgpu.server.device.cuda.memory.steering import Fillers, driver_fillers, steer
from rgpu.server.device.cuda.memory.zeroing import Zeroing
from rgpu.server.device.cuda.work import clusters, modules, tensormap
from rgpu.server.device.cuda.work.graphs import Graphs
from rgpu.server.device.cuda.work.hostfunctions import HostFunctions
from rgpu.server.device.cuda.work.printed import CapturedStdout, Printed
from rgpu.server.device.cuda.work.streams import Completion
from rgpu.server.device.cuda.work.timing import Brought, Timings
from rgpu.server.device.loads import LoadNotes
from rgpu.session.addresses import GRANULE
from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_NAME, LEGACY_STREAM
from rgpu.session.errors import DeviceError
from rgpu.session.objects.arrays import ArrayShape, Box
from rgpu.session.objects.collectives import Operation
from rgpu.session.objects.graphs import KernelNode, Node, every
from rgpu.session.objects.module_table import GlobalVariable, ModuleTable

CUDA_ERROR_INVALID_VALUE = 1
CUDA_ERROR_OUT_OF_MEMORY = 2
CUDA_ERROR_INVALID_DEVICE = 101
CUDA_ERROR_INVALID_HANDLE = 400
CUDA_ERROR_NOT_READY = 600
CUDA_ERROR_NOT_SUPPORTED = 801
FOREVER = 1e9  #: seconds
IDLE_SECONDS = 2.0  #: that a load in a replay waits for work under way before it is repeated
#: By the kind of a stream_memory_operation.
_MEMORY_OPERATIONS = ("cuStreamWriteValue32", "cuStreamWriteValue64", "cuStreamWaitValue32", "cuStreamWaitValue64")
NON_BLOCKING = 1
SIDE_MEMORY = 64 << 20  #: bytes of module variables, and of each heap, that every session may have: else its quota
_HEAPS = (1, 2)  #: CU_LIMIT_PRINTF_FIFO_SIZE, CU_LIMIT_MALLOC_HEAP_SIZE


class CudaDevice:
    """Implements :class:`rgpu.checkpoint.device.Device` on the GPUs with these ordinals, mostly one.

    ``stdout``: where the driver writes what kernels print, captured before; without it that goes where this
    process's standard output goes.
    """

    def __init__(self, ordinals: int | Sequence[int] = 0, stdout: CapturedStdout | None = None) -> None:
        one_heap()
        pinned.reserve()
        check(driver.cuInit(0), "cuInit")
        self.gpus = open_gpus([ordinals] if isinstance(ordinals, int) else ordinals)
        ordinal, self._context = self.gpus[0].ordinal, self.gpus[0].context
        self._use()
        self.every_facts = tuple(facts(gpu.ordinal) for gpu in self.gpus)
        self.facts = self.every_facts[0]
        self._homes_of_memory = Homes(len(self.gpus))
        hashers = [PageHasher(gpu.context, found.compute_capability, found.attributes.get(16, 1))
                   for gpu, found in zip(self.gpus, self.every_facts, strict=True)]
        self.hasher: Hasher = hashers[0] if len(hashers) == 1 else SeveralHashers(hashers, self._homes_of_memory.of)
        self._ring = CudaRing(self._context)
        self.engine = Engine(int(self._context))
        self._closing, self._closed = threading.Lock(), False  #: who counts its time may outlive the device
        self.fast_path = self.engine
        self.text = Printed(stdout, [gpu.context for gpu in self.gpus], self.engine) if stdout is not None else None
        for gpu in self.gpus:
            gpu.use()
            gpu.open_memory(self.engine, Zeroing(self._every_stream), self.gpus)
        self._use()
        self.staging = Staging([gpu.ordinal for gpu in self.gpus])
        #: pages of several GPUs go by the connection
        self.peer = CudaPeer(self._use, ordinal, self.gpus[0].memory, self.gpus[0].zeroing) if len(self.gpus) == 1 \
            else None
        self._frames = CudaFrames(self._context, self._ring, self.hasher, self._fence)
        self._in_place = InPlace(self._gone)
        self.mirrors = pinned.Mirrors()
        self._detail = ""
        self._lock = threading.RLock()
        self.completion = Completion(self.engine)
        for gpu in self.gpus:
            self.completion.add(LEGACY_STREAM + gpu.number, driver.CUstream(driver.CU_STREAM_LEGACY),
                                int(gpu.context), gpu.number)
        self._homes: dict[int, int] = {}  #: the number of each context's GPU
        self._quota = 0  #: bytes of each GPU; 0: no limit
        self._events: dict[int, Any] = {}
        self._restored: dict[int, int | None] = {}
        self.notes, self.derived = LoadNotes(), Derived()
        self._loader = modules.Loader(self.facts.compute_capability, self.facts.driver_version, self.derived,
                                      self.notes)
        self._modules: dict[int, modules.Module] = {}
        self._module_homes: dict[int, int] = {}
        self._unloaded: list[tuple[int, modules.Module]] = []  #: by the program, not yet by the driver; on which GPU
        self._timings: dict[int, Timings] = {}  #: by the session's number of the GPU
        self._brought: Brought | None = None  #: of the timed call that is being given to the GPU
        self._host_functions = self.host_gates = HostFunctions(self._context, self.is_complete, self._failed)
        self._arrays = Arrays(self._use_context, lambda context: self.gpus[self._homes.get(context, 0)].handles)
        self._graphs = Graphs(self._use_context, self._kernel, self._graph_made, self.engine.remove_graph)
        self._clock_offset = -time.monotonic_ns()
        for gpu in reversed(self.gpus):
            gpu.use()
            gpu.refer()
            gpu.reference_time = self.clock()
        self.completion.start()
        self._placing = Placing()
        self._filled: dict[int, Fillers] = {}  #: by GPU; while a session is rebuilt

    def _use(self, number: int = 0) -> None:
        """Make a GPU's context current in this thread."""
        self.gpus[number].use()

    def _use_context(self, context: int) -> Any:
        """The same for the GPU of one of the program's contexts; returns the driver's."""
        gpu = self.gpus[self._homes.get(context, 0)]
        gpu.use()
        return gpu.context

    def _at(self, address: int) -> Gpu:
        """The GPU whose memory it is, its context current."""
        gpu = self.gpus[self._homes_of_memory(address) if len(self.gpus) > 1 else 0]
        gpu.use()
        return gpu

    def _every_stream(self) -> Iterator[Any]:
        """Each stream's handle, its context current."""
        for state in list(self.completion.streams.values()):
            self._use(state.device)
            yield state.handle

    def _fence(self, stream: Any) -> None:
        """Work given to ``stream`` from now on comes after all zeros so far."""
        for gpu in self.gpus:
            gpu.zeroing.fence(stream)

    def _failed(self, result: int, detail: str) -> None:
        """A sticky error that Python saw; the first one stays."""
        if not self.error:
            self._detail = detail
            self.engine.fail(result)

    @property
    def error(self) -> int:
        return int(self.engine.error())

    def error_detail(self) -> str:
        if self._detail or not self.error:
            return self._detail
        try:
            return str(driver.CUresult(self.error).name)
        except ValueError:
            return f"CUresult {self.error}"

    def _run(self, seq: int, stream: int, result: tuple[Any, ...], what: str) -> None:
        """Note ordered work ``seq``; an error of the call itself is raised, a sticky one kept."""
        code = int(result[0])
        if code in STICKY:
            self._failed(code, what)
        elif code:
            raise DeviceError(f"{what}: {driver.CUresult(code).name}", code)
        self.completion.submitted(stream, seq)

    def _stream(self, number: int) -> Any:
        """Its handle; its context is current."""
        state = self.completion.streams.get(number)
        if state is None:
            raise DeviceError(f"stream {number} does not exist", CUDA_ERROR_INVALID_HANDLE)
        self._use(state.device)
        return state.handle

    # -- limits: the client's library keeps them, too; these hold whatever that does ----------
    def resize(self, memory: int) -> None:
        """Bytes of each GPU that the session may have: its mappings as many, and so its arrays and module variables."""
        self._quota = memory
        for gpu in self.gpus:
            gpu.memory.total = -(-memory // GRANULE) * GRANULE
        self._arrays.total = memory * len(self.gpus)

    def limit_host(self, size: int) -> None:
        """Bytes that pinned memory may take; 0: no bound."""
        self.mirrors.total = size

    def _check_bound(self, size: int, what: str) -> None:
        """Raise DeviceError(2) for device memory beside the mappings that is more than the session may have of it."""
        most = max(SIDE_MEMORY, self._quota)
        if self._quota and size > most:
            raise DeviceError(f"{what} of {size} bytes: the session may have {most}", CUDA_ERROR_OUT_OF_MEMORY)

    # -- memory ---------------------------------------------------------------
    def map(self, address: int, size: int) -> None:
        self._at(address).memory.map(address, size)
        self.hasher.wrote()

    def unmap(self, address: int, size: int) -> None:
        with self._in_place.going():
            self._at(address).memory.unmap(address, size)

    def allocate(self, address: int, size: int) -> None:
        self._at(address).memory.allocate(address, size)

    def free(self, address: int) -> None:
        self._at(address).memory.free(address)

    def host_allocate(self, address: int, size: int) -> None:
        self._use()
        self.mirrors.allocate(address, size)
        self.engine.add_range(address, size)

    def host_free(self, address: int) -> None:
        self._use()
        self.engine.remove_range(address)
        self.mirrors.free(address)

    def mirror_write(self, seq: int, stream: int, address: int, data: Any) -> None:
        self._use()
        if not self.mirrors.contains(address, len(data)):
            raise DeviceError(f"0x{address:x} + {len(data)} is not in one mirror", CUDA_ERROR_INVALID_VALUE)
        self._run(seq, stream, self.mirrors.upload(address, data, self._stream(stream)), "write to a mirror")

    def mirror_read(self, seq: int, stream: int, address: int, size: int, done: Done) -> None:
        self._use()
        if not self.mirrors.contains(address, size):
            raise DeviceError(f"0x{address:x} + {size} is not in one mirror", CUDA_ERROR_INVALID_VALUE)
        self._stream(stream)

        def reached(result: int) -> None:
            done(result, None if result else self.mirrors.read(address, size))

        self.completion.mark(stream, seq, reached)

    def _check_range(self, address: int, pitch: int, width: int, height: int) -> None:
        size = pitch * (height - 1) + width if height else 0
        if size and not self.engine.contains(address, size):
            raise DeviceError(f"0x{address:x} + {size} is not in one allocation", CUDA_ERROR_INVALID_VALUE)

    # -- objects ----------------------------------------------------------------
    def create_context(self, context: int, flags: int, primary: bool, device: int = 0) -> None:
        """Contexts of a session share the worker's one context on their GPU."""
        if not 0 <= device < len(self.gpus):
            raise DeviceError(f"the session has {len(self.gpus)} GPUs, and no device {device}",
                              CUDA_ERROR_INVALID_DEVICE)
        self._homes[context] = device
        self.engine.add_context(context, int(self.gpus[device].context))

    def destroy_context(self, context: int) -> None:
        """Its streams, events and memory are destroyed by their own calls."""
        self._graphs.destroy_context(context)
        self._arrays.destroy_context(context)
        self.engine.remove_context(context)
        self._homes.pop(context, None)

    def set_limit(self, context: int, limit: int, value: int) -> None:
        if limit in _HEAPS:
            self._check_bound(value, "a heap or buffer of kernels")
        self._use_context(context)
        check(driver.cuCtxSetLimit(driver.CUlimit(limit), value), "cuCtxSetLimit")

    def create_stream(self, stream: int, context: int, flags: int, priority: int) -> None:
        self._use_context(context)
        handle = check(driver.cuStreamCreateWithPriority(flags & NON_BLOCKING, priority), "cuStreamCreateWithPriority")
        self._fence(handle)
        number = self._homes.get(context, 0)
        self.completion.add(stream, handle, int(self.gpus[number].context), number)

    def destroy_stream(self, stream: int) -> None:
        handle, home = self._stream(stream), self.completion.streams[stream].device
        self.completion.remove(stream)
        self._use(home)
        check(driver.cuStreamDestroy(handle), "cuStreamDestroy")

    def create_event(self, event: int, context: int, flags: int) -> None:
        self._use_context(context)
        keep = flags & int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        handle = check(driver.cuEventCreate(keep), "cuEventCreate")
        self._events[event] = (handle, not keep, self._homes.get(context, 0))
        self.engine.add_event(event, int(handle))

    def destroy_event(self, event: int) -> None:
        handle, _, home = self._event(event)
        self._use(home)
        self.engine.remove_event(event)
        del self._events[event]
        self._restored.pop(event, None)
        check(driver.cuEventDestroy(handle), "cuEventDestroy")

    def _event(self, event: int) -> tuple[Any, bool, int]:
        """Its handle, whether it takes the time, the number of its GPU."""
        if event not in self._events:
            raise DeviceError(f"event {event} does not exist", CUDA_ERROR_INVALID_HANDLE)
        return self._events[event]

    def load(self, module: int, binary: bytes, options: bytes, library: bool, device: int = 0,
             places: Sequence[GlobalVariable] = ()) -> tuple[ModuleTable, str]:
        self._use(device)
        with self._placing.still():
            loaded, text = steer(lambda: self._loader.load(binary, options, library),
                                 lambda made: modules.unload(made[0]), lambda made: made[0].table.globals, places,
                                 self._fillers(device), self._is_idle)
        try:
            self._check_bound(sum(v.size for one in [*self._modules.values(), loaded] for v in one.table.globals),
                              "module variables")
        except DeviceError:
            modules.unload(loaded)
            raise
        self._modules[module], self._module_homes[module] = loaded, device
        if loaded.prints and self.text is not None:
            self.text.loaded()
        sizes = [max((offset + size for offset, size in layout), default=0) for layout in loaded.layouts]
        self.engine.load_functions(module, [int(function) for function in loaded.functions], sizes, loaded.prints)
        for variable in loaded.table.globals:
            self.engine.add_range(variable.address, variable.size)
        self._place_variables()
        return loaded.table, text

    def unload(self, module: int) -> None:
        if module not in self._modules:
            raise DeviceError(f"module {module} does not exist", CUDA_ERROR_INVALID_HANDLE)
        unloaded = self._modules.pop(module)
        self.engine.remove_module(module)
        for variable in unloaded.table.globals:
            self.engine.remove_range(variable.address)
        self._unloaded.append((self._module_homes.pop(module), unloaded))
        self._place_variables()
        self._end_modules()

    def _is_idle(self) -> bool:
        """Whether nothing is under way, soon, and no stream may stand at a host function."""
        return not self._host_functions.open and self.drain(IDLE_SECONDS)

    def _fillers(self, number: int) -> Fillers:
        if number not in self._filled:
            self._filled[number] = driver_fillers()
        return self._filled[number]

    def placed(self) -> None:
        """Free the fillers of a rebuild: all its modules are loaded."""
        for number, fillers in self._filled.items():
            self._use(number)
            fillers.release()
        self._filled.clear()

    def _place_variables(self) -> None:
        if len(self.gpus) > 1:
            self._homes_of_memory.set_variables(
                (variable.address, variable.size, self._module_homes[number])
                for number, module in self._modules.items() for variable in module.table.globals)

    def _end_modules(self) -> None:
        """End what was unloaded, unless a stream may stand at a host function.

        The driver waits for the device then, and the device for host_function_done, which comes later in the
        journal. So the place is decided by the journal alone, and is the same in a replay.
        """
        while self._unloaded and not self._host_functions.open:
            with self._in_place.going():
                home, unloaded = self._unloaded.pop(0)
                self._use(home)
                modules.unload(unloaded)

    def link(self, inputs: list[tuple[int, str, bytes]], options: bytes) -> tuple[bytes, str]:
        self._use()
        state = check(driver.cuLinkCreate(0, [], []), "cuLinkCreate")
        try:
            for kind, name, data in inputs:
                number = driver.CUjitInputType(kind)
                check(driver.cuLinkAddData(state, number, data, len(data), name.encode(), 0, [], []),
                      f"cuLinkAddData({name})")
            pointer, size = check(driver.cuLinkComplete(state), "cuLinkComplete")
            return ctypes.string_at(int(pointer), int(size)), ""
        finally:
            driver.cuLinkDestroy(state)

    def function_attributes(self, module: int, function: int) -> tuple[int, ...]:
        handle = self._function(module, function)
        check(driver.cuFuncLoad(handle), "cuFuncLoad")
        return modules.attributes(handle)

    def tensor_map(self, form: int, arguments: bytes) -> bytes:
        self._use()
        return tensormap.encode(form, arguments)

    def cluster_occupancy(self, module: int, function: int, form: int, grid: tuple[int, int, int],
                          block: tuple[int, int, int], shared: int, cluster: tuple[int, int, int]) -> int:
        return clusters.occupancy(int(self._function(module, function)), form, grid, block, shared, cluster)

    def set_function_attribute(self, module: int, function: int, attribute: int, value: int) -> None:
        number = driver.CUfunction_attribute(attribute)
        check(driver.cuFuncSetAttribute(self._function(module, function), number, value), "cuFuncSetAttribute")

    def _function(self, module: int, function: int) -> Any:
        """Its handle; its context is current."""
        loaded = self._modules.get(module)
        if loaded is None or function >= len(loaded.functions):
            raise DeviceError(f"module {module} has no function {function}", CUDA_ERROR_INVALID_HANDLE)
        self._use(self._module_homes[module])
        return loaded.functions[function]

    def _kernel(self, module: int, function: int) -> tuple[Any, tuple[tuple[int, int], ...]]:
        """A function and where its parameters are."""
        return self._function(module, function), self._modules[module].layouts[function]

    def instantiate_graph(self, graph: int, context: int, flags: int, nodes: list[Node]) -> None:
        self._graphs.instantiate(graph, context, flags, nodes)

    def update_graph(self, graph: int, changes: dict[int, Node]) -> None:
        self._graphs.update(graph, changes)

    def destroy_graph(self, graph: int) -> None:
        self._graphs.destroy(graph)

    # -- arrays, textures, surfaces -------------------------------------------------
    def create_array(self, array: int, context: int, address: int, shape: ArrayShape) -> None:
        self._check_range(address, shape.size, shape.size, 1)
        self._arrays.create(array, context, address, shape)

    def destroy_array(self, array: int) -> None:
        self._arrays.destroy(array)

    def array_to_memory(self, seq: int, stream: int, array: int, box: Box) -> None:
        handle = self._stream(stream)
        self._run(seq, stream, self._arrays.copy(array, box, handle, False), "copy from an array")

    def memory_to_array(self, seq: int, stream: int, array: int, box: Box) -> None:
        handle = self._stream(stream)
        self._run(seq, stream, self._arrays.copy(array, box, handle, True), "copy to an array")

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
    def _ordered(self, name: str, seq: int, payload: Any = b"", **args: Any) -> None:
        """A hot call from Python. Raises :class:`DeviceError` for what is wrong with the call itself."""
        self.engine.apply(BY_NAME[name].id, seq, decoders.encode_args(name, **args), payload)

    def _answered(self, name: str, seq: int, done: Done, **args: Any) -> None:
        """The same for one with an answer."""
        if self._brought is not None:
            self._brought.expected, done = True, self._brought.bytes
        self.completion.expect(seq, done)
        try:
            self._ordered(name, seq, **args)
        except DeviceError:
            self.completion.unexpect(seq)
            raise

    def launch(self, seq: int, launch: Launch) -> None:
        grid, block = launch.grid, launch.block
        self._ordered("launch", seq, module=launch.module, function=launch.function, grid_x=grid[0], grid_y=grid[1],
                      grid_z=grid[2], block_x=block[0], block_y=block[1], block_z=block[2], shared=launch.shared,
                      flags=int(launch.cooperative), stream=launch.stream, parameters=launch.parameters,
                      attributes=launch.attributes)

    def launch_graph(self, seq: int, graph: int, stream: int) -> None:
        self._ordered("graph_launch", seq, exec=graph, stream=stream)

    def _graph_made(self, graph: int, executable: Any, nodes: Sequence[Node]) -> None:
        named = [self._modules.get(node.module) for node in every(nodes) if isinstance(node, KernelNode)]
        prints = any(module is None or module.prints for module in named)  # one that was unloaded may have
        self.engine.add_graph(graph, int(executable), prints)

    def copy_in(self, seq: int, stream: int, destination: int, pitch: int, width: int, height: int, data: Any) -> None:
        """The bytes are taken when this returns."""
        if height == 1:
            self._ordered("memcpy_h2d", seq, data, destination=destination, stream=stream)
        else:
            self._ordered("memcpy2d_h2d", seq, data, destination=destination, pitch=pitch, width=width,
                          height=height, stream=stream)

    def copy_out(self, seq: int, stream: int, source: int, pitch: int, width: int, height: int, done: Done) -> None:
        self._answered("memcpy2d_d2h", seq, done, source=source, pitch=pitch, width=width, height=height,
                       stream=stream)

    def copy(self, seq: int, stream: int, destination: int, destination_pitch: int, source: int, source_pitch: int,
             width: int, height: int) -> None:
        self._ordered("memcpy2d_d2d", seq, destination=destination, destination_pitch=destination_pitch,
                      source=source, source_pitch=source_pitch, width=width, height=height, stream=stream)

    def fill(self, seq: int, stream: int, destination: int, pitch: int, width: int, height: int, element: int,
             value: int) -> None:
        self._ordered("memset", seq, destination=destination, pitch=pitch, width=width, height=height,
                      element=element, value=value, stream=stream)

    def memory_operation(self, seq: int, stream: int, kind: int, address: int, value: int, flags: int) -> None:
        if not 0 <= kind < len(_MEMORY_OPERATIONS):
            raise DeviceError(f"stream memory operation {kind}", CUDA_ERROR_INVALID_VALUE)
        self._check_range(address, 8 if kind & 1 else 4, 8 if kind & 1 else 4, 1)
        name = _MEMORY_OPERATIONS[kind]
        self._run(seq, stream, getattr(driver, name)(self._stream(stream), address, value, flags), name)

    def record_event(self, seq: int, event: int, stream: int) -> None:
        self._ordered("event_record", seq, event=event, stream=stream, flags=0)

    def wait_event(self, seq: int, stream: int, event: int) -> None:
        self._ordered("stream_wait_event", seq, stream=stream, event=event, flags=0)

    def host_function(self, seq: int, stream: int, reached: Done) -> None:
        if self.error:
            reached(self.error, None)
            return
        handle = self._stream(stream)
        self.engine.boundary(stream)
        self._run(seq, stream, self._host_functions.enqueue(seq, handle, reached), "cuStreamWaitValue32")

    def host_function_done(self, seq: int) -> None:
        self._host_functions.done(seq)
        self._end_modules()

    def synchronize(self, seq: int, stream: int | None, done: Done) -> None:
        self.completion.mark(stream, seq, lambda result: done(result, None))

    def synchronize_device(self, seq: int, device: int, done: Done) -> None:
        context = int(self.gpus[device if device < len(self.gpus) else 0].context)
        self.completion.mark_context(context, seq, lambda result: done(result, None))

    def synchronize_event(self, seq: int, event: int, done: Done) -> None:
        self._answered("event_synchronize", seq, lambda result, data: done(result, None), event=event)

    def timed(self, seq: int, stream: int, work: Callable[[], None], done: TimesDone) -> None:
        handle = self._stream(stream)
        device = self.completion.streams[stream].device
        if device not in self._timings:
            self._timings[device] = Timings(self.gpus[device].context)
        self._brought = brought = Brought(done)
        try:
            self._timings[device].around(handle, work, brought.times)
        finally:
            self._brought = None

    # -- progress -------------------------------------------------------------------
    def on_progress(self, notify: Callable[[], None]) -> None:
        self.completion.on_progress(notify)

    def progress(self) -> tuple[set[int], dict[int, int]]:
        return self.engine.progress()

    def unfinished(self) -> tuple[int, str] | None:
        pending, _ = self.engine.progress()
        if not pending:
            return None
        seq, what = min(pending), ""
        if (launched := self.engine.launched(seq)) is not None:
            number, function = launched
            module = self._modules.get(number)
            if number == GRAPH:
                what = "a graph"
            elif module is not None:
                what = f"kernel {module.table.functions[function].name}"
        return seq, what

    def is_complete(self, seq: int) -> bool:
        return bool(self.engine.is_complete(seq))

    def wait_complete(self, seq: int, timeout: float | None = None) -> bool:
        return bool(self.engine.wait_complete(seq, int((FOREVER if timeout is None else timeout) * 1e9)))

    def busy_seconds(self) -> float:
        with self._closing:
            return 0.0 if self._closed else int(self.engine.worked()) / 1e9

    def drain(self, timeout: float) -> bool:
        drained = bool(self.engine.drain(int(timeout * 1e9))) and all(
            timings.drain(timeout) for timings in self._timings.values())
        if drained and not self.error:
            for gpu in self.gpus:
                gpu.use()
                gpu.zeroing.settle()
            try:
                self._arrays.gather()
            except DeviceError as error:
                self._failed(error.result, error.message)
        return drained

    # -- state ------------------------------------------------------------------------
    def regions(self) -> list[Region]:
        found = [Region(address, size, "mapped") for gpu in self.gpus
                 for address, (size, _) in sorted(gpu.memory.maps.items())]
        for number, module in sorted(self._modules.items()):
            found.extend(Region(g.address, g.size, "global", number, g.name) for g in module.table.globals)
        found.extend(Region(address, size, "pinned") for address, size in sorted(self.mirrors.ranges.items()))
        return found

    def reach_ranks(self, exchange: Any) -> None:
        pass

    def create_communicator(self, communicator: int, context: int, ranks: int, rank: int, unique: bytes,
                            members: Sequence[str] = ()) -> None:
        raise DeviceError("communicators by calls are not supported on a GPU", CUDA_ERROR_NOT_SUPPORTED)

    def destroy_communicator(self, communicator: int, abort: bool) -> None:
        raise DeviceError(f"no communicator {communicator}", CUDA_ERROR_INVALID_HANDLE)

    def collectives(self, seq: int, operations: Sequence[Operation]) -> None:
        raise DeviceError("collectives by calls are not supported on a GPU", CUDA_ERROR_NOT_SUPPORTED)

    def communicators(self) -> list[dict[str, Any]]:
        return []

    def pins(self) -> list[str]:
        return sorted({pin for module in list(self._modules.values()) for pin in module.pins})

    def read(self, address: int, size: int) -> bytes:
        if self.mirrors.contains(address, size):
            return self.mirrors.read(address, size)
        self._at(address)
        data = np.empty(size, np.uint8)
        check(driver.cuMemcpyDtoH(data.ctypes.data, address, size), "cuMemcpyDtoH")
        return data.tobytes()

    def write(self, address: int, data: Any) -> None:
        if self.mirrors.contains(address, len(data)):
            self.mirrors.write(address, data)
            return
        self._at(address)
        source = np.frombuffer(data, np.uint8)
        check(driver.cuMemcpyHtoD(address, source.ctypes.data, source.nbytes), "cuMemcpyHtoD")
        self.hasher.wrote()

    def hash_pages(self, region: Region, key: bytes) -> np.ndarray:
        return self.hash_regions([region], key)[0].hashes

    def hash_regions(self, regions: Sequence[Region], key: bytes) -> list[PageHashes]:
        with self._in_place.reading(regions):
            return hash_regions(self.hasher, self.mirrors, regions, key)

    def _gone(self, regions: Sequence[Region]) -> Region | None:
        inside = [gpu.memory.inside() for gpu in self.gpus]
        for region in regions:
            if region.kind == "mapped":
                there = any(mapped(region.address, region.size) for mapped in inside)
            elif region.kind == "global":
                there = not region.owner or region.owner in self._modules
            else:
                there = self.mirrors.contains(region.address, region.size)
            if not there:
                return region
        return None

    def copy_and_hash(self, pages: Ranges, staging: int, key: bytes) -> PageHashes:
        return self.hasher.copy_and_hash(pages, staging, key)

    def frames(self) -> FramePool:
        return self._frames.pool

    def page_ring(self) -> CudaRing:
        return self._ring

    def write_pages(self, runs: Sequence[tuple[int, int, Any]]) -> None:
        on_device = []
        for address, size, data in runs:
            if self.mirrors.contains(address, size):
                self.mirrors.write(address, bytes(size) if data is None else data)
            elif data is None and len(self.gpus) > 1:
                self._clear(address, size)
            else:
                on_device.append((address, size, data))
        if on_device:
            self._ring.write(on_device, self._fence)

    def _clear(self, address: int, size: int) -> None:
        """Zeros, by the GPU whose memory it is: no other may set the variables of its modules."""
        self._at(address)
        check(driver.cuMemsetD8(address, 0, size), "cuMemsetD8")
        check(driver.cuStreamSynchronize(driver.CUstream(driver.CU_STREAM_LEGACY)), "cuStreamSynchronize")
        self.hasher.wrote()

    def free_memory(self) -> int:
        self._use()
        return int(check(driver.cuMemGetInfo(), "cuMemGetInfo")[0])

    def stage(self, size: int) -> int:
        """Memory of this context, beside the session's own; other sessions of the device may take it first."""
        self._use()
        return self.staging.stage(size)

    def unstage(self, address: int) -> None:
        self._use()
        self.staging.unstage(address)

    def read_staged(self, address: int, size: int) -> bytes:
        self._use()
        data = np.empty(size, np.uint8)
        check(driver.cuMemcpyDtoH(data.ctypes.data, address, size), "cuMemcpyDtoH")
        return data.tobytes()

    def _recorded(self, event: int) -> bool:
        """Whether it was recorded here; what was restored from elsewhere is over with that."""
        return bool(self.engine.event_recorded(event))

    def _time(self, event: int) -> int:
        """Session-clock ns of the event's last completed record."""
        handle, timing, home = self._event(event)
        if not timing:
            raise DeviceError(f"event {event} was made without timing", CUDA_ERROR_INVALID_HANDLE)
        restored = self._restored.get(event)
        if restored is not None and not self._recorded(event):
            return restored
        if not self._recorded(event):
            raise DeviceError(f"event {event} was never recorded", CUDA_ERROR_INVALID_HANDLE)
        gpu = self.gpus[home]
        gpu.use()
        milliseconds = check(driver.cuEventElapsedTime(gpu.reference, handle), "cuEventElapsedTime")
        return gpu.reference_time + int(milliseconds * 1e6)

    def elapsed(self, start: int, end: int) -> float:
        (first, _, home), (last, _, other) = self._event(start), self._event(end)
        if self._recorded(start) and self._recorded(end) and home == other:
            self._use(home)
            return float(check(driver.cuEventElapsedTime(first, last), "cuEventElapsedTime"))
        return (self._time(end) - self._time(start)) / 1e6

    def event_states(self) -> dict[int, int | None]:
        states: dict[int, int | None] = {}
        for event, (_, timing, _) in self._events.items():
            if event in self._restored or self._recorded(event):
                states[event] = self._time(event) if timing else 0
            else:
                states[event] = None
        return states

    def restore_event_states(self, states: dict[int, int | None]) -> None:
        self._restored = {event: when for event, when in states.items() if when is not None}

    def clock(self) -> int:
        return time.monotonic_ns() + self._clock_offset

    def set_clock(self, now: int) -> None:
        shift = now - self.clock()
        self._clock_offset += shift
        for gpu in self.gpus:
            gpu.reference_time += shift

    def close(self) -> None:
        self.drain(1.0)  # copies under way read and write memory that is given back below
        self._host_functions.stop()
        for timings in self._timings.values():
            timings.stop()
        self.completion.stop()
        self._use()
        if self.text is not None:
            self.text.close()
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
