"""Which function generates which opcode."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .model import Instruction

if TYPE_CHECKING:
    from .codegen import Gen, Mods

Handler = Callable[["Gen", Instruction, "Mods"], None]
_HANDLERS: dict[str, Handler] = {}


def op(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler for opcodes."""

    def add(handler: Handler) -> Handler:
        for name in names:
            _HANDLERS[name] = handler
        return handler

    return add


def run(g: Gen, ins: Instruction) -> None:
    """Generate code for one instruction; every modifier must have been taken."""
    from . import ops_bits, ops_convert, ops_float, ops_integer, ops_math, ops_memory, ops_special, ops_system, ops_warp  # noqa: F401
    from .codegen import Mods

    handler = _HANDLERS.get(ins.op)
    if handler is None:
        raise ins.refuse()
    m = Mods(ins)
    handler(g, ins, m)
    m.done()
