"""The record that kernels read of a texture or surface object, in this process's memory.

It is made of 64-bit words, then one row of words for each mipmap level. Compiled code has the same indices
(:mod:`rgpu.server.device.cpu.ptx.textures.texels_ir`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rgpu.session.objects.arrays import FORMATS, Sampling

#: Words of a descriptor.
(D_SURFACE, D_FORMAT, D_CHANNELS, D_ELEMENT, D_NORMALIZED, D_LINEAR, D_MIP_LINEAR, D_KIND, D_MODE_X, D_MODE_Y, D_MODE_Z,
 D_BORDER, D_BORDER2, D_BIAS, D_LEAST, D_MOST, D_LEVELS, D_LAYERED, D_FETCH, D_SRGB) = range(20)
D_TABLE = 24  #: the first level
#: Words of a level: extents in elements, pitch and plane in bytes.
L_ADDRESS, L_WIDTH, L_HEIGHT, L_DEPTH, L_PITCH, L_PLANE = range(6)
LEVEL_WORDS = 8
#: D_KIND: the type that a fetch returns.
RAW, UNIT, FLOAT = range(3)
#: D_FORMAT
FORMAT_CODES = {form: code for code, form in enumerate(FORMATS)}

READ_AS_INTEGER, NORMALIZED_COORDINATES, SRGB = 0x01, 0x02, 0x10


@dataclass(frozen=True, slots=True)
class LevelView:
    """One level at its address; extents in elements, ``depth`` counts layers and faces too."""

    address: int
    width: int
    height: int
    depth: int
    pitch: int
    plane: int


@dataclass(frozen=True, slots=True)
class Descriptor:
    """The record, and the memory that must be valid for it: (address, bytes) of each piece."""

    words: np.ndarray
    memory: Sequence[tuple[int, int]]

    @property
    def address(self) -> int:
        """Address of the record."""
        return int(self.words.ctypes.data)


def _bits(value: float) -> int:
    return int.from_bytes(struct.pack("<f", value), "little")


def describe(form: int, channels: int, levels: Sequence[LevelView], sampling: Sampling | None,
             memory: Sequence[tuple[int, int]], *, layered: bool = False, cube: bool = False,
             linear: bool = False) -> Descriptor:
    """Make a record. ``sampling`` None: for a surface. ``linear``: fetched by index, zero outside."""
    words = np.zeros(D_TABLE + LEVEL_WORDS * len(levels), np.uint64)
    size, kind = FORMATS[form]
    words[D_FORMAT], words[D_CHANNELS], words[D_ELEMENT] = FORMAT_CODES[form], channels, size * channels
    words[D_LEVELS], words[D_LAYERED], words[D_FETCH] = len(levels), layered, linear
    if sampling is None:
        words[D_SURFACE] = 1
    else:
        normalized = bool(sampling.flags & NORMALIZED_COORDINATES)
        raw = size == 4 or sampling.flags & READ_AS_INTEGER
        words[D_KIND] = FLOAT if kind == "f" else RAW if raw else UNIT
        words[D_NORMALIZED] = normalized
        words[D_LINEAR] = sampling.filter if words[D_KIND] != RAW else 0
        words[D_MIP_LINEAR] = sampling.mip_filter if words[D_KIND] != RAW else 0
        words[D_SRGB] = bool(sampling.flags & SRGB) and form == 0x01
        for word, mode in zip((D_MODE_X, D_MODE_Y, D_MODE_Z), sampling.address, strict=True):
            # Wrap and mirror are for normalized coordinates; others are clamped (CUDA C++ Programming Guide).
            words[word] = mode if normalized or mode == 3 else 1
        border = [_bits(one) for one in sampling.border]
        words[D_BORDER], words[D_BORDER2] = border[0] | border[1] << 32, border[2] | border[3] << 32
        words[D_BIAS], words[D_LEAST], words[D_MOST] = map(_bits, (sampling.bias, sampling.least, sampling.most))
    if cube:  # a face clamps its coordinates
        words[[D_MODE_X, D_MODE_Y]] = 1
    for number, level in enumerate(levels):
        at = D_TABLE + LEVEL_WORDS * number
        words[at:at + 6] = (level.address, level.width, level.height, level.depth, level.pitch, level.plane)
    return Descriptor(words, tuple(memory))
