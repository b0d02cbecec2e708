"""One physical allocation at several addresses, and at another than before, by the driver's own mappings."""

from __future__ import annotations

import pytest

from rgpu.checkpoint.device import GRANULE, Region
from rgpu.server.device.cuda.device import CudaDevice
from rgpu.session.errors import DeviceError
from tests.support.fake_driver.support import BASE, device

__all__ = ["device"]

KEY = bytes(range(32))
ALIAS, SECOND, ELSEWHERE = (BASE + n * 4 * GRANULE for n in (1, 2, 3))


def test_the_same_bytes_at_each_address_and_one_region(device: CudaDevice) -> None:
    device.map(BASE, 2 * GRANULE)
    device.alias(ALIAS, 2 * GRANULE, BASE)
    device.alias(SECOND, 2 * GRANULE, BASE)
    for address in (BASE, ALIAS, SECOND):
        device.allocate(address, GRANULE)
    device.write(ALIAS + 5, b"alias")
    assert device.read(BASE + 5, 5) == device.read(SECOND + 5, 5) == b"alias"
    assert [region for region in device.regions() if region.kind == "mapped"] == [Region(BASE, 2 * GRANULE, "mapped")]
    for wrong in ((ELSEWHERE, 4 * GRANULE, BASE), (ELSEWHERE, GRANULE, BASE),
                  (ELSEWHERE, GRANULE, BASE + GRANULE), (ELSEWHERE + 1, 2 * GRANULE, BASE)):
        with pytest.raises(DeviceError):
            device.alias(*wrong)
    with pytest.raises(DeviceError, match="aliases"):
        device.unmap(BASE, 2 * GRANULE)

    device.free(BASE)
    device.move_mapping(BASE, 2 * GRANULE, ELSEWHERE)
    device.map(BASE, GRANULE)
    device.write(SECOND, b"moved")
    assert device.read(ELSEWHERE, 5) == device.read(ALIAS, 5) == b"moved" and not any(device.read(BASE, 10))
    assert sorted(region.address for region in device.regions() if region.kind == "mapped") == [BASE, ELSEWHERE]
    with pytest.raises(DeviceError):
        device.unalias(ALIAS, GRANULE)
    device.unalias(ALIAS, 2 * GRANULE)
    device.unalias(SECOND, 2 * GRANULE)
    device.unmap(ELSEWHERE, 2 * GRANULE)


def test_what_is_mapped_twice_is_hashed_once(device: CudaDevice) -> None:
    device.map(BASE, GRANULE)
    device.alias(ALIAS, GRANULE, BASE)
    before = device.hash_pages(Region(BASE, GRANULE, "mapped"), KEY)
    device.write(ALIAS, b"changed by the other address")
    after = device.hash_pages(Region(BASE, GRANULE, "mapped"), KEY)
    assert (before != after).any()
