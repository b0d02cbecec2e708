"""Files generated from tables: written, compared and checked by the command of each generator."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

#: path from the checkout's root → function that makes its text
Outputs = Mapping[str, Callable[[], str]]


def root() -> Path:
    """Return the root of the checkout that contains this package."""
    return Path(__file__).resolve().parents[2]


def version_script(names: Iterable[str]) -> str:
    """Return a linker's version script that exports ``names`` and nothing else."""
    return "{\n  global:\n" + "".join(f"    {name};\n" for name in names) + "  local:\n    *;\n};\n"


def stale(outputs: Outputs, where: Path) -> list[str]:
    """Return the names of ``outputs`` whose files under ``where`` are missing or differ by a byte."""
    found = []
    for name, make in outputs.items():
        path = where / name
        if not path.is_file() or path.read_bytes() != make().encode():
            found.append(name)
    return found


def write(outputs: Outputs, where: Path) -> list[str]:
    """Write the stale files under ``where``, with their folders; return the names written."""
    names = stale(outputs, where)
    for name in names:
        path = where / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(outputs[name]().encode())
    return names


def command(outputs: Outputs, module: str, usage: str | None, arguments: list[str]) -> int:
    """Run a generator's command in the checkout.

    ``arguments``: empty to write, or ``["--check"]`` to list stale files; ``module``: the name for ``python -m``.
    Returns the exit status: 0, 1 if ``--check`` found something, 2 with ``usage`` on stderr for other arguments.
    """
    if arguments not in ([], ["--check"]):
        print(usage, file=sys.stderr)
        return 2
    if arguments:
        names = stale(outputs, root())
        for name in names:
            print(f"{name} does not follow from the tables: run python -m {module}")
        return 1 if names else 0
    for name in write(outputs, root()):
        print(name)
    return 0
