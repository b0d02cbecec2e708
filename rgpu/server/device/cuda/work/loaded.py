"""The loaded modules of a session by their numbers: the GPU of each, its functions, its variables.

The engine gets from here the functions to launch and the variables that copies may touch; the GPUs get the addresses of
their variables. :mod:`.loading` loads and ends modules.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

from cuda.bindings import driver

from rgpu.server.device.cuda.engine import GRAPH, Engine
from rgpu.server.device.cuda.errors import check
from rgpu.server.device.cuda.gpus import Gpus
from rgpu.server.device.cuda.work import clusters, modules
from rgpu.server.device.cuda.work.binaries import Trait
from rgpu.server.device.cuda.work.modules import Module
from rgpu.session.errors import DeviceError
from rgpu.session.objects.graphs import KernelNode, Node, every
from rgpu.session.objects.module_table import GlobalVariable

CUDA_ERROR_INVALID_HANDLE = 400
HEAP = "a kernel used malloc: the heap of its GPU is the driver's own, and neither read nor moved"


class LoadedModules:
    """The table of modules. Methods raise :class:`DeviceError` for the number of no such module or function."""

    def __init__(self, gpus: Gpus, engine: Engine) -> None:
        self._gpus, self._engine = gpus, engine
        self._modules: dict[int, tuple[Module, int]] = {}  #: the module, the number of its GPU

    def __contains__(self, module: int) -> bool:
        return module in self._modules

    def add(self, module: int, loaded: Module, device: int) -> None:
        """Add a module that was loaded on the GPU ``device``; its context is current."""
        self._modules[module] = loaded, device
        sizes = [max((offset + size for offset, size in layout), default=0) for layout in loaded.layouts]
        self._engine.load_functions(module, [int(function) for function in loaded.functions], sizes,
                                    loaded.traits)
        for variable in loaded.table.globals:
            self._engine.add_range(variable.address, variable.size)
        self._place_variables()

    def remove(self, module: int) -> tuple[Module, int]:
        """Remove a module that the program unloads; returns it, still loaded in the driver, and its GPU's number."""
        if module not in self._modules:
            raise DeviceError(f"module {module} does not exist", CUDA_ERROR_INVALID_HANDLE)
        unloaded, device = self._modules.pop(module)
        self._engine.remove_module(module)
        for variable in unloaded.table.globals:
            self._engine.remove_range(variable.address)
        self._place_variables()
        return unloaded, device

    def _place_variables(self) -> None:
        self._gpus.set_variables((variable.address, variable.size, device)
                                 for loaded, device in self._modules.values() for variable in loaded.table.globals)

    # -- variables ------------------------------------------------------------------
    def variables(self) -> Iterator[tuple[int, GlobalVariable]]:
        """Yield (module, variable) of all variables, by the modules' numbers."""
        for number, (loaded, _) in sorted(self._modules.items(), key=lambda one: one[0]):
            for variable in loaded.table.globals:
                yield number, variable

    def pins(self) -> list[str]:
        """Return why the session cannot leave its GPUs, one reason each."""
        pins = {pin for loaded, _ in list(self._modules.values()) for pin in loaded.pins}
        return sorted(pins | {HEAP} if self._engine.allocated() else pins)

    # -- functions ------------------------------------------------------------------
    def function(self, module: int, function: int) -> Any:
        """Return a function's handle; its context is current."""
        loaded, device = self._modules.get(module, (None, 0))
        if loaded is None or function >= len(loaded.functions):
            raise DeviceError(f"module {module} has no function {function}", CUDA_ERROR_INVALID_HANDLE)
        self._gpus.use(device)
        return loaded.functions[function]

    def kernel(self, module: int, function: int) -> tuple[Any, tuple[tuple[int, int], ...]]:
        """Return a function and the (offset, size) of each of its parameters."""
        return self.function(module, function), self._modules[module][0].layouts[function]

    def attributes(self, module: int, function: int) -> tuple[int, ...]:
        """Return the attributes of a function, which is loaded for that."""
        handle = self.function(module, function)
        check(driver.cuFuncLoad(handle), "cuFuncLoad")
        return modules.attributes(handle)

    def set_attribute(self, module: int, function: int, attribute: int, value: int) -> None:
        """Set a CUfunction_attribute of a function."""
        number = driver.CUfunction_attribute(attribute)
        check(driver.cuFuncSetAttribute(self.function(module, function), number, value), "cuFuncSetAttribute")

    def cluster_occupancy(self, module: int, function: int, form: int, grid: tuple[int, int, int],
                          block: tuple[int, int, int], shared: int, cluster: tuple[int, int, int]) -> int:
        """See :func:`rgpu.server.device.cuda.work.clusters.occupancy`."""
        return clusters.occupancy(int(self.function(module, function)), form, grid, block, shared, cluster)

    def traits(self, nodes: Sequence[Node]) -> Trait:
        """Return what kernels of a graph with these nodes may do; one of an unloaded module may have printed."""
        named = [self._modules.get(node.module) for node in every(nodes) if isinstance(node, KernelNode)]
        return functools.reduce(operator.or_, (found[0].traits if found else Trait.PRINTS for found in named), Trait(0))

    def describe(self, launched: tuple[int, int] | None) -> str:
        """Return a description of the engine's launch: "a graph", "kernel NAME"; empty where it is not known."""
        if launched is None:
            return ""
        number, function = launched
        if number == GRAPH:
            return "a graph"
        loaded, _ = self._modules.get(number, (None, 0))
        return "" if loaded is None else f"kernel {loaded.table.functions[function].name}"
