"""Translation of the driver's CUresult to :class:`DeviceError`."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver

from rgpu.session.errors import DeviceError

#: Results after which the context is unusable: every later call returns them.
STICKY = frozenset({214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 720})


def check(result: tuple[Any, ...], what: str) -> Any:
    """Return the values of a driver call. Raises :class:`DeviceError` naming ``what`` and the result."""
    error, *values = result
    if int(error) != 0:
        raise DeviceError(f"{what}: {driver.CUresult(int(error)).name}", int(error))
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)
