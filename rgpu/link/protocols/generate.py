"""Make every file that follows from the tables of the links' messages.

    python -m rgpu.link.protocols.generate           writes them
    python -m rgpu.link.protocols.generate --check   exit status 1 if one differs
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from rgpu.link.protocols import emit
from rgpu.link.protocols.control import CONTROL
from rgpu.link.protocols.data import DATA, MEMORY
from rgpu.link.protocols.pages import PAGES
from rgpu.link.protocols.shim import SHIM
from rgpu.link.protocols.table import Protocol

PROTOCOLS = (SHIM, DATA, MEMORY, PAGES, CONTROL)
_MESSAGES = "rgpu/link/messages"


def _module(protocol: Protocol) -> Callable[[], str]:
    return lambda: emit.module(protocol)


#: path from the checkout's root → what makes its text
OUTPUTS: dict[str, Callable[[], str]] = {
    **{f"{_MESSAGES}/{protocol.name}.py": _module(protocol) for protocol in PROTOCOLS},
    f"{_MESSAGES}/native/shim_link.hpp": lambda: emit.header(SHIM),
    "docs/protocols/shim.md": lambda: emit.page(SHIM),
    "docs/protocols/data.md": lambda: emit.page(DATA, MEMORY),
    "docs/protocols/pages.md": lambda: emit.page(PAGES),
    "docs/protocols/control.md": lambda: emit.page(CONTROL, more=emit.verbs()),
}


def root() -> Path:
    """Return the checkout that this package stands in."""
    return Path(__file__).resolve().parents[3]


def stale(where: Path) -> list[str]:
    """Return the outputs under ``where`` that are missing or differ from the tables."""
    found = []
    for name, make in OUTPUTS.items():
        path = where / name
        if not path.is_file() or path.read_bytes() != make().encode():
            found.append(name)
    return found


def write(where: Path) -> list[str]:
    """Write what is stale; return the names written."""
    names = stale(where)
    for name in names:
        path = where / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(OUTPUTS[name]().encode())
    return names


def main(arguments: list[str]) -> int:
    """Write or check; return the exit status."""
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    if arguments:
        names = stale(root())
        for name in names:
            print(f"{name} does not follow from the tables: run python -m rgpu.link.protocols.generate")
        return 1 if names else 0
    for name in write(root()):
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
