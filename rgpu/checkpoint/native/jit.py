"""Compiler of LLVM IR for the host's processor: for inner loops over pages that run with the GIL released."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

# llvmlite is imported only where code is compiled: daemons import this module and compile nothing, and for a worker
# whose device is a GPU the import would only make the start longer.

T = TypeVar("T")

POINTER, WORD = ctypes.c_void_p, ctypes.c_uint64


def once(make: Callable[[], T]) -> Callable[[], T]:
    """Make a function that calls ``make`` once and returns its result; threads that call meanwhile wait for it.

    Without the lock, threads that begin at the same time would each compile.
    """
    lock = threading.Lock()
    found: list[T] = []

    def get() -> T:
        if not found:
            with lock:
                if not found:
                    found.append(make())
        return found[0]

    return get


@cache
def host() -> tuple[str, str, frozenset[str]]:
    """Return (name, feature string for LLVM, set of present features) of this processor."""
    import llvmlite.binding as llvm

    found = llvm.get_host_cpu_features()
    return llvm.get_host_cpu_name(), found.flatten(), frozenset(name for name, there in found.items() if there)


def compile_ir(text: str, cpu: str, features: str) -> Any:
    """Compile IR; return the engine that keeps the code alive: its ``get_function_address`` finds a function."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(cpu=cpu, features=features, opt=3)
    module = llvm.parse_assembly(text)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine


def function(engine: Any, name: str, *kinds: Any, result: Any = None) -> Any:
    """Return a callable of argument types ``kinds``; the GIL is released while it runs."""
    return ctypes.CFUNCTYPE(result, *kinds)(engine.get_function_address(name))
