"""Session facts that a program can query without a round trip: WELCOME (docs/developers/links/shim-link.md)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from struct import Struct
from struct import error as StructError
from typing import Any

from rgpu.session import addresses
from rgpu.session.errors import Corrupt, VersionMismatch
from rgpu.session.fields import U32, FieldReader, pack_name

VERSION = 1
MAX_DEVICES = 64
MAX_ATTRIBUTES = 4096
#: Additional device attribute, beyond every CUdevice_attribute; 1: it executes PTX and no machine code.
ONLY_PTX = 1 << 24
#: Additional attributes, bit n: its kernels can access the memory of device n; … with atomics, too. In a node's report
#: n counts the node's devices of that kind, in a program's facts the session's devices.
PEERS, PEER_ATOMICS = ONLY_PTX + 1, ONLY_PTX + 2
#: Additional attributes of a device in the list of a gang's run: the number of the member that has it, and its index
#: among that member's devices.
MEMBER, MEMBER_DEVICE = ONLY_PTX + 3, ONLY_PTX + 4

#: version, driver version, session number, quota, journal limit, recover, devices
_HEAD = Struct("<IIQQQII")
#: uuid, PCI domain, bus, device, zero, total memory, range base, range size
_DEVICE = Struct("<16siiiIQQQ")
_ATTRIBUTE = Struct("<ii")


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device as the program sees it."""

    name: str
    uuid: bytes  #: 16 bytes
    total_memory: int  #: bytes
    pci: tuple[int, int, int] = (0, 0, 0)  #: domain, bus, device
    range_base: int = addresses.DEVICE_BASE
    range_size: int = addresses.DEVICE_STRIDE
    attributes: dict[int, int] = field(default_factory=dict)  #: CUdevice_attribute → value

    def as_dict(self) -> dict[str, Any]:
        """Return the facts as control messages carry them: msgpack takes them as they are."""
        return {**asdict(self), "pci": list(self.pci)}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> DeviceInfo:
        """Invert :meth:`as_dict`. Raises :class:`Corrupt`."""
        try:
            domain, bus, device = data["pci"]
            info = DeviceInfo(
                _typed(data["name"], str), _typed(data["uuid"], bytes), _typed(data["total_memory"], int),
                (_typed(domain, int), _typed(bus, int), _typed(device, int)), _typed(data["range_base"], int),
                _typed(data["range_size"], int),
                # JSON turns the keys of a map into strings
                {int(key): _typed(value, int) for key, value in data["attributes"].items()})
            if len(info.uuid) != 16:
                raise ValueError(f"a UUID of {len(info.uuid)} bytes")
            return info
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Corrupt(f"device facts: {error!r}", offset=0, reason="facts") from None


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """Contents of WELCOME."""

    name: str
    number: int  #: numbers the session among those of its agent
    driver_version: int  #: as cuDriverGetVersion, 13000 = 13.0
    quota: int  #: bytes for each device
    journal_limit: int  #: bytes
    recover: bool
    devices: tuple[DeviceInfo, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the facts as control messages carry them."""
        return {"name": self.name, "number": self.number, "driver_version": self.driver_version, "quota": self.quota,
                "journal_limit": self.journal_limit, "recover": self.recover,
                "devices": [device.as_dict() for device in self.devices]}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> SessionFacts:
        """Invert :meth:`as_dict`. Raises :class:`Corrupt`."""
        try:
            return SessionFacts(
                _typed(data["name"], str), _typed(data["number"], int), _typed(data["driver_version"], int),
                _typed(data["quota"], int), _typed(data["journal_limit"], int), _typed(data["recover"], bool),
                tuple(DeviceInfo.from_dict(item) for item in _typed(data["devices"], list)))
        except (KeyError, TypeError) as error:
            raise Corrupt(f"session facts: {error!r}", offset=0, reason="facts") from None

    def encode(self) -> bytes:
        """Encode the body of WELCOME. Raises ValueError for a value that does not fit its field."""
        if len(self.devices) > MAX_DEVICES:
            raise ValueError(f"{len(self.devices)} devices; {MAX_DEVICES} at most")
        try:
            parts = [_HEAD.pack(VERSION, self.driver_version, self.number, self.quota, self.journal_limit,
                                self.recover, len(self.devices)), pack_name(self.name)]
            for device in self.devices:
                parts.append(_encode_device(device))
        except StructError as error:
            raise ValueError(f"session facts: {error}") from None
        return b"".join(parts)

    @staticmethod
    def decode(data: bytes) -> SessionFacts:
        """Invert :meth:`encode`. Raises :class:`Corrupt`, :class:`VersionMismatch`."""
        cursor = FieldReader(data, "session facts")
        version, driver, number, quota, limit, recover, count = cursor.take(_HEAD)
        if version != VERSION:
            raise VersionMismatch(f"session facts of version {version}; this program reads {VERSION}", version=version)
        if recover > 1 or count > MAX_DEVICES:
            raise cursor.corrupt(f"recover {recover}, {count} devices")
        name = cursor.name()
        devices = tuple(_decode_device(cursor) for _ in range(count))
        cursor.end()
        return SessionFacts(name, number, driver, quota, limit, bool(recover), devices)


def _encode_device(device: DeviceInfo) -> bytes:
    if len(device.uuid) != 16 or len(device.attributes) > MAX_ATTRIBUTES:
        raise ValueError(f"{device.name}: a UUID of {len(device.uuid)} bytes, {len(device.attributes)} attributes")
    return b"".join((
        _DEVICE.pack(device.uuid, *device.pci, 0, device.total_memory, device.range_base, device.range_size),
        pack_name(device.name), U32.pack(len(device.attributes)),
        *(_ATTRIBUTE.pack(key, value) for key, value in sorted(device.attributes.items()))))


def _decode_device(cursor: FieldReader) -> DeviceInfo:
    uuid, domain, bus, device, zero, total, base, size = cursor.take(_DEVICE)
    if zero:
        raise cursor.corrupt("a field that must be zero is not")
    name = cursor.name()
    (count,) = cursor.take(U32)
    if count > MAX_ATTRIBUTES:
        raise cursor.corrupt(f"{count} attributes")
    attributes = dict(cursor.take(_ATTRIBUTE) for _ in range(count))
    return DeviceInfo(name, uuid, total, (domain, bus, device), base, size, attributes)


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
