"""Judgement of a worker's errors: whether the program receives one, or the worker ends and its session is recovered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import structlog

from rgpu.checkpoint.device import Device
from rgpu.server.device import hardware
from rgpu.server.device.spec import lost

log = structlog.get_logger(__name__)


class Judge:
    """See the module docstring (OWNERSHIP 9). Called with each error before the program receives it."""

    def __init__(self, spec: str, device: Device, be_ended: Callable[..., NoReturn], mps: bool) -> None:
        """``be_ended(event, reason, **values)``: has the daemon end this process. ``mps``: it shares an MPS server."""
        self._spec, self._device, self._be_ended, self._mps = spec, device, be_ended, mps
        self._own: set[int] = set()  #: results that were found to be the program's own errors

    def __call__(self, result: int) -> None:
        """Return if the error is the program's own; else the worker sends nothing more, and does not return."""
        if result in self._own:
            return
        if why := hardware.fault(result, lambda: lost(self._spec, self._device)):
            log.error("the hardware failed", device=self._spec, result=result, reason=why, detail=self._detail())
            self._be_ended("fault", why, result=result)
        if self._mps and (why := hardware.may_be_a_neighbours(result)):
            log.error("an error under MPS may be another session's", device=self._spec, result=result, reason=why,
                      detail=self._detail())
            self._be_ended("unfit", why)
        self._own.add(result)

    def _detail(self) -> Any:
        return self._device.error_detail()
