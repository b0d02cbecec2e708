"""The driver functions, by area: the one place that defines how each is answered."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources

from rgpu.session.calls.functions import (
    context,
    copy,
    device,
    driver,
    event,
    graph,
    launch,
    library,
    memory,
    module,
    pool,
    stream,
    virtual_memory,
)
from rgpu.session.calls.functions.interop import array, external, graphics
from rgpu.session.calls.functions.model import Function

AREAS: dict[str, tuple[Function, ...]] = {
    part.__name__.rpartition(".")[2]: part.FUNCTIONS
    for part in (
        driver, device, context, module, library, launch, stream, event, memory, pool, copy, graph,
        array, virtual_memory, external, graphics,
    )
}


def _resolve() -> dict[str, Function]:
    """Return every entry by symbol; an alias has the answer and the calls of its target."""
    found = {entry.symbol: entry for part in AREAS.values() for entry in part}
    for symbol, entry in found.items():
        if entry.alias:
            target = found[entry.alias]
            found[symbol] = replace(entry, answer=target.answer, calls=target.calls, note=f"as {entry.alias}")
    return found


#: symbol → entry, without per-thread variants
FUNCTIONS: dict[str, Function] = _resolve()


def symbols() -> tuple[str, ...]:
    """Return the names that libcuda exports (symbols.txt), sorted."""
    text = resources.files("rgpu.session.calls").joinpath("symbols.txt").read_text(encoding="ascii")
    return tuple(sorted(line for line in text.splitlines() if line and not line.startswith("#")))
