"""Makes every file that follows from the tables of calls.

    python -m rgpu.session.calls.generate           writes them
    python -m rgpu.session.calls.generate --check   exit status 1 if one differs
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from rgpu.session.calls.emit import api, decoders, docs, engine, types, wire

_SHIM = "rgpu/client/shim/generated"

#: path from the checkout's root → what makes its text
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
    """The checkout that this package stands in."""
    return Path(__file__).resolve().parents[3]


def stale(where: Path) -> list[str]:
    """The outputs under ``where`` that are missing or differ from the tables."""
    found = []
    for name, make in OUTPUTS.items():
        path = where / name
        if not path.is_file() or path.read_text(encoding="utf-8") != make():
            found.append(name)
    return found


def write(where: Path) -> list[str]:
    """Writes what is stale; returns the names written."""
    names = stale(where)
    for name in names:
        path = where / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(OUTPUTS[name](), encoding="utf-8")
    return names


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    if arguments:
        names = stale(root())
        for name in names:
            print(f"{name} does not follow from the tables: run python -m rgpu.session.calls.generate")
        return 1 if names else 0
    for name in write(root()):
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
