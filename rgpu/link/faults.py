"""Named fault points: where tests inject faults, in the same processes that users run.

A process has them when ``RGPU_FAULT_FILE`` names a file; its first line is
``POINT:ACTION[:SECONDS]``. The process that reaches that point first renames the file
(so a fault happens once) and acts:

======  =====================================================
kill    SIGKILL to itself
stop    SIGSTOP to itself; the test sends SIGCONT later
fail    raises :class:`MoveFailed`
delay   sleeps SECONDS
lost    returns "lost": the caller behaves as if an answer was lost
ecc     returns "ecc": a kernel of the ``cpu`` device ends with that error
======  =====================================================

Without the variable a fault point costs one read of a module's variable.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from rgpu.link.loggers import get_logger
from rgpu.session.errors import MoveFailed

log = get_logger(__name__)

_FILE = os.environ.get("RGPU_FAULT_FILE")


def fault(point: str) -> str:
    """Inject a fault here if a test requests it; return the action taken, else an empty string."""
    return "" if _FILE is None else _act(Path(_FILE), point)


def broken(device: str) -> str:
    """Return the defect that an examination of the device is to find, from a test's file beside the fault's; or ""."""
    try:
        return "" if _FILE is None else Path(f"{_FILE}.broken.{device}").read_text().strip()
    except OSError:
        return ""


def _act(file: Path, point: str) -> str:
    try:
        name, action, *rest = file.read_text().strip().split(":")
        if name != point:
            return ""
        os.rename(file, f"{file}.{point}.fired")  # only one process succeeds
    except (OSError, ValueError):
        return ""
    log.warning("fault point", point=point, action=action)
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "fail":
        raise MoveFailed(f"fault point {point}")
    elif action == "delay":
        time.sleep(float(rest[0]))
    return action
