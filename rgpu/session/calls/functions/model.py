"""Description of a driver function, and the short form in which the tables write it.

``function(symbol, arguments, known, answer, calls, note)``:

``symbol``     the exported name
``arguments``  C parameter list ("" for void), None where no header declares it
``known``      its name for cuGetProcAddress: ``"BASE VERSION"``, followed by
               ``"ptds VERSION"`` or ``"ptsz VERSION"`` when a variant for the
               per-thread default stream is exported as well
``answer``     LOCAL, ASYNC, SYNC, REFUSED
``calls``      names of the wire calls that it may append, separated by blanks
``alias``      it has the meaning and the signature of that other symbol
``adapter``    C++ statements that answer it with other functions
"""

from __future__ import annotations

from dataclasses import dataclass

LOCAL = "local"  #: answered by the shim, from its own state
ASYNC = "async"  #: sent, not awaited
SYNC = "sync"  #: awaited (or may be)
REFUSED = "refused"  #: CUDA_ERROR_NOT_SUPPORTED, logged once


@dataclass(frozen=True, slots=True)
class PerThread:
    """The variant for the per-thread default stream."""

    suffix: str  #: "_ptds" or "_ptsz"
    version: int


@dataclass(frozen=True, slots=True)
class Function:
    """One exported driver function; see the module docstring."""

    symbol: str
    arguments: str | None
    base: str | None
    version: int
    per_thread: PerThread | None
    answer: str
    calls: tuple[str, ...]
    note: str
    alias: str | None
    adapter: str | None

    @property
    def implemented(self) -> bool:
        return self.answer != REFUSED

    @property
    def hand_written(self) -> bool:
        """Whether its body is in the shim's own files, not in a generated one."""
        return self.implemented and self.alias is None and self.adapter is None

    @property
    def parameters(self) -> tuple[str, ...]:
        """The C parameters, one string each."""
        return tuple(part.strip() for part in self.arguments.split(",")) if self.arguments else ()

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return tuple(part.replace("*", " ").split()[-1] for part in self.parameters)

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbol and its per-thread variant."""
        return (self.symbol,) + ((self.symbol + self.per_thread.suffix,) if self.per_thread else ())


def function(
    symbol: str,
    arguments: str | None,
    known: str,
    answer: str = REFUSED,
    calls: str = "",
    note: str = "",
    *,
    alias: str | None = None,
    adapter: str | None = None,
) -> Function:
    """Make an entry of the tables beside this file. Raises ValueError for an invalid ``known``."""
    words = known.split()
    per_thread = None
    if len(words) == 4:
        if words[2] not in ("ptds", "ptsz"):
            raise ValueError(f"{symbol}: no such variant: {words[2]}")
        per_thread = PerThread("_" + words[2], int(words[3]))
    elif len(words) not in (0, 2):
        raise ValueError(f"{symbol}: cannot read {known!r}")
    base, version = (words[0], int(words[1])) if words else (None, 0)
    return Function(symbol, arguments, base, version, per_thread, answer, tuple(calls.split()), note, alias, adapter)
