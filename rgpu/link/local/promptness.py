"""Settings of an interpreter whose threads handle a program's calls.

A thread that waits for the interpreter's lock gets it after :func:`sys.getswitchinterval`, 5 ms by default, while
another one computes; and a full garbage collection stops all threads for as long as it takes to walk everything that
was ever imported. Both are milliseconds in which a program's calls queue up that natively would not (SEMANTICS 20).
"""

from __future__ import annotations

import gc
import sys

SWITCH_INTERVAL = 0.0005  #: seconds


def keep_prompt() -> None:
    """Let threads take turns quickly, and exclude existing objects from garbage collections.

    For a process's start, after its imports.
    """
    sys.setswitchinterval(SWITCH_INTERVAL)
    gc.freeze()
