"""Printing to the terminal: the consoles of :mod:`.common`, made when the first line is printed."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from rgpu.session.printable import printable


class Terminal(Console):
    """A console that prints control characters in its texts, which are untrusted, as visible escapes."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as :meth:`rich.console.Console.print`, with control characters escaped."""
        super().print(*(printable(one, keep="\n\t") if isinstance(one, str) else one for one in objects), **options)
