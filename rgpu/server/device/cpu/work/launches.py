"""Kernel launches of the ``cpu`` device: checked and compiled at the call, executed by the PTX engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from rgpu.checkpoint.device import Launch
from rgpu.link.faults import fault
from rgpu.server.device.cpu.memory import Memory
from rgpu.server.device.cpu.modules import Engine, Modules
from rgpu.server.device.cpu.printed import Printed
from rgpu.server.device.cpu.ranges import RangeTable
from rgpu.server.device.cpu.streams import Fault
from rgpu.server.device.cpu.textures.objects import Textures
from rgpu.server.device.hardware import HARDWARE

ECC_UNCORRECTABLE, ILLEGAL_ADDRESS = 214, 700


class Launches:
    """Makes the functions that execute launches, with ``threads`` host threads each; ``cancel`` ends kernels."""

    def __init__(self, engine: Engine, memory: Memory, modules: Modules, textures: Textures, text: Printed,
                 threads: int, cancel: threading.Event) -> None:
        self._engine, self._memory, self._modules = engine, memory, modules
        self._textures, self._text = textures, text
        self._threads, self._cancel = threads, cancel
        self._ranges: tuple[RangeTable | None, Any] = (None, None)

    def launch_work(self, launch: Launch, conditions: dict[int, int] | None = None) -> Callable[[], None]:
        """Check a launch; return what executes it. ``conditions``: those of its graph, by handle; it may set them.

        Raises :class:`DeviceError`.
        """
        module, kernel = self._modules.check_launch(launch)
        parameters = bytes(launch.parameters[:kernel.parameter_bytes])
        self._modules.compile(module, kernel)  # here, as a driver loads a kernel at its first launch

        def run() -> None:
            injected = fault("cpu.launch")
            if injected == "ecc":
                raise Fault(ECC_UNCORRECTABLE, f"{kernel.name}: {HARDWARE[ECC_UNCORRECTABLE]}")
            if injected == "neighbour":  # as a context under MPS gets the error of another session's
                raise Fault(ILLEGAL_ADDRESS, f"{kernel.name}: not its own")
            self._text.wait_room()
            result = module.linked.launch(
                kernel.name, launch.grid, launch.block, launch.shared, parameters, self._kernel_ranges(),
                threads=self._threads, cancel=self._cancel,
                printf=self._text.writer(kernel.name), cooperative=launch.cooperative,
                textures=self._textures.table(self._memory.valid), conditions=conditions)
            if result.error:
                where = f" at {result.address:#x}" if result.address else ""
                raise Fault(result.error, f"{kernel.name}{where}: {result.detail}")

        return run

    def _kernel_ranges(self) -> Any:
        """Return the engine's form of the present table; made once for each table."""
        table, ranges = self._ranges
        current = self._memory.valid
        if table is not current:
            ranges = self._engine.MemoryRanges(self._memory.reachable())
            self._ranges = (current, ranges)
        return ranges
