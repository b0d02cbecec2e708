"""The GPUs of one session: context, memory, zeroing and reference event of each; which GPU an address belongs to.

A session's worker has the primary context of each of its GPUs. All of them
reach each other's memory, so that a kernel of one reads another's results, as with
CUDA's peer access, and the first makes checkpoints and moves for all.
Sources: CUDA driver API, "Peer Context Memory Access", "Virtual Memory Management".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from cuda.bindings import driver

from rgpu.server.device.cuda.errors import check
from rgpu.server.device.cuda.foreign import Foreign
from rgpu.server.device.cuda.memory.allocations import Memory, Ranges
from rgpu.server.device.cuda.memory.handles import Handles
from rgpu.server.device.cuda.memory.hashers import Homes
from rgpu.server.device.cuda.memory.zeroing import Zeroing
from rgpu.session.errors import DeviceError

CUDA_ERROR_INVALID_DEVICE = 101
PEER_ACCESS_ALREADY_ENABLED = 704


class Gpu:
    """One GPU; ``number`` is the session's. :meth:`open_memory` sets the fields made later than the context."""

    memory: Memory
    foreign: Foreign
    zeroing: Zeroing

    def __init__(self, number: int, ordinal: int) -> None:
        self.number, self.ordinal = number, ordinal
        self.device = check(driver.cuDeviceGet(ordinal), "cuDeviceGet")
        self.context = check(driver.cuDevicePrimaryCtxRetain(self.device), "cuDevicePrimaryCtxRetain")
        self.handles = Handles()  #: of its textures and surfaces
        self.reference: Any = None  #: a recorded event, which others are timed from
        self.reference_time = 0  #: time of the reference, ns on the session's clock

    def use(self) -> None:
        """Make the context current in this thread; costs a look-up of the driver's thread state."""
        check(driver.cuCtxSetCurrent(self.context), "cuCtxSetCurrent")

    def refer(self) -> None:
        """Record the reference, and allocate driver memory for handles: the same in every worker of a session.

        The context is current; the caller sets :attr:`reference_time`.
        """
        self.handles.open()
        self.reference = check(driver.cuEventCreate(0), "cuEventCreate")
        check(driver.cuEventRecord(self.reference, 0), "cuEventRecord")
        check(driver.cuEventSynchronize(self.reference), "cuEventSynchronize")

    def open_memory(self, ranges: Ranges, zeroing: Zeroing, gpus: Iterable[Gpu]) -> None:
        """Open the session's range on this GPU, reached by all of ``gpus``."""
        self.zeroing = zeroing
        self.memory = Memory(self.ordinal, ranges, zeroing, self.number,
                             [gpu.ordinal for gpu in gpus if gpu is not self])
        self.foreign = Foreign(self.memory)

    def close(self) -> None:
        """Free the GPU's memory and release its primary context."""
        self.use()
        self.foreign.close()
        self.memory.close()
        self.zeroing.close()
        driver.cuDevicePrimaryCtxRelease(self.device)


class Gpus:
    """All GPUs of a session by its numbers, mostly one; finds the GPU of an address, or of one of the program's
    contexts.

    Methods that make a context current do so in the calling thread.
    """

    def __init__(self, ordinals: Sequence[int]) -> None:
        """Open the GPUs; afterwards the first one's context is current. Raises :class:`DeviceError`."""
        self._gpus = open_gpus(ordinals)
        self.homes = Homes(len(self._gpus))  #: of memory
        self._of_contexts: dict[int, int] = {}  #: context → its GPU's number
        self.use()

    def __len__(self) -> int:
        return len(self._gpus)

    def __iter__(self) -> Iterator[Gpu]:
        return iter(self._gpus)

    def __getitem__(self, number: int) -> Gpu:
        return self._gpus[number]

    def use(self, number: int = 0) -> None:
        """Make a GPU's context current."""
        self._gpus[number].use()

    def at(self, address: int) -> Gpu:
        """Return the GPU that owns the memory at ``address``, its context current."""
        gpu = self._gpus[self.homes(address) if len(self._gpus) > 1 else 0]
        gpu.use()
        return gpu

    def set_variables(self, variables: Iterable[tuple[int, int, int]]) -> None:
        """Set (address, bytes, number) of all variables of modules: see :meth:`Homes.set_variables`."""
        if len(self._gpus) > 1:
            self.homes.set_variables(variables)

    def fence(self, stream: Any) -> None:
        """Order work submitted to ``stream`` from now on after all zeros so far."""
        for gpu in self._gpus:
            gpu.zeroing.fence(stream)

    # -- the program's contexts: all of one GPU share the worker's one context on it ----------
    def add_context(self, context: int, number: int) -> Gpu:
        """Add a program's context to a GPU and return the GPU. Raises :class:`DeviceError` for an unknown number."""
        if not 0 <= number < len(self._gpus):
            raise DeviceError(f"the session has {len(self._gpus)} GPUs, and no device {number}",
                              CUDA_ERROR_INVALID_DEVICE)
        self._of_contexts[context] = number
        return self._gpus[number]

    def remove_context(self, context: int) -> None:
        """Forget a context."""
        self._of_contexts.pop(context, None)

    def of_context(self, context: int) -> Gpu:
        """Return the GPU of one of the program's contexts, the first for an unknown context."""
        return self._gpus[self._of_contexts.get(context, 0)]

    def use_context(self, context: int) -> Any:
        """Make the GPU's context current and return the driver's context."""
        gpu = self.of_context(context)
        gpu.use()
        return gpu.context


def open_gpus(ordinals: Sequence[int]) -> list[Gpu]:
    """Open the contexts, each with access to all others; none is current afterwards. Raises :class:`DeviceError`."""
    gpus = [Gpu(number, ordinal) for number, ordinal in enumerate(ordinals)]
    for one in gpus:
        for other in gpus:
            if one is not other:
                one.use()
                code = driver.cuCtxEnablePeerAccess(other.context, 0)
                if int(code[0]) not in (0, PEER_ACCESS_ALREADY_ENABLED):
                    raise DeviceError(f"cuda:{one.ordinal} does not reach the memory of cuda:{other.ordinal}: a "
                                      f"session cannot have both ({driver.CUresult(int(code[0])).name})",
                                      int(code[0]))
    return gpus
