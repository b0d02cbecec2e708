"""structlog without its coloured tracebacks: import this first.

Where rich is installed, ``import structlog`` imports it, and pygments: a fifth
of what a worker, an agent or a daemon takes to start, for tracebacks on a
terminal that none of them prints. It does without when it does not find rich.
"""

import sys

if "structlog" not in sys.modules:
    _there = sys.modules.get("rich")
    sys.modules["rich"] = None  # type: ignore[assignment]  # an import of it fails
    try:
        import structlog  # noqa: F401
    finally:
        if _there is None:
            del sys.modules["rich"]
        else:
            sys.modules["rich"] = _there
