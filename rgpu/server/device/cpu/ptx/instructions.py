"""Compiles one instruction to IR, by the function that is registered for its opcode."""

from __future__ import annotations

from rgpu.server.device.cpu.ptx.emitter import Gen, Mods
from rgpu.server.device.cpu.ptx.model import Instruction
from rgpu.server.device.cpu.ptx.ops import (  # noqa: F401 (importing them registers what they generate)
    bits,
    convert,
    floats,
    integers,
    mathematics,
    memory,
    special,
    system,
    warp,
)
from rgpu.server.device.cpu.ptx.ops.registry import HANDLERS
from rgpu.server.device.cpu.ptx.textures import handlers  # noqa: F401


def run(g: Gen, ins: Instruction) -> None:
    """Generate code for one instruction; every modifier must have been taken."""
    handler = HANDLERS.get(ins.op)
    if handler is None:
        raise ins.refuse()
    m = Mods(ins)
    handler(g, ins, m)
    m.done()
