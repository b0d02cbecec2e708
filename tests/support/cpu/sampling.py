"""What a texture fetch should give, in double precision, straight from the CUDA C++ Programming Guide.

"Texture Fetching": nearest points, linear filtering, address modes; "Cubemap Textures": faces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

WRAP, CLAMP, MIRROR, BORDER = range(4)
WEIGHT_STEP = 1 / 256  #: of the hardware's weights


def index(i: int, n: int, mode: int) -> int | None:
    """The texel for index ``i`` of ``n``; None: the border's colour."""
    if mode == WRAP:
        return i % n
    if mode == MIRROR:
        i %= 2 * n
        return i if i < n else 2 * n - 1 - i
    if mode == BORDER:
        return i if 0 <= i < n else None
    return min(max(i, 0), n - 1)


def texel(data: np.ndarray, place: Sequence[int | None], border: float) -> float:
    return border if None in place else float(data[tuple(place)])


def sample(data: np.ndarray, coordinates: Sequence[float], mode: int, *, linear: bool, normalized: bool,
           border: float = 0.0) -> float:
    """One channel. ``data``: [z][y][x], as many axes as coordinates, which come x first."""
    extents = data.shape[::-1]
    mode = mode if normalized or mode == BORDER else CLAMP
    scaled = [float(np.float32(c)) * (n if normalized else 1) for c, n in zip(coordinates, extents, strict=True)]
    if not linear:
        place = [index(math.floor(c), n, mode) for c, n in zip(scaled, extents, strict=True)]
        return texel(data, place[::-1], border)
    total = 0.0
    for corner in range(1 << len(scaled)):
        weight, place = 1.0, []
        for axis, (c, n) in enumerate(zip(scaled, extents, strict=True)):
            base = math.floor(c - 0.5)
            part = (c - 0.5) - base
            upper = corner >> axis & 1
            weight *= part if upper else 1 - part
            place.append(index(base + upper, n, mode))
        total += weight * texel(data, place[::-1], border)
    return total


def tolerance(data: np.ndarray, axes: int, border: float = 0.0) -> float:
    """How far fixed-point weights may be off: half a step in each axis, of the greatest difference of two texels."""
    span = max(float(data.max()), border) - min(float(data.min()), border)
    return axes * WEIGHT_STEP / 2 * span + 1e-5 * max(1.0, abs(float(data.max())))


def face(x: float, y: float, z: float) -> tuple[int, float, float]:
    """The face of a cube that a direction meets, and where: (face, s, t) with s, t in [0, 1]."""
    ax, ay, az = abs(x), abs(y), abs(z)
    if ax >= ay and ax >= az:
        number, m, s, t = (0, x, -z, -y) if x >= 0 else (1, -x, z, -y)
    elif ay >= az:
        number, m, s, t = (2, y, x, z) if y >= 0 else (3, -y, x, -z)
    else:
        number, m, s, t = (4, z, x, -y) if z >= 0 else (5, -z, -x, -y)
    return number, (s / m + 1) / 2, (t / m + 1) / 2
