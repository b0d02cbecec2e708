"""A process of a gang: it sees the run's list of devices, and gets its session with its first context."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rgpu.client.run.gang import list_of
from rgpu.session.facts import PEERS, DeviceInfo, SessionFacts
from tests.support.shim.fake_agent import ATTRIBUTES, MIB, FakeAgent


def facts(*names: str, driver: int = 13000) -> SessionFacts:
    """One member's, whose devices reach each other."""
    devices = [DeviceInfo(name, b"same on each host"[:16], 1 << 33, (0, 7, 0), 0x2000_0000_0000 + (at << 43),
                          attributes={**ATTRIBUTES, PEERS: ((1 << len(names)) - 1) & ~(1 << at)})
               for at, name in enumerate(names)]
    return SessionFacts("member", 1, driver, 64 * MIB, 1 << 30, True, tuple(devices))


MEMBERS = [facts("a0", driver=13010), facts("b0", "b1"), facts("c0")]


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[FakeAgent]:
    """Its first process uses the second member."""
    running = FakeAgent(tmp_path, devices=2)
    running.listed = list_of("gang", MEMBERS)
    with running:
        yield running


def test_a_list_tells_its_devices_apart() -> None:
    found = list_of("gang", MEMBERS)
    assert [device.name for device in found.devices] == ["a0", "b0", "b1", "c0"]
    assert len({device.uuid for device in found.devices}) == 4 and len({device.pci for device in found.devices}) == 3
    assert found.driver_version == 13000, "the oldest of its hosts"
    assert list_of("gang", MEMBERS) == found, "the same each time"


def test_the_first_context_chooses_the_member(gang: FakeAgent, program: Any) -> None:
    told = program(gang, """
        count, peer, address, name = c.c_int(), c.c_int(), U64(), c.create_string_buffer(64)
        def name_of(device):
            ok(cu.cuDeviceGetName(name, 64, device))
            return name.value.decode()
        def primary(device):
            handle = P()
            return cu.cuDevicePrimaryCtxRetain(c.byref(handle), device), handle
        def reaches(a, b):
            ok(cu.cuDeviceCanAccessPeer(c.byref(peer), a, b))
            return peer.value
        ok(cu.cuInit(0))
        ok(cu.cuDeviceGetCount(c.byref(count)))
        tell([count.value, [name_of(n) for n in range(4)]])
        tell([reaches(1, 2), reaches(2, 1), reaches(0, 1), reaches(1, 0), reaches(3, 2)])
        tell(cu.cuMemAddressReserve(c.byref(address), SIZE(2 << 20), SIZE(0), U64(0), U64(0)))
        result, handle = primary(2)
        tell(result)
        ok(cu.cuCtxSetCurrent(handle))
        at = alloc(4096)
        h2d(at, b"x" * 4096)
        tell([hex(at), d2h(at, 4096) == b"x" * 4096])
        tell([primary(1)[0], primary(0)[0], primary(3)[0], cu.cuCtxCreate_v2(c.byref(P()), 0, 3)])
        ok(cu.cuMemAddressReserve(c.byref(address), SIZE(2 << 20), SIZE(0), U64(0), U64(0)))
        class Access(c.Structure):
            _fields_ = [("kind", c.c_int), ("device", c.c_int), ("flags", c.c_int)]
        tell([cu.cuMemSetAccess(address, SIZE(2 << 20), c.byref(Access(1, n, 3)), SIZE(1)) for n in (0, 1, 2)])
        """, RGPU_LIST="1").end()
    assert told[0] == [4, ["a0", "b0", "b1", "c0"]]
    assert told[1] == [1, 1, 0, 0, 0], "none reaches another host's"
    assert told[2] == 201, "nothing can be asked of a session that is not there yet"
    assert told[3] == 0 and gang.chosen == 2
    assert int(told[4][0], 16) >> 43 == (0x2000_0000_0000 >> 43) + 1 and told[4][1], "device 1 of its own session"
    assert told[5] == [0, 101, 101, 101]
    assert told[6] == [101, 1, 1], "nothing is mapped there, and another member's device cannot be"
    assert [call.device for call in gang.args("context_create")] == [1, 0]


def test_visible_devices_choose_from_the_list(gang: FakeAgent, program: Any) -> None:
    running = program(gang, """
        context()
        count = c.c_int()
        ok(cu.cuDeviceGetCount(c.byref(count)))
        handle = P()
        tell([count.value, cu.cuDevicePrimaryCtxRetain(c.byref(handle), 1)])
        """, RGPU_LIST="1", CUDA_VISIBLE_DEVICES="1,3")
    assert running.end() == [[2, 101]] and gang.chosen == 1
    assert "device 3 of the list belongs to another member of the gang than device 1" in running.errors()


def test_a_process_that_only_looks_makes_no_session(gang: FakeAgent, program: Any) -> None:
    running = program(gang, """
        ok(cu.cuInit(0))
        count = c.c_int()
        ok(cu.cuDeviceGetCount(c.byref(count)))
        tell(count.value)
        """, RGPU_LIST="1")
    assert running.hear() == 4
    running.process.stdin.close()
    assert running.process.wait(20) == 0 and gang.chosen is None
