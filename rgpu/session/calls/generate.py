"""Generator of every file that follows from the tables of calls.

    python -m rgpu.session.calls.generate           writes them
    python -m rgpu.session.calls.generate --check   exit status 1 if one differs
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from rgpu.session import generated
from rgpu.session.calls.emit import api, decoders, docs, engine, types, wire

_SHIM = "rgpu/client/shim/generated"

#: path from the checkout's root → function that makes its text
OUTPUTS: dict[str, Callable[[], str]] = {
    f"{_SHIM}/cuda_types.hpp": types.cuda_types,
    f"{_SHIM}/api.hpp": api.api_header,
    f"{_SHIM}/exports.cpp": api.exports,
    f"{_SHIM}/symbols.map": api.version_script,
    f"{_SHIM}/wire.hpp": wire.wire_header,
    "rgpu/server/device/cuda/native/generated/hot_calls.hpp": engine.hot_calls,
    "rgpu/session/calls/decoders.py": decoders.decoders,
    "docs/users/coverage.md": docs.coverage,
    "docs/users/errors.md": docs.errors,
}


def root() -> Path:
    """Return the root of the checkout that contains this package."""
    return generated.root()


def stale(where: Path) -> list[str]:
    """Return the outputs under ``where`` that are missing or differ from the tables."""
    return generated.stale(OUTPUTS, where)


def write(where: Path) -> list[str]:
    """Write the stale outputs under ``where``; return the names written."""
    return generated.write(OUTPUTS, where)


def main(arguments: list[str]) -> int:
    """Write or check; return the exit status."""
    return generated.command(OUTPUTS, "rgpu.session.calls.generate", __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
