"""Registry of the functions that generate each opcode."""

from __future__ import annotations

from collections.abc import Callable

from rgpu.server.device.cpu.ptx.emitter import Gen, Mods
from rgpu.server.device.cpu.ptx.model import Instruction

Handler = Callable[[Gen, Instruction, Mods], None]
HANDLERS: dict[str, Handler] = {}


def op(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler for opcodes."""

    def add(handler: Handler) -> Handler:
        for name in names:
            HANDLERS[name] = handler
        return handler

    return add
