"""A GPU's health as the driver's management library reports it: whether it is lost, and its XIDs.

Source: NVML API reference (nvmlDeviceGetHandleByUUID, NVML_ERROR_GPU_IS_LOST, nvmlEventSetWait). Uses nvidia-ml-py;
where that or the library is missing nothing is reported, which is no error.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterable
from typing import Any
from uuid import UUID

import structlog

log = structlog.get_logger(__name__)

WAIT_MS = 1000  #: for the next XID


def name(uuid: bytes) -> str:
    """Return the name of a device, as NVML writes it."""
    return f"GPU-{UUID(bytes=uuid)}"


def _library() -> tuple[Any, str]:
    """Return pynvml, initialised (the caller ends it with ``nvmlShutdown``), or why there is none."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None, "nvidia-ml-py is not installed (pip install 'rgpu-live[cuda]')"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return None, str(error)
    return nvml, ""


def lost(uuid: bytes) -> str:
    """Return why the driver has lost the GPU; empty where it has not, or where NVML cannot be queried."""
    nvml, _ = _library()
    if nvml is None:
        return ""
    gone = {nvml.NVML_ERROR_GPU_IS_LOST: "the GPU is lost", nvml.NVML_ERROR_RESET_REQUIRED: "the GPU needs a reset"}
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(name(uuid))
        nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)  # making a handle does not query the device
        return ""
    except nvml.NVMLError as error:
        return gone.get(error.value, "")
    finally:
        nvml.nvmlShutdown()


def usage(uuid: bytes) -> dict[str, Any]:
    """Return the use of the GPU by all processes: {utilization: share of the last moment with a kernel, 0 to 1;
    memory_used: bytes}.

    Values that the GPU or its driver does not report (a MIG device's utilization) are absent.
    """
    nvml, _ = _library()
    if nvml is None:
        return {}
    found: dict[str, Any] = {}
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(name(uuid))
        for key, ask in (("utilization", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
                         ("memory_used", lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used))):
            with contextlib.suppress(nvml.NVMLError):
                found[key] = ask()
    except nvml.NVMLError:
        return found
    finally:
        nvml.nvmlShutdown()
    return found


class XidWatch:
    """A thread that reports XIDs by calling ``tell(uuid, xid)``. If it cannot watch, it logs that once."""

    def __init__(self, uuids: Iterable[bytes], tell: Callable[[bytes, int], None]) -> None:
        self._uuids, self._tell = list(uuids), tell
        self._stop = threading.Event()

    def start(self) -> None:
        """Begin to watch for XIDs, in a thread of its own."""
        threading.Thread(target=self._run, name="xids", daemon=True).start()

    def close(self) -> None:
        """End the thread at its next poll."""
        self._stop.set()

    def _run(self) -> None:
        nvml, why = _library()
        if nvml is None:
            log.warning("XIDs are not watched", reason=why)
            return
        try:
            self._watch(nvml)
        except nvml.NVMLError as error:
            log.warning("XIDs are not watched any more", reason=str(error))
        finally:
            nvml.nvmlShutdown()

    def _watch(self, nvml: Any) -> None:
        events = nvml.nvmlEventSetCreate()
        try:
            for uuid in self._uuids:
                nvml.nvmlDeviceRegisterEvents(nvml.nvmlDeviceGetHandleByUUID(name(uuid)),
                                              nvml.nvmlEventTypeXidCriticalError, events)
            log.info("XIDs are watched", gpus=len(self._uuids))
            while not self._stop.is_set():
                try:
                    event = nvml.nvmlEventSetWait_v2(events, WAIT_MS)
                except nvml.NVMLError_Timeout:
                    continue
                self._told(nvml, event)
        finally:
            nvml.nvmlEventSetFree(events)

    def _told(self, nvml: Any, event: Any) -> None:
        try:
            uuid = nvml.nvmlDeviceGetUUID(event.device)
        except nvml.NVMLError:
            uuid = ""  # lost already: any of them may be concerned
        for known in self._uuids:
            if uuid in ("", name(known)):
                self._tell(known, int(event.eventData))
