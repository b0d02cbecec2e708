"""Runs a function in an interpreter of its own: for what poisons the context, or keeps the standard output."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def run(body: Callable[..., None], *arguments: object, timeout: float = 120) -> None:
    """Call ``body(*arguments)`` there: a function of a module's top level, arguments that ``repr`` writes.

    Raises :class:`AssertionError` with what it said when it fails; what it does not assert it may print.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    code = (f"from {body.__module__} import {body.__name__} as body\n"
            f"body(*{arguments!r})\n"
            "import os, sys\n"
            "sys.stderr.flush()\n"
            "os._exit(0)\n")  # a context that is no more would hold its end up
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": path},
                          stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout)
    said = done.stdout.decode(errors="replace")[-4000:] + done.stderr.decode(errors="replace")[-8000:]
    assert done.returncode == 0, f"{body.__name__} ended with {done.returncode}:\n{said}"
