"""The cost of each load of a module binary: its kind, bytes and kernels, and the time of each stage.

A device notes the stages of the load under way (:class:`LoadNotes`); the executor sums them up for its session
(:class:`LoadFigures`), for ``modules.loads`` of ``rgpu ps -o json`` (docs/users/output.md).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappush, heapreplace
from typing import Any

#: In the order in which they occur. ``travel``: from the first byte of the call, or its mention by hash, to the begin
#: of the load, the node's cache included; ``unpack``: decompression of a fat binary's entry; ``compile``: PTX to
#: machine code; ``load``: the driver's own call; ``describe``: names, parameters, attributes and variables.
STAGES = ("travel", "unpack", "compile", "load", "describe")
PTX, CUBIN, FATBIN, OTHER = "ptx", "cubin", "fatbin", "other"
SLOWEST = 8  #: loads that are shown one by one

_FATBIN, _ELF = b"\x50\xed\x55\xba", b"\x7fELF"


def kind_of(binary: Any) -> str:
    """Return the kind of a module binary, judged by its first bytes; PTX begins with text."""
    head = bytes(binary[:4])
    if head in (_FATBIN, _ELF):
        return FATBIN if head == _FATBIN else CUBIN
    return PTX if b".version" in bytes(binary[:65536]) else OTHER


class LoadNotes:
    """Stages of the load under way. One thread loads at a time.

    ``digest``: BLAKE3 of the module binary, where the caller has it. ``compiled`` and ``described``: True if the result
    was found in the node's cache, False if it had to be made, None if it was not needed.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self, digest: bytes = b"") -> None:
        """Start the notes of a new load; those of the load before are dropped."""
        self.digest = digest
        self.seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self.compiled: bool | None = None
        self.described: bool | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the block to a stage; a load that is tried again counts twice, as it costs twice."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - began


@dataclass(slots=True)
class _Sum:
    loads: int = 0
    failed: int = 0
    libraries: int = 0  #: of the loads: those as a CUlibrary
    bytes: int = 0
    kernels: int = 0
    compiled: int = 0
    compiled_kept: int = 0
    described_kept: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    def as_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__ if name != "seconds"}
        return values | {"ms": _ms(self.seconds)}


class LoadFigures:
    """Sums of a session's loads by kind, and the slowest loads; loads during a rebuild count as well."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sum] = {}
        self._slowest: list[tuple[float, int, dict[str, Any]]] = []  #: a heap, the quickest first

    def add(self, seq: int, kind: str, size: int, kernels: int, library: bool, notes: LoadNotes,
            failed: bool = False) -> None:
        """Add the load at position ``seq``, of ``size`` bytes."""
        found = self._sums.setdefault(kind, _Sum())
        found.loads += 1
        found.failed += failed
        found.libraries += library
        found.bytes += size
        found.kernels += kernels
        found.compiled += notes.compiled is False
        found.compiled_kept += notes.compiled is True
        found.described_kept += notes.described is True
        for name, seconds in notes.seconds.items():
            found.seconds[name] += seconds
        one = {"seq": seq, "kind": kind, "library": library, "bytes": size, "kernels": kernels,
               "ms": _ms(notes.seconds)}
        item = sum(notes.seconds.values()), seq, one
        if len(self._slowest) < SLOWEST:
            heappush(self._slowest, item)
        elif item[:2] > self._slowest[0][:2]:
            heapreplace(self._slowest, item)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for ``rgpu ps``, times in ms."""
        slowest = sorted(self._slowest, key=lambda item: item[:2], reverse=True)
        return {"kinds": {kind: found.as_dict() for kind, found in sorted(self._sums.copy().items())},
                "slowest": [one for _, _, one in slowest]}


def _ms(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(1000 * value, 2) for name, value in seconds.items()}
