"""Translation of the driver's CUresult to :class:`DeviceError`."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver

from rgpu.server.device.hardware import STICKY as STICKY
from rgpu.session.errors import DeviceError


def check(result: tuple[Any, ...], what: str) -> Any:
    """Return the values of a driver call. Raises :class:`DeviceError` naming ``what`` and the result."""
    error, *values = result
    if int(error) != 0:
        raise DeviceError(f"{what}: {driver.CUresult(int(error)).name}", int(error))
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)
