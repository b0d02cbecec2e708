"""Copies and memsets of the ``cpu`` device: checked at the call, and again when they execute.

Memory that was freed in between is an error of the program, as on a GPU, and not of rgpu.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rgpu.server.device.cpu import addressspace
from rgpu.server.device.cpu.memory import Memory
from rgpu.server.device.cpu.streams import Fault
from rgpu.session.errors import DeviceError

INVALID_VALUE, ILLEGAL_ADDRESS = 1, 700
#: Copies out up to this size return bytes, larger ones a memoryview (one copy less).
SMALL_COPY = 1 << 20


class Copies:
    """Makes the functions that execute copies and memsets. Every method raises :class:`DeviceError` for an invalid
    call.

    Sizes are in bytes: ``height`` rows of ``width``, the beginnings of two rows a pitch apart.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def rows(self, address: int, pitch: int, width: int, height: int, what: str) -> np.ndarray[Any, Any]:
        """Return the bytes, uint8 (height, width), at execution. Raises :class:`Fault` if they are no longer valid."""
        try:
            self._memory.check_rows(address, pitch, width, height, what)
        except DeviceError as error:
            raise Fault(ILLEGAL_ADDRESS, error.message) from error
        return addressspace.rows(address, pitch, width, height)

    def copy_in_work(self, destination: int, pitch: int, width: int, height: int, data: Any) -> Callable[[], None]:
        """Return what copies packed host bytes to device memory; the bytes must not change until it ran."""
        source = np.frombuffer(data, np.uint8)
        if source.size != width * height:
            raise DeviceError(f"{source.size} bytes for {height} rows of {width}", INVALID_VALUE)
        self._memory.check_rows(destination, pitch, width, height, "destination")

        def run() -> None:
            if source.size:
                self.rows(destination, pitch, width, height, "destination")[:] = source.reshape(height, width)

        return run

    def copy_out_work(self, source: int, pitch: int, width: int, height: int) -> Callable[[], Any]:
        """Return what copies out: it returns the bytes packed, as bytes, or a memoryview when more than SMALL_COPY."""
        self._memory.check_rows(source, pitch, width, height, "source")

        def run() -> Any:
            if not width * height:
                return b""
            rows = self.rows(source, pitch, width, height, "source")
            return rows.tobytes() if rows.size <= SMALL_COPY else rows.copy().data.cast("B")

        return run

    def copy_work(self, destination: int, destination_pitch: int, source: int, source_pitch: int, width: int,
                  height: int) -> Callable[[], None]:
        """Return what copies within device memory."""
        self._memory.check_rows(destination, destination_pitch, width, height, "destination")
        self._memory.check_rows(source, source_pitch, width, height, "source")

        def run() -> None:
            if width and height:
                rows = self.rows(source, source_pitch, width, height, "source")
                self.rows(destination, destination_pitch, width, height, "destination")[:] = rows

        return run

    def fill_work(self, destination: int, pitch: int, width: int, height: int, element: int,
                  value: int) -> Callable[[], None]:
        """Return what sets ``width`` × ``height`` elements of ``element`` bytes to ``value``."""
        if element not in (1, 2, 4):
            raise DeviceError(f"elements of {element} bytes", INVALID_VALUE)
        if destination % element or (height > 1 and pitch % element):
            raise DeviceError(f"destination {destination:#x} is not aligned to {element}", INVALID_VALUE)
        size = width * element
        self._memory.check_rows(destination, pitch, size, height, "destination")
        pattern = (value & ((1 << 8 * element) - 1)).to_bytes(element, "little")

        def run() -> None:
            if size and height:
                rows = self.rows(destination, pitch, size, height, "destination")
                if pattern.count(pattern[0]) == element:
                    rows[:] = pattern[0]
                else:
                    rows.view(f"<u{element}")[:] = int.from_bytes(pattern, "little")

        return run
