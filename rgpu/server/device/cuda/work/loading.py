"""When and where modules are loaded, and when the driver unloads them.

Where: at the addresses that the driver chooses while the worker's own mappings are out of its way (:class:`.Placing`),
and in a rebuild at the former addresses of the variables, as far as possible (:func:`.steer`). When they end: not while
a stream may wait at a host function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from rgpu.server.device.cuda.gpus import Gpus
from rgpu.server.device.cuda.memory.placing import Placing
from rgpu.server.device.cuda.memory.steering import Fillers, driver_fillers, steer
from rgpu.server.device.cuda.work import modules
from rgpu.server.device.cuda.work.hostfunctions import HostFunctions
from rgpu.server.device.cuda.work.modules import Loader, Module
from rgpu.session.objects.module_table import GlobalVariable

IDLE_SECONDS = 2.0  #: that a load in a replay waits for work under way before it is repeated


class Loading:
    """Loads modules on a session's GPUs. Every method raises :class:`DeviceError`.

    ``drain(seconds)``: returns whether all work completed within that time.
    """

    def __init__(self, gpus: Gpus, loader: Loader, placing: Placing, host_functions: HostFunctions,
                 drain: Callable[[float], bool]) -> None:
        self._gpus, self._loader, self._placing = gpus, loader, placing
        self._host_functions, self._drain = host_functions, drain
        self._filled: dict[int, Fillers] = {}  #: by GPU; while a session is rebuilt

    def load(self, device: int, binary: bytes, options: bytes, library: bool,
             places: Sequence[GlobalVariable]) -> tuple[Module, str]:
        """Load a module binary on a GPU, its variables at ``places`` if possible; also returns the JIT's log."""
        self._gpus.use(device)
        with self._placing.still():
            return steer(lambda: self._loader.load(binary, options, library),
                         lambda made: modules.unload(made[0]), lambda made: made[0].table.globals, places,
                         self._fillers(device), self._is_idle)

    def _is_idle(self) -> bool:
        """Whether the device is idle within IDLE_SECONDS, and no stream may wait at a host function."""
        return not self._host_functions.open and self._drain(IDLE_SECONDS)

    def _fillers(self, number: int) -> Fillers:
        if number not in self._filled:
            self._filled[number] = driver_fillers()
        return self._filled[number]

    def placed(self) -> None:
        """Free the fillers of a rebuild: all its modules are loaded."""
        for number, fillers in self._filled.items():
            self._gpus.use(number)
            fillers.release()
        self._filled.clear()


class Endings:
    """Modules that the program has unloaded and the driver not yet. Methods raise :class:`DeviceError`.

    ``going()``: a context in which memory may be unmapped, since no other thread reads it.
    """

    def __init__(self, gpus: Gpus, host_functions: HostFunctions,
                 going: Callable[[], AbstractContextManager[None]]) -> None:
        self._gpus, self._host_functions, self._going = gpus, host_functions, going
        self._waiting: list[tuple[Module, int]] = []  #: the module, the number of its GPU

    def add(self, module: Module, device: int) -> None:
        """Add a module that the program has unloaded."""
        self._waiting.append((module, device))
        self.end()

    def end(self) -> None:
        """End the unloaded modules, unless a stream may wait at a host function.

        The driver then waits for the device, and the device for host_function_done, which follows in the
        journal. So the moment is decided by the journal alone, and is the same in a replay.
        """
        while self._waiting and not self._host_functions.open:
            with self._going():
                module, device = self._waiting.pop(0)
                self._gpus.use(device)
                modules.unload(module)
