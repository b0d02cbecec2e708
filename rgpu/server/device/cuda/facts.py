"""What the driver says of a GPU."""

from __future__ import annotations

from cuda.bindings import driver

from rgpu.checkpoint.device import DeviceFacts
from rgpu.server.device.cuda.errors import check


def facts(ordinal: int) -> DeviceFacts:
    """What the driver says about GPU ``ordinal``; makes no context."""
    check(driver.cuInit(0), "cuInit")
    device = check(driver.cuDeviceGet(ordinal), "cuDeviceGet")
    attributes = {}
    for attribute in driver.CUdevice_attribute:
        error, value = driver.cuDeviceGetAttribute(attribute, device)
        if int(error) == 0:
            attributes[int(attribute)] = int(value)
    name = check(driver.cuDeviceGetName(128, device), "cuDeviceGetName")
    return DeviceFacts(
        name=name.split(b"\0", 1)[0].decode(),
        uuid=bytes(check(driver.cuDeviceGetUuid(device), "cuDeviceGetUuid").bytes),
        total_memory=int(check(driver.cuDeviceTotalMem(device), "cuDeviceTotalMem")),
        pci=(attributes.get(50, 0), attributes.get(33, 0), attributes.get(34, 0)),
        compute_capability=(attributes.get(75, 0), attributes.get(76, 0)),
        driver_version=int(check(driver.cuDriverGetVersion(), "cuDriverGetVersion")), attributes=attributes)
