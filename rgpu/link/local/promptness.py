"""Settings of an interpreter whose threads have a program's calls in their hands.

A thread that waits for the interpreter's lock gets it after :func:`sys.getswitchinterval`, 5 ms unless told otherwise,
where another one computes; and a full garbage collection stops all of them for as long as it takes to walk everything
that was ever imported. Both are milliseconds in which a program's calls pile up that natively would not (SEMANTICS 20).
"""

from __future__ import annotations

import gc
import sys

SWITCH_INTERVAL = 0.0005  #: seconds


def keep_prompt() -> None:
    """Let threads take turns quickly, and leave what exists by now out of garbage collections.

    For a process's start, when it has imported what it needs.
    """
    sys.setswitchinterval(SWITCH_INTERVAL)
    gc.freeze()
