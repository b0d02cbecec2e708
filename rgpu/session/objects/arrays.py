"""CUDA arrays and the descriptions of texture and surface objects, as calls carry them: pure.

An array's texels lie in memory of the session (at the address in the call), level after level; a row's pitch is a
multiple of 32 bytes, a level begins at a multiple of 512. The layouts of the blobs: docs/developers/objects/arrays.md.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from rgpu.session.errors import DeviceError

INVALID_VALUE = 1
ROW_ALIGNMENT, LEVEL_ALIGNMENT = 32, 512
LAYERED, SURFACE_LDST, CUBEMAP = 0x01, 0x02, 0x04
#: CUarray_format → (bytes of a channel, its type: "u" unsigned, "s" signed, "f" floating point)
FORMATS: dict[int, tuple[int, str]] = {
    0x01: (1, "u"), 0x02: (2, "u"), 0x03: (4, "u"), 0x08: (1, "s"), 0x09: (2, "s"), 0x0A: (4, "s"),
    0x10: (2, "f"), 0x20: (4, "f"),
}
MOST_LEVELS = 32
MOST_EXTENT = 1 << 32

ARRAY, MIPMAPPED, LINEAR, PITCH2D = range(4)  #: CUresourcetype

_RESOURCE = struct.Struct("<IIQQIIQQQ")
_SAMPLING = struct.Struct("<3iiIIifff4f48x")
_VIEW = struct.Struct("<i4x3Q4I64x")


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@dataclass(frozen=True, slots=True)
class Level:
    """One mipmap level: ``width`` in bytes, ``offset`` of its first texel in the array's memory."""

    width: int
    rows: int
    slices: int
    pitch: int
    offset: int

    @property
    def plane(self) -> int:
        """Bytes from slice to slice."""
        return self.pitch * self.rows


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """Description of an array: extents in elements, 0 for a missing dimension; ``levels`` 0: not mipmapped."""

    width: int
    height: int
    depth: int
    format: int
    channels: int
    flags: int
    levels: int

    def check(self) -> None:
        """Check the values. Raises :class:`DeviceError` for a description that no array can have."""
        if self.format not in FORMATS or self.channels not in (1, 2, 4) or not 0 <= self.levels <= MOST_LEVELS \
                or not 0 < self.width < MOST_EXTENT or max(self.height, self.depth) >= MOST_EXTENT:
            raise DeviceError(f"an array of {self.width} x {self.height} x {self.depth}, format {self.format:#x} x "
                              f"{self.channels}, {self.levels} levels", INVALID_VALUE)

    @property
    def element(self) -> int:
        """Bytes of an element."""
        return FORMATS[self.format][0] * self.channels

    @property
    def dimensions(self) -> int:
        """Dimensions of a layer."""
        return 1 if not self.height else 2 if self.layers or not self.depth else 3

    @property
    def layers(self) -> bool:
        """Whether the depth counts layers or faces, which every level has."""
        return bool(self.flags & (LAYERED | CUBEMAP))

    def layout(self) -> list[Level]:
        """Return the places of the levels in the array's memory."""
        found, offset = [], 0
        for level in range(max(1, self.levels)):
            width, height = max(1, self.width >> level), max(1, self.height >> level)
            depth = max(1, self.depth if self.layers else self.depth >> level)
            pitch = _up(width * self.element, ROW_ALIGNMENT)
            found.append(Level(width * self.element, height, depth, pitch, offset))
            offset = _up(offset + pitch * height * depth, LEVEL_ALIGNMENT)
        return found

    @property
    def size(self) -> int:
        """Bytes of the array's memory."""
        last = self.layout()[-1]
        return last.offset + last.plane * last.slices


@dataclass(frozen=True, slots=True)
class Box:
    """A part of one level; ``x`` and ``width`` are bytes."""

    level: int
    x: int
    y: int
    z: int
    width: int
    height: int
    depth: int

    def check(self, shape: ArrayShape) -> Level:
        """Return the level. Raises :class:`DeviceError` where the box is not in it."""
        levels = shape.layout()
        if self.level < len(levels):
            level = levels[self.level]
            if self.x + self.width <= level.width and self.y + self.height <= level.rows \
                    and self.z + self.depth <= level.slices:
                return level
        raise DeviceError(f"{self} is not in an array of {shape.width} x {shape.height} x {shape.depth}",
                          INVALID_VALUE)


@dataclass(frozen=True, slots=True)
class Resource:
    """Resource of a texture or surface object: an array (by number), a level of one, or linear memory.

    ``width``: of pitched memory in elements, of linear memory in bytes.
    """

    type: int
    level: int
    array: int
    address: int
    format: int
    channels: int
    width: int
    height: int
    pitch: int

    @staticmethod
    def decode(data: bytes) -> Resource:
        """Decode a resource description. Raises :class:`DeviceError` for an invalid one."""
        if len(data) != _RESOURCE.size:
            raise DeviceError(f"a resource description of {len(data)} bytes", INVALID_VALUE)
        found = Resource(*_RESOURCE.unpack(data))
        if found.type > PITCH2D:
            raise DeviceError(f"a resource of type {found.type}", INVALID_VALUE)
        if found.type >= LINEAR and (found.format not in FORMATS or found.channels not in (1, 2, 4)):
            raise DeviceError(f"elements of format {found.format:#x} x {found.channels}", INVALID_VALUE)
        return found


@dataclass(frozen=True, slots=True)
class Sampling:
    """CUDA_TEXTURE_DESC."""

    address: tuple[int, int, int]  #: CUaddress_mode of each dimension
    filter: int
    flags: int
    anisotropy: int
    mip_filter: int
    bias: float
    least: float
    most: float
    border: tuple[float, float, float, float]

    @staticmethod
    def decode(data: bytes) -> Sampling:
        """Decode a texture description. Raises :class:`DeviceError` for an invalid one."""
        if len(data) != _SAMPLING.size:
            raise DeviceError(f"a texture description of {len(data)} bytes", INVALID_VALUE)
        v = _SAMPLING.unpack(data)
        found = Sampling(v[:3], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10:14])
        if not all(0 <= mode <= 3 for mode in found.address) or found.filter not in (0, 1) \
                or found.mip_filter not in (0, 1) or found.flags & ~0x73:
            raise DeviceError(f"no such sampling: {found}", INVALID_VALUE)
        return found

    def encode(self) -> bytes:
        """Return the structure's bytes."""
        return _SAMPLING.pack(*self.address, self.filter, self.flags, self.anisotropy, self.mip_filter, self.bias,
                              self.least, self.most, *self.border)


@dataclass(frozen=True, slots=True)
class View:
    """CUDA_RESOURCE_VIEW_DESC."""

    format: int
    width: int
    height: int
    depth: int
    first_level: int
    last_level: int
    first_layer: int
    last_layer: int

    @staticmethod
    def decode(data: bytes) -> View:
        """Decode a view description. Raises :class:`DeviceError` for another length."""
        if len(data) != _VIEW.size:
            raise DeviceError(f"a view description of {len(data)} bytes", INVALID_VALUE)
        return View(*_VIEW.unpack(data))
