"""Generator of api.hpp, exports.cpp and symbols.map: the exports of libcuda.so.1."""

from __future__ import annotations

from rgpu.session import generated
from rgpu.session.calls.emit.types import BANNER
from rgpu.session.calls.functions import FUNCTIONS, symbols
from rgpu.session.calls.functions.model import Function

_API_HEAD = """#pragma once

#include "cuda_types.hpp"

#define RGPU_API __attribute__((visibility("default")))

namespace rgpu {

// Logs `name` as called but not implemented, the first time only. Written by hand.
void log_unsupported(const char *name);

// Whether stream 0 means the calling thread's own default stream: true while a
// _ptds or _ptsz variant runs.
inline thread_local constinit bool per_thread_default_stream = false;

struct PerThreadScope {
    bool before = per_thread_default_stream;
    PerThreadScope() { per_thread_default_stream = true; }
    ~PerThreadScope() { per_thread_default_stream = before; }
    PerThreadScope(const PerThreadScope &) = delete;
    PerThreadScope &operator=(const PerThreadScope &) = delete;
};

enum ProcKind : uint32_t { kProcNormal = 0, kProcPerThread = 1 };

// What cuGetProcAddress knows; sorted by base, then kind, then version.
struct ProcEntry {
    const char *base;
    int version;  // as CUDA_VERSION: the first driver that has it
    uint32_t kind;
    void *address;
};

extern const ProcEntry kProcTable[];
extern const size_t kProcTableSize;

}  // namespace rgpu

extern "C" {

"""

def _signature(entry: Function, symbol: str) -> str:
    return f"RGPU_API CUresult {symbol}({entry.arguments or 'void'})"


def _implemented() -> list[Function]:
    return [entry for _, entry in sorted(FUNCTIONS.items()) if entry.implemented]


def api_header() -> str:
    """Make the text of api.hpp: the prototypes of every implemented function, variants included."""
    lines = [f"{_signature(entry, symbol)};\n" for entry in _implemented() for symbol in entry.symbols]
    return BANNER + _API_HEAD + "".join(lines) + '\n}  // extern "C"\n'


def _forwarders() -> list[str]:
    """Make the bodies of aliases, adapters and per-thread variants of implemented functions."""
    found = []
    for entry in _implemented():
        names = ", ".join(entry.parameter_names)
        if entry.alias:
            found.append(f"{_signature(entry, entry.symbol)} {{ return {entry.alias}({names}); }}\n")
        elif entry.adapter:
            found.append(f"{_signature(entry, entry.symbol)} {{ {entry.adapter} }}\n")
        for symbol in entry.symbols[1:]:
            found.append(f"{_signature(entry, symbol)} {{\n    rgpu::PerThreadScope scope;\n"
                         f"    return {entry.symbol}({names});\n}}\n")
    return found


def _stubs() -> list[str]:
    """Make the stubs of functions that are not implemented. They have no parameters:
    the caller removes arguments in every calling convention that libcuda has, and
    the types of unimplemented functions need not be declared."""
    return [f"RGPU_REFUSED({symbol})\n"
            for _, entry in sorted(FUNCTIONS.items()) if not entry.implemented for symbol in entry.symbols]


def _proc_rows() -> list[tuple[str, int, int, str]]:
    rows = []
    for entry in FUNCTIONS.values():
        if entry.base is None:
            continue
        rows.append((entry.base, 0, entry.version, entry.symbol))
        if entry.per_thread:
            rows.append((entry.base, 1, entry.per_thread.version, entry.symbol + entry.per_thread.suffix))
    return sorted(rows)


def exports() -> str:
    """Make the text of exports.cpp."""
    table = "".join(f'    {{"{base}", {version}, {kind}, reinterpret_cast<void *>(&{symbol})}},\n'
                    for base, kind, version, symbol in _proc_rows())
    return "".join((
        BANNER, '#include "api.hpp"\n\n',
        '// Not implemented: logged once by name, CUDA_ERROR_NOT_SUPPORTED.\n',
        '#define RGPU_REFUSED(symbol)              \\\n    RGPU_API CUresult symbol() {          \\\n'
        '        rgpu::log_unsupported(#symbol);   \\\n        return CUDA_ERROR_NOT_SUPPORTED;  \\\n    }\n\n',
        'extern "C" {\n\n', *_stubs(), "\n", *_forwarders(), '\n}  // extern "C"\n\nnamespace rgpu {\n\n',
        "const ProcEntry kProcTable[] = {\n", table, "};\n",
        "const size_t kProcTableSize = sizeof(kProcTable) / sizeof(kProcTable[0]);\n\n"
        "}  // namespace rgpu\n",
    ))


def version_script() -> str:
    """Make the text of symbols.map: the driver's names and nothing else."""
    return generated.version_script(symbols())
