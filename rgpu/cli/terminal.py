"""Printing at the terminal: what makes the consoles of :mod:`.common` when the first line is printed."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from rgpu.session.printable import printable


class Terminal(Console):
    """A console that obeys nothing in the texts it prints: they may be strangers'."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as :meth:`rich.console.Console.print`, text made harmless."""
        super().print(*(printable(one, keep="\n\t") if isinstance(one, str) else one for one in objects), **options)
