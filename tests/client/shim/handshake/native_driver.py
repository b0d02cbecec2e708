"""The driver by ctypes, for the recorders beside this file."""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from typing import Any, cast


class Driver:
    """``driver.cuName(args…)`` gives the CUresult."""

    def __init__(self) -> None:
        self.library = c.CDLL("libcuda.so.1")

    def __getattr__(self, name: str) -> Callable[..., int]:
        function = getattr(self.library, name)
        function.restype = c.c_int
        return cast("Callable[..., int]", function)

    def value(self, name: str, *args: Any, kind: Any = c.c_int) -> Any:
        """``[result, value]`` of a function whose first parameter is the answer."""
        out = kind(0)
        result = getattr(self, name)(c.byref(out), *args)
        return [result, out.value]
