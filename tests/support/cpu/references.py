"""What threads of the test kernels compute, one at a time and in Python."""

from __future__ import annotations

M32 = 0xFFFFFFFF


def wrap(value: int, bits: int, signed: bool) -> int:
    """As an integer of so many bits holds it."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if signed and value >> (bits - 1) else value


def to32(x: int) -> int:
    return wrap(x, 32, True)


def in_bytes(x: int) -> list[int]:
    return [x >> shift & 0xFF for shift in (0, 8, 16, 24)]


def byte_perm(x: int, y: int, selector: int) -> int:
    pool = in_bytes(x) + in_bytes(y)
    return sum(pool[selector >> (4 * k) & 7] << (8 * k) for k in range(4))


def collatz(v: int) -> int:
    steps = 0
    while v != 1:
        v = 3 * v + 1 if v & 1 else v // 2
        steps += 1
    return steps


def switched(v: int) -> int:
    return {0: v * 3, 1: (v ^ 0x55) + (v >> 1), 2: v >> 1, 3: sum(k * v for k in range(v % 13)), 4: -v, 5: v // 3 - 7,
            6: v // 3 - 7, 7: v * v, 8: v.bit_count(), 9: v << (v % 5)}.get(v % 11, 1)


def local_array(x: int) -> int:
    seen, heavy = [k * k for k in range(16)], [float(k) for k in range(8)]
    for k in range(20):
        seen[(x * 7 + k * 5) & 15] += k
        heavy[(x + k) & 7] += seen[(x >> 3) & 15]
    return sorted(seen)[x & 15] * 1000 + int(heavy[(x >> 1) & 7])
