"""The devices that a daemon is to serve: probed once when it starts, and described for the node's record."""

from __future__ import annotations

from rgpu.checkpoint.device import DeviceFacts
from rgpu.migrate.records.schema import MAX_TEXT, DeviceRecord
from rgpu.server.node.devices import driver
from rgpu.server.node.devices.slots import DeviceSlot, DeviceSlots
from rgpu.session.errors import DeviceError, UsageError
from rgpu.session.facts import DeviceInfo


def device_slot(spec: str, host: str, cpu_memory: int) -> DeviceSlot:
    """Probe a device. ``cpu_memory``: bytes of a simulated one.

    Raises :class:`UsageError`, :class:`DeviceError` with advice.
    """
    kind, _, ordinal = spec.partition(":")
    if kind not in ("cpu", "cuda") or (ordinal and not ordinal.isdigit()):
        raise UsageError(f"unknown device {spec!r}: use cpu, cpu:N or cuda:N")
    number = int(ordinal or 0)
    facts: DeviceFacts
    if kind == "cpu":
        from rgpu.server.device.cpu.facts import make_facts

        facts = make_facts(number, cpu_memory, host)
        return DeviceSlot(f"cpu:{number}", facts, cpu_memory)
    try:
        from rgpu.server.device.cuda.facts import facts as cuda_facts

        facts = cuda_facts(number)
    except (ImportError, RuntimeError, DeviceError) as error:  # RuntimeError: the bindings found no libcuda
        raise DeviceError(driver.explain(error, f"cuda:{number}"), getattr(error, "result", 999)) from error
    # Contexts and modules need memory that no session's quota counts.
    return DeviceSlot(f"cuda:{number}", facts, facts.total_memory - (2 << 30))


def device_records(devices: DeviceSlots) -> list[DeviceRecord]:
    """The devices for the node's record, in their present state."""
    return [_record(spec, slot, devices.free(spec)) for spec, slot in devices.slots.items()]


def _record(spec: str, slot: DeviceSlot, free: int) -> DeviceRecord:
    f = slot.facts
    if not slot.described:
        info = DeviceInfo(name=f.name, uuid=f.uuid, total_memory=f.total_memory, pci=f.pci, attributes=f.attributes)
        slot.described = {**info.as_dict(), "driver_version": f.driver_version,
                          "driver_release": driver.release() if spec.startswith("cuda") else ""}
    return DeviceRecord(
        device=spec, name=f.name, uuid=f.uuid, memory=slot.memory, free_memory=free,
        compute_capability=f.compute_capability, driver_version=f.driver_version, healthy=slot.healthy,
        reason=slot.health.reason[:MAX_TEXT],
        facts=slot.described)
