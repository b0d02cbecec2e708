"""Whose fault an error is; what examinations make of a device; who waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from rgpu.link import faults
from rgpu.server.device import hardware
from rgpu.server.device.cpu.facts import make_facts
from rgpu.server.node.devices import examine, examining, health
from rgpu.server.node.devices.examining import Examining
from rgpu.server.node.devices.health import AGAIN, GOOD, LONGEST, Health, examined
from rgpu.server.node.devices.slots import DeviceSlot
from rgpu.session.calls.types.results import RESULTS
from rgpu.session.errors import DeviceError

FAULT = "a kernel computed other hashes of its memory than the host"


# -- whose fault -----------------------------------------------------------------------------


@pytest.mark.parametrize("result", sorted(hardware.HARDWARE))
def test_the_hardware_s_errors_need_no_further_look(result: int) -> None:
    assert hardware.fault(result, lambda: pytest.fail("nobody need be asked")) == hardware.HARDWARE[result]
    assert result in RESULTS


@pytest.mark.parametrize("result", sorted(hardware.UNCLEAR))
def test_errors_that_a_lost_device_gives_are_its_only_then(result: int) -> None:
    assert hardware.fault(result, lambda: "") == ""
    assert hardware.fault(result, lambda: "the GPU is lost") == f"the GPU is lost (CUresult {result})"


@pytest.mark.parametrize("result", sorted(set(RESULTS) - set(hardware.HARDWARE) - hardware.UNCLEAR))
def test_every_other_error_is_the_program_s(result: int) -> None:
    assert hardware.fault(result, lambda: pytest.fail("nobody need be asked")) == ""


def test_xids_of_programs_are_no_reason_to_look() -> None:
    assert not any(map(hardware.suspicious, hardware.OF_PROGRAMS))
    assert all(map(hardware.suspicious, (48, 63, 74, 79, 94, 95, 119)))


# -- the verdict -----------------------------------------------------------------------------


def test_a_fault_takes_a_device_out_and_three_good_looks_bring_it_back() -> None:
    well = Health()
    assert examined(well, "", "XID 48") is well and well.again() is None
    sick = examined(well, FAULT, "XID 48")
    assert not sick.healthy and sick.reason == f"{FAULT}; it was examined because of XID 48"
    for _ in range(GOOD - 1):
        sick = examined(sick, "", "what it was before")
        assert not sick.healthy and FAULT in sick.reason
    assert examined(sick, FAULT, "what it was before").passed == 0
    assert examined(sick, "", "what it was before") == Health(losses=1)


def test_one_that_comes_and_goes_is_looked_at_ever_more_rarely() -> None:
    device, waits = Health(), []
    for _ in range(12):
        device = examined(device, FAULT, "XID 48")
        waits.append(device.again())
        for _ in range(GOOD):
            device = examined(device, "", "what it was before")
        assert device.healthy
    assert waits[:3] == [AGAIN, 2 * AGAIN, 4 * AGAIN] and waits[-1] == LONGEST


# -- the examination -----------------------------------------------------------------------------


class Plain:
    """Only what an examination does with a device; it holds what was written."""

    facts = SimpleNamespace(uuid=bytes(16))

    def __init__(self, result: int = 0, flip: int = -1, wrong_hash: bool = False) -> None:
        self.result, self.flip, self.wrong_hash = result, flip, wrong_hash
        self.data = b""

    def create_context(self, *values: Any) -> None:
        if self.result:
            raise DeviceError("create_context: it failed", self.result)

    def map(self, *values: Any) -> None: ...
    def allocate(self, *values: Any) -> None: ...

    def write(self, address: int, data: bytes) -> None:
        self.data = data

    def hash_pages(self, region: Any, key: bytes) -> Any:
        found = [list(examine.pagehash.hash_page(self.data[at:at + 65536], key))
                 for at in range(0, region.size, 65536)]
        found[-1][1] ^= self.wrong_hash
        return found

    def read(self, address: int, size: int) -> bytes:
        data = bytearray(self.data)
        if self.flip >= 0:
            data[self.flip] ^= 1
        return bytes(data)


@pytest.mark.parametrize(("device", "found"), [
    (Plain(), ""),
    (Plain(flip=70000), "its memory does not hold what was written"),
    (Plain(wrong_hash=True), FAULT),
    (Plain(result=214), "it failed at plain work: create_context: it failed"),
    (Plain(result=999), "it failed at plain work: create_context: it failed"),
    (Plain(result=2), ""),
    (Plain(result=46), ""),
])
def test_what_an_examination_finds(monkeypatch: pytest.MonkeyPatch, device: Plain, found: str) -> None:
    monkeypatch.setattr(examine, "make_device", lambda spec, memory: device)
    assert examine.examine("cpu:0")[0] == found


@pytest.mark.parametrize(("result", "found"), [
    (2, ""), (100, "it cannot be used: no GPU"), (999, "it cannot be used: no GPU")])
def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch, result: int, found: str) -> None:
    def missing(spec: str, memory: int) -> Any:
        raise DeviceError("no GPU", result)

    monkeypatch.setattr(examine, "make_device", missing)
    assert examine.examine("cuda:0")[0] == found


def test_a_real_device_is_well() -> None:
    """The process that daemons run, whole."""
    assert asyncio.run(examining.examine("cpu:0")) == ""


def test_a_process_that_says_nothing_or_hangs_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "unknown device" in asyncio.run(examining.examine("nonsense:0"))
    with monkeypatch.context() as patch:
        patch.setattr(examining, "PATIENCE", 0.01)
        assert "did not answer" in asyncio.run(examining.examine("cpu:0"))
    monkeypatch.setattr(examining.sys, "executable", "/bin/false")
    assert asyncio.run(examining.examine("cpu:0")) == "its examination ended with status 1"


def test_tests_break_devices_only_beside_a_fault_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    assert faults.broken("cpu:0") == ""
    monkeypatch.setattr(faults, "_FILE", str(tmp_path / "fault"))
    assert faults.broken("cpu:0") == ""
    (tmp_path / "fault.broken.cpu:0").write_text("it burns\n")
    assert faults.broken("cpu:0") == "it burns" and faults.broken("cpu:1") == ""


# -- who waits -----------------------------------------------------------------------------


class Looks:
    """Examinations as a test wants them."""

    def __init__(self, *found: str | OSError) -> None:
        self.found, self.count, self.told = list(found), 0, 0
        self.slots = {"cpu:0": DeviceSlot("cpu:0", make_facts(0, 1 << 30, "here"), 1 << 30)}
        self.tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        return task

    async def changed(self) -> None:
        self.told += 1

    async def look(self, spec: str) -> str:
        self.count += 1
        await asyncio.sleep(0.01)
        found = self.found.pop(0) if self.found else ""
        if isinstance(found, OSError):
            raise found
        return found

    def run(self, test: Callable[[Examining], Coroutine[Any, Any, None]]) -> None:
        async def body() -> None:
            await test(Examining(self.slots, self.changed, self.spawn, self.look))
            for task in self.tasks:
                task.cancel()

        asyncio.run(body())


def test_two_that_suspect_a_device_wait_for_one_look() -> None:
    looks = Looks(FAULT)

    async def test(all_devices: Examining) -> None:
        found = await asyncio.gather(*(all_devices.suspect("cpu:0", f"XID {n}") for n in (48, 63)))
        assert looks.count == 1 and found[0] is found[1] and not found[0].healthy and looks.told == 1
        assert (await all_devices.suspect("cpu:0", "XID 79")).passed == 1 and looks.count == 2

    looks.run(test)


def test_a_device_that_is_well_is_no_news() -> None:
    looks = Looks("", OSError("no process"))

    async def test(all_devices: Examining) -> None:
        assert (await all_devices.suspect("cpu:0", "XID 48")).healthy
        assert (await all_devices.suspect("cpu:0", "XID 48")).healthy, "nobody could look: nothing is told"
        assert looks.told == 0

    looks.run(test)


def test_a_sick_device_is_looked_at_until_it_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "AGAIN", 0.01)
    looks = Looks(FAULT, "", FAULT)

    async def test(all_devices: Examining) -> None:
        assert not (await all_devices.suspect("cpu:0", "XID 48")).healthy
        while not looks.slots["cpu:0"].health.healthy:
            await asyncio.sleep(0.01)
        assert looks.count == 3 + GOOD and looks.told == 2

    looks.run(test)
