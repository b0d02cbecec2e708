"""Where a program says that it may be disturbed, and waits until it was: ``gate k``, then the file ``FOLDER/k``.

FOLDER is the program's first argument. What was launched before goes on meanwhile.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

PATIENCE = 600.0  #: s: some programs stand at a gate while a whole module's tests use their session


def gate(name: object) -> None:
    print("gate", name, flush=True)
    opened = Path(sys.argv[1]) / str(name)
    deadline = time.monotonic() + PATIENCE
    while not opened.exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"gate {name} was not opened")
        time.sleep(0.005)
