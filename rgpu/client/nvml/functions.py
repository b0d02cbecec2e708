"""Every NVML function by name: the prototype of a function written by hand, the return code of any other.

The names are those of nvidia-ml-py 13.615 and of cuda-bindings 13.0's NVML
module, with the older names that the versioned ones replaced (``symbols.txt``).
A function that is not in :data:`PROTOTYPES` returns NOT_SUPPORTED, or NO_PERMISSION
where the real library refuses it to all users but root; before nvmlInit all
functions return UNINITIALIZED.
"""

from __future__ import annotations

from pathlib import Path

NOT_SUPPORTED = "NVML_ERROR_NOT_SUPPORTED"
NO_PERMISSION = "NVML_ERROR_NO_PERMISSION"

_DEVICE = "nvmlDevice_t device"
_TEXT = "char *text, unsigned int length"
_PROCESSES = "nvmlDevice_t device, unsigned int *count"

#: name → arguments of the C function. All return nvmlReturn_t, but nvmlErrorString.
PROTOTYPES: dict[str, str] = {
    "nvmlInit": "void",
    "nvmlInit_v2": "void",
    "nvmlInitWithFlags": "unsigned int flags",
    "nvmlShutdown": "void",
    "nvmlErrorString": "nvmlReturn_t result",
    "nvmlSystemGetDriverVersion": _TEXT,
    "nvmlSystemGetNVMLVersion": _TEXT,
    "nvmlSystemGetCudaDriverVersion": "int *version",
    "nvmlSystemGetCudaDriverVersion_v2": "int *version",
    "nvmlSystemGetProcessName": f"unsigned int pid, {_TEXT}",
    "nvmlUnitGetCount": "unsigned int *count",
    "nvmlDeviceGetCount": "unsigned int *count",
    "nvmlDeviceGetCount_v2": "unsigned int *count",
    "nvmlDeviceGetHandleByIndex": "unsigned int index, nvmlDevice_t *device",
    "nvmlDeviceGetHandleByIndex_v2": "unsigned int index, nvmlDevice_t *device",
    "nvmlDeviceGetHandleByUUID": "const char *uuid, nvmlDevice_t *device",
    "nvmlDeviceGetHandleByUUIDV": "const nvmlUUID_t *uuid, nvmlDevice_t *device",
    "nvmlDeviceGetHandleByPciBusId": "const char *bus_id, nvmlDevice_t *device",
    "nvmlDeviceGetHandleByPciBusId_v2": "const char *bus_id, nvmlDevice_t *device",
    "nvmlDeviceGetHandleBySerial": "const char *serial, nvmlDevice_t *device",
    "nvmlDeviceGetIndex": f"{_DEVICE}, unsigned int *index",
    "nvmlDeviceGetName": f"{_DEVICE}, {_TEXT}",
    "nvmlDeviceGetUUID": f"{_DEVICE}, {_TEXT}",
    "nvmlDeviceGetPciInfo": f"{_DEVICE}, nvmlPciInfo_v2_t *pci",
    "nvmlDeviceGetPciInfo_v2": f"{_DEVICE}, nvmlPciInfo_v2_t *pci",
    "nvmlDeviceGetPciInfo_v3": f"{_DEVICE}, nvmlPciInfo_t *pci",
    "nvmlDeviceGetPciInfoExt": f"{_DEVICE}, nvmlPciInfoExt_t *pci",
    "nvmlDeviceGetCudaComputeCapability": f"{_DEVICE}, int *major, int *minor",
    "nvmlDeviceGetArchitecture": f"{_DEVICE}, unsigned int *architecture",
    "nvmlDeviceGetNumGpuCores": f"{_DEVICE}, unsigned int *cores",
    "nvmlDeviceGetMemoryBusWidth": f"{_DEVICE}, unsigned int *bits",
    "nvmlDeviceGetComputeMode": f"{_DEVICE}, unsigned int *mode",
    "nvmlDeviceGetMemoryInfo": f"{_DEVICE}, nvmlMemory_t *memory",
    "nvmlDeviceGetMemoryInfo_v2": f"{_DEVICE}, nvmlMemory_v2_t *memory",
    "nvmlDeviceIsMigDeviceHandle": f"{_DEVICE}, unsigned int *is_mig",
    "nvmlDeviceOnSameBoard": "nvmlDevice_t device, nvmlDevice_t other, int *same",
    "nvmlDeviceGetP2PStatus": "nvmlDevice_t device, nvmlDevice_t other, unsigned int which, unsigned int *status",
    "nvmlDeviceGetFieldValues": f"{_DEVICE}, int count, nvmlFieldValue_t *values",
    "nvmlDeviceGetComputeRunningProcesses": f"{_PROCESSES}, nvmlProcessInfo_v1_t *list",
    "nvmlDeviceGetComputeRunningProcesses_v2": f"{_PROCESSES}, nvmlProcessInfo_v2_t *list",
    "nvmlDeviceGetComputeRunningProcesses_v3": f"{_PROCESSES}, nvmlProcessInfo_v2_t *list",
    **{f"nvmlDeviceGet{kind}RunningProcesses{version}": f"{_PROCESSES}, void *list"
       for kind in ("Graphics", "MPSCompute") for version in ("", "_v2", "_v3")},
    "nvmlDeviceGetRunningProcessDetailList": f"{_DEVICE}, nvmlProcessDetailList_t *list",
}

#: Functions that only root may call on a real node, by the start of their names.
_FOR_ROOT = ("nvmlDeviceSet", "nvmlDeviceReset", "nvmlDeviceClear", "nvmlDeviceModify", "nvmlDeviceRemove",
             "nvmlDeviceFreeze", "nvmlUnitSet", "nvmlSystemSet")
#: Exceptions: they bind the calling thread to CPUs near a GPU, of which this host has none.
_FOR_ANYBODY = frozenset({"nvmlDeviceSetCpuAffinity", "nvmlDeviceClearCpuAffinity"})


def symbols() -> list[str]:
    """Every name that the library exports, sorted."""
    return (Path(__file__).parent / "symbols.txt").read_text(encoding="ascii").split()


def refused(name: str) -> str:
    """Return the code that a function not written by hand returns after nvmlInit."""
    return NO_PERMISSION if name.startswith(_FOR_ROOT) and name not in _FOR_ANYBODY else NOT_SUPPORTED
