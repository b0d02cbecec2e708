"""The facts that the driver reports of a GPU."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver

from rgpu.checkpoint.device import DeviceFacts
from rgpu.server.device.cuda.errors import check
from rgpu.session.facts import PEER_ATOMICS, PEERS

MOST_PEERS = 30  #: ordinals that the mask in an attribute covers


def facts(ordinal: int) -> DeviceFacts:
    """Return the driver's facts of GPU ``ordinal``; makes no context."""
    check(driver.cuInit(0), "cuInit")
    device = check(driver.cuDeviceGet(ordinal), "cuDeviceGet")
    attributes = {}
    for attribute in driver.CUdevice_attribute:
        error, value = driver.cuDeviceGetAttribute(attribute, device)
        if int(error) == 0:
            attributes[int(attribute)] = int(value)
    attributes[PEERS], attributes[PEER_ATOMICS] = _peers(device)
    name = check(driver.cuDeviceGetName(128, device), "cuDeviceGetName")
    return DeviceFacts(
        name=name.split(b"\0", 1)[0].decode(),
        uuid=bytes(check(driver.cuDeviceGetUuid(device), "cuDeviceGetUuid").bytes),
        total_memory=int(check(driver.cuDeviceTotalMem(device), "cuDeviceTotalMem")),
        pci=(attributes.get(50, 0), attributes.get(33, 0), attributes.get(34, 0)),
        compute_capability=(attributes.get(75, 0), attributes.get(76, 0)),
        driver_version=int(check(driver.cuDriverGetVersion(), "cuDriverGetVersion")), attributes=attributes)


def _peers(device: Any) -> tuple[int, int]:
    """Return masks of the ordinals whose memory its kernels reach, and reach with atomics."""
    atomics = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    reached = native = 0
    for ordinal in range(min(int(check(driver.cuDeviceGetCount(), "cuDeviceGetCount")), MOST_PEERS)):
        other = check(driver.cuDeviceGet(ordinal), "cuDeviceGet")
        if int(other) != int(device) and int(check(driver.cuDeviceCanAccessPeer(device, other), "peer access")):
            reached |= 1 << ordinal
            able = check(driver.cuDeviceGetP2PAttribute(atomics, device, other), "peer atomics")
            native |= (int(able) != 0) << ordinal
    return reached, native
