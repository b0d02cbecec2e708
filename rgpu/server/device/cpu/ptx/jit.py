"""Compiles LLVM IR text to machine code, through llvmlite.

Helpers (memory access, atomics, directed rounding, scheduling) are compiled
once per process and called by name from kernels, which keeps the kernels'
own IR small: users notice compile time first.
"""

from __future__ import annotations

import hashlib
import platform
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import llvmlite
import llvmlite.binding as llvm

from rgpu.server import derived_format
from rgpu.server.device.cpu.ptx.errors import CompileLimit
from rgpu.server.device.cpu.ptx.machine import compiling

# Calls pass whole 32-lane registers: caller and callee must both treat 512-bit vectors as legal, or they would disagree
# about the places of arguments.
ATTRIBUTES = 'attributes #0 = { nounwind "min-legal-vector-width"="512" "prefer-vector-width"="512" }\n'



class Kept(Protocol):
    """A cache of machine code that was compiled before (:mod:`rgpu.server.derived`)."""

    def get(self, kind: int, key: bytes) -> bytes | None:
        """Return what is kept under ``key``; None: nothing."""

    def keep(self, kind: int, key: bytes, payload: bytes) -> None:
        """Keep ``payload`` under ``key``; it may be stored later."""


_lock = threading.RLock()
_kept: Kept | None = None
_engines: list = []
_refused: dict[bytes, CompileLimit] = {}  #: IR that exceeded a limit once does so again


@dataclass(frozen=True)
class Helper:
    """A function that kernels call: its declaration, body and the helpers it calls."""

    name: str
    declaration: str
    definition: str
    needs: tuple[Helper, ...] = ()


def private(result: str, name: str, args: str, body: str, inline: str = "alwaysinline") -> str:
    """Return the IR of a function that is called only by the helper that it is defined with."""
    return f"define internal {result} @{name}({args}) {inline} #0 {{\n{body}\n}}\n"


_compiled: dict[str, Helper] = {}


def _target() -> llvm.TargetMachine:
    return compiling.machine(2)


def _compile(text: str, names: list[str], level: int) -> dict[str, int]:
    code = _code(text, level)
    engine = _engine()
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)  # code stays until the process ends: its addresses are handed out
    return {name: engine.get_function_address(name) for name in names}


def _code(text: str, level: int) -> bytes:
    """Return object code of the IR: kept code of this compiler for this kind of processor, else newly compiled."""
    if _kept is None:
        return _object_code(text, level)
    name = derived_format.key(b"ir 1", text.encode(), b"%d" % compiling.effort(len(text), level), _compiler())
    code = _kept.get(derived_format.COMPILED, name)
    if code is None:
        code = _object_code(text, level)
        _kept.keep(derived_format.COMPILED, name, code)
    return code


def _compiler() -> bytes:
    """Return everything besides the IR that determines object code."""
    machine = _target()
    version = ".".join(map(str, llvm.llvm_version_info))
    return "\0".join((llvmlite.__version__, version, machine.triple, llvm.get_host_cpu_name(),
                      llvm.get_host_cpu_features().flatten(), platform.python_version())).encode()


def _object_code(text: str, level: int) -> bytes:
    name = hashlib.sha256(text.encode()).digest()
    if name in _refused:
        raise _refused[name]
    try:
        return compiling.object_code(text, level)
    except CompileLimit as error:
        _refused[name] = error
        raise


def _engine() -> llvm.ExecutionEngine:
    """Make a separate engine for one piece of object code."""
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target())


def keep_in(kept: Kept) -> None:
    """Keep object code in ``kept`` from now on, and reuse what it holds."""
    global _kept
    _kept = kept


def ensure(helpers: list[Helper]) -> None:
    """Compile the helpers (and what they need) that this process has not compiled yet."""
    with _lock:
        missing: dict[str, Helper] = {}
        known: dict[str, Helper] = {}

        def visit(helper: Helper) -> None:
            if helper.name in _compiled:
                known[helper.name] = helper
            elif helper.name not in missing:
                missing[helper.name] = helper
                for need in helper.needs:
                    visit(need)

        for helper in helpers:
            visit(helper)
        if not missing:
            return
        parts = [h.definition for h in missing.values()]
        parts += [h.declaration for h in known.values()]
        text = "\n".join(parts) + "\n" + ATTRIBUTES
        for name, address in _compile(text, list(missing), 2).items():
            llvm.add_symbol(name, address)
        _compiled.update(missing)


def compile_kernel(text: str, name: str, helpers: list[Helper]) -> int:
    """Return the address of function ``name`` in IR ``text``, compiled."""
    with _lock:
        ensure(helpers)
        declared = "\n".join(h.declaration for h in helpers)
        return _compile(f"{text}\n{declared}\n{ATTRIBUTES}", [name], 2)[name]


def address_of(helper: Helper) -> int:
    """Return the address of a helper, compiled if necessary."""
    ensure([helper])
    address = llvm.address_of_symbol(helper.name)
    assert address
    return address


def memo(make: Callable[..., Helper]) -> Callable[..., Helper]:
    """Cache helpers by their arguments: equal arguments give the same helper."""
    known: dict[tuple, Helper] = {}

    def cached(*args: object) -> Helper:
        if args not in known:
            known[args] = make(*args)
        return known[args]

    return cached


def helper(result: str, name: str, args: str, body: str, needs: tuple[Helper, ...] = (), extra: str = "") -> Helper:
    """Make a helper from its IR body; ``extra`` is private IR that belongs to it."""
    kinds = ", ".join(a.rsplit(" %", 1)[0] for a in args.split(", ") if a)
    return Helper(
        name,
        f"declare {result} @{name}({kinds}) #0",
        f"{extra}\ndefine {result} @{name}({args}) noinline #0 {{\n{body}\n}}",
        needs,
    )


def warm() -> None:
    """Load the compiler: for a worker that waits for its session."""
    with _lock:
        _target()
