"""Generate every file that is derived from the tables of the links' messages.

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
from rgpu.link.protocols.ranks import RANK_MEMORY, RANKS
from rgpu.link.protocols.shim import SHIM
from rgpu.link.protocols.table import Protocol
from rgpu.session import generated

PROTOCOLS = (SHIM, DATA, MEMORY, PAGES, RANKS, RANK_MEMORY, CONTROL)
_MESSAGES = "rgpu/link/messages"


def _module(protocol: Protocol) -> Callable[[], str]:
    return lambda: emit.module(protocol)


#: path from the checkout's root → function that makes its text
OUTPUTS: dict[str, Callable[[], str]] = {
    **{f"{_MESSAGES}/{protocol.name}.py": _module(protocol) for protocol in PROTOCOLS},
    f"{_MESSAGES}/native/shim_link.hpp": lambda: emit.header(SHIM),
    f"{_MESSAGES}/native/data_link.hpp": lambda: emit.header(DATA, "data_link"),
    "docs/protocols/shim.md": lambda: emit.page(SHIM),
    "docs/protocols/data.md": lambda: emit.page(DATA, MEMORY),
    "docs/protocols/pages.md": lambda: emit.page(PAGES),
    "docs/protocols/ranks.md": lambda: emit.page(RANKS, RANK_MEMORY),
    "docs/protocols/control.md": lambda: emit.page(CONTROL, more=emit.verbs()),
}


def root() -> Path:
    """Return the checkout that this package is in."""
    return generated.root()


def stale(where: Path) -> list[str]:
    """Return the outputs under ``where`` that are missing or differ from the tables."""
    return generated.stale(OUTPUTS, where)


def write(where: Path) -> list[str]:
    """Write what is stale under ``where``; return the names written."""
    return generated.write(OUTPUTS, where)


def main(arguments: list[str]) -> int:
    """Write or check; return the exit status."""
    return generated.command(OUTPUTS, "rgpu.link.protocols.generate", __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
