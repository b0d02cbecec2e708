"""A driver's calls about memory, for tests without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cuda.bindings import driver

READ = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
BOTH = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE


class Driver:
    """Types are the bindings' own; functions note their calls, keep handles and mappings, and fail when told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails: dict[str, Callable[[tuple[Any, ...]], int]] = {}
        self.handles: set[int] = set()
        self.mapped: dict[int, int] = {}
        self._next = 100

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(driver, name)

        def function(*args: Any) -> tuple[Any, ...]:
            self.calls.append((name, *args))
            code = self.fails.get(name, lambda args: 0)(args)
            return (driver.CUresult(code), *(() if code else getattr(self, f"_{name}", lambda *args: ())(*args)))

        return function

    def _new(self) -> tuple[int]:
        self._next += 1
        self.handles.add(self._next)
        return (self._next,)

    def _cuMemCreate(self, *args: Any) -> tuple[int]:
        return self._new()

    def _cuMemImportFromShareableHandle(self, *args: Any) -> tuple[int]:
        return self._new()

    def _cuMemExportToShareableHandle(self, handle: int, *args: Any) -> tuple[int]:
        assert handle in self.handles
        return (handle + 1000,)

    def _cuMemRelease(self, handle: int) -> tuple[()]:
        self.handles.remove(handle)
        return ()

    def _cuMemMap(self, address: int, size: int, *args: Any) -> tuple[()]:
        assert all(address + size <= at or at + held <= address for at, held in self.mapped.items()), "overlap"
        self.mapped[address] = size
        return ()

    def _cuMemUnmap(self, address: int, size: int) -> tuple[()]:
        assert self.mapped.pop(address) == size
        return ()

    def _cuMemAddressReserve(self, size: int, granule: int, wish: int, flags: int) -> tuple[int]:
        return (wish,)

    def _cuStreamCreate(self, flags: int) -> tuple[int]:
        return (5,)

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


class Zeros:
    settled = 0

    def fill(self, address: int, size: int) -> None: ...

    def settle(self) -> None:
        self.settled += 1
