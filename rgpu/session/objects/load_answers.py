"""Answers of module loads, kept so that the answer of a replay can be compared with them (SEMANTICS 12)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import blake3

from rgpu.session.answers import Divergence
from rgpu.session.calls import decoders
from rgpu.session.calls.wire import BY_NAME
from rgpu.session.objects import module_table
from rgpu.session.objects.module_table import GlobalVariable

LOAD = BY_NAME["module_load"].id


@dataclass(slots=True)
class LoadAnswer:
    """The part of a load's answer that must be the same in a replay."""

    functions: int
    globals_digest: bytes
    globals: tuple[GlobalVariable, ...] | None  #: None once it is unloaded


def differs(seq: int, module: int, before: LoadAnswer, result: int, reply: Any) -> Divergence | None:
    """Compare the answer of a replayed load with the one recorded; None: it is the same.

    ``seq``: position of the load; ``result``, ``reply``: CUresult and encoded reply arguments of the replay.
    """
    def divergence(what: str) -> Divergence:
        return Divergence(seq, "module_load", f"module {module} (position {seq}): {what}")

    if result:
        return divergence(f"the load now fails with {result}")
    now = load_answer(reply)
    if now.globals_digest != before.globals_digest:
        return divergence(_moved_global(before.globals, now.globals or ()))
    if now.functions != before.functions:
        return divergence(f"{now.functions} functions, {before.functions} before")
    return None


def load_answer(reply: Any) -> LoadAnswer:
    """Extract from the encoded reply arguments of a successful load what is kept. Raises :class:`Corrupt`."""
    table = module_table.decode(decoders.decode_reply(LOAD, reply).table)
    places = module_table.encode(module_table.ModuleTable((), table.globals))
    return LoadAnswer(len(table.functions), blake3.blake3(places).digest(), table.globals)


def _moved_global(before: tuple[GlobalVariable, ...] | None, now: tuple[GlobalVariable, ...]) -> str:
    if before is not None:
        for old, new in zip(before, now, strict=False):
            if old != new:
                return f"variable {old.name} was {old.size} bytes at {old.address:#x}; now {new.name} is " \
                       f"{new.size} bytes at {new.address:#x}"
        return f"{len(now)} variables, {len(before)} before"
    return "its variables stand elsewhere"
