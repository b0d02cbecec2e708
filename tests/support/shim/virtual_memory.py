"""Functions for programs of tests: memory of cuMemCreate, reserved, made, mapped."""

from __future__ import annotations

VMM = """
import struct

class Prop(c.Structure):
    _fields_ = [("type", c.c_int), ("handles", c.c_int), ("where", c.c_int), ("id", c.c_int), ("meta", P),
                ("rest", c.c_ubyte * 8)]

PROP = Prop(1, 0, 1, 0, None)

def reserve(size, alignment=0, wish=0):
    at = U64()
    ok(cu.cuMemAddressReserve(c.byref(at), SIZE(size), SIZE(alignment), U64(wish), U64(0)))
    return at.value

def create(size):
    handle = U64()
    ok(cu.cuMemCreate(c.byref(handle), SIZE(size), c.byref(PROP), U64(0)))
    return handle.value

def map_at(address, size, handle):
    return cu.cuMemMap(U64(address), SIZE(size), SIZE(0), U64(handle), U64(0))

def unmap(address, size):
    return cu.cuMemUnmap(U64(address), SIZE(size))
"""
