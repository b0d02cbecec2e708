"""NVML as far as we ask it: a GPU that is lost, XIDs. With a library that says what a test wants, and on a GPU."""

from __future__ import annotations

import asyncio
import shutil
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from rgpu.server.device.cuda import nvml
from rgpu.server.node.devices import examining

UUIDS = [bytes(range(16)), bytes(range(16, 32))]


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class NVMLError_Timeout(NVMLError):  # noqa: N801 - the library's name
    def __init__(self) -> None:
        super().__init__(10)


class Library:
    """pynvml's functions that we call. ``errors``: function → what it raises; ``events``: (uuid or error, XID)."""

    NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED, NVML_TEMPERATURE_GPU = 15, 16, 0
    nvmlEventTypeXidCriticalError = 8  # noqa: N815
    NVMLError, NVMLError_Timeout = NVMLError, NVMLError_Timeout

    def __init__(self, errors: dict[str, int] | None = None, events: list[tuple[str | int, int]] | None = None) -> None:
        self.errors, self.events = errors or {}, events or []
        self.begun = 0
        self.registered: list[str] = []

    def _call(self, name: str) -> None:
        if name in self.errors:
            raise NVMLError(self.errors[name])

    def nvmlInit(self) -> None:  # noqa: N802
        self._call("nvmlInit")
        self.begun += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.begun -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        self._call("nvmlDeviceGetHandleByUUID")
        return uuid

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:  # noqa: N802
        self._call("nvmlDeviceGetTemperature")
        return 40

    def nvmlDeviceGetUUID(self, handle: Any) -> str:  # noqa: N802
        if isinstance(handle, int):
            raise NVMLError(handle)
        return str(handle)

    def nvmlEventSetCreate(self) -> str:  # noqa: N802
        return "events"

    def nvmlEventSetFree(self, events: str) -> None: ...  # noqa: N802

    def nvmlDeviceRegisterEvents(self, handle: str, kind: int, events: str) -> None:  # noqa: N802
        self._call("nvmlDeviceRegisterEvents")
        self.registered.append(handle)

    def nvmlEventSetWait_v2(self, events: str, milliseconds: int) -> Any:  # noqa: N802
        if not self.events:
            time.sleep(0.01)
            raise NVMLError_Timeout
        device, xid = self.events.pop(0)
        return SimpleNamespace(device=device, eventData=xid)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(**values: Any) -> Library:
        found = Library(**values)
        monkeypatch.setitem(sys.modules, "pynvml", found)
        return found

    return use


@pytest.mark.parametrize(("errors", "why"), [
    ({}, ""),
    ({"nvmlDeviceGetTemperature": 15}, "the GPU is lost"),
    ({"nvmlDeviceGetHandleByUUID": 15}, "the GPU is lost"),
    ({"nvmlDeviceGetHandleByUUID": 16}, "the GPU needs a reset"),
    ({"nvmlDeviceGetTemperature": 3}, ""),  # not supported
    ({"nvmlInit": 9}, ""),  # no driver
])
def test_whether_a_gpu_is_lost(library: Any, errors: dict[str, int], why: str) -> None:
    made = library(errors=errors)
    assert nvml.lost(UUIDS[0]) == why
    assert made.begun == 0, "what was begun was ended"


def test_without_the_library_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.lost(UUIDS[0]) == ""
    nvml.XidWatch(UUIDS, lambda uuid, xid: pytest.fail("nothing can be told"))._run()


def test_xids_are_told_of_the_gpu_that_has_them(library: Any) -> None:
    """One whose GPU cannot be told any more may be anybody's."""
    made = library(events=[(nvml.name(UUIDS[1]), 48), (15, 79)])
    told: list[tuple[bytes, int]] = []
    all_there = threading.Event()

    def tell(uuid: bytes, xid: int) -> None:
        told.append((uuid, xid))
        if len(told) == 3:
            all_there.set()

    watch = nvml.XidWatch(UUIDS, tell)
    watch.start()
    assert all_there.wait(10)
    watch.close()
    assert told == [(UUIDS[1], 48), (UUIDS[0], 79), (UUIDS[1], 79)]
    assert made.registered == [nvml.name(uuid) for uuid in UUIDS]


@pytest.mark.parametrize("errors", [{"nvmlInit": 9}, {"nvmlDeviceRegisterEvents": 3}])
def test_where_xids_cannot_be_watched_the_node_goes_on(library: Any, errors: dict[str, int]) -> None:
    made = library(errors=errors)
    nvml.XidWatch(UUIDS, lambda uuid, xid: None)._run()
    assert made.begun == 0


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs a CUDA GPU")
def test_a_gpu_that_works_is_well(capfd: pytest.CaptureFixture[str]) -> None:
    from rgpu.server.device.cuda.facts import facts

    uuid = facts(0).uuid
    assert nvml.lost(uuid) == ""
    watch = nvml.XidWatch([uuid], lambda uuid, xid: None)
    watch.start()
    assert asyncio.run(examining.examine("cuda:0")) == ""
    watch.close()
