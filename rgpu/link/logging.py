"""The package structlog without rich: imported before structlog by each package that imports that.

Where rich is installed, ``import structlog`` imports it, and pygments, for coloured tracebacks: a fifth of what a
worker or a daemon takes to start. structlog does without when it does not find rich.
"""

from __future__ import annotations

import sys

if "structlog" not in sys.modules:
    _there = sys.modules.get("rich")
    sys.modules["rich"] = None  # type: ignore[assignment]  # an import of it fails
    try:
        import structlog
    finally:
        if _there is None:
            del sys.modules["rich"]
        else:
            sys.modules["rich"] = _there
import structlog

__all__ = ["structlog"]
