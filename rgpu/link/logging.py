"""The package structlog without rich: imported before structlog by each package that imports that.

Where rich is installed, ``import structlog`` imports it, and pygments, for coloured tracebacks: a fifth of what a
worker or a daemon takes to start. structlog does without when it does not find rich.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType


class _WithoutRich(MetaPathFinder):
    """Hide rich from the one thread that made this: another one may be importing it meanwhile, to report an error."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Leave a module to the finders behind this one.

        :raises ModuleNotFoundError: for rich and what is in it, in this thread
        """
        if name.partition(".")[0] == "rich" and threading.get_ident() == self._thread:
            raise ModuleNotFoundError("structlog does without rich", name=name)


_finder = _WithoutRich()
sys.meta_path.insert(0, _finder)
try:
    import structlog
finally:
    sys.meta_path.remove(_finder)

__all__ = ["structlog"]
