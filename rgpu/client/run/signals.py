"""Signals of `rgpu run`: forwarding to its program, and ending by the same signal as the program.

Little is imported: `rgpu run` in front of a resident's agent uses this module too.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGQUIT)


def install(forward: Callable[[int, Any], None], interrupted: Callable[[], None]) -> dict[int, Any]:
    """Set handlers, while the child runs; return the previous ones. Only the main thread may have any."""
    old: dict[int, Any] = {}
    try:
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays nohup
                old[number] = signal.signal(number, forward)
        # Ctrl-C reaches the child by itself: the terminal signals the whole foreground group.
        # A handler, not SIG_IGN, since the child would inherit that.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            old[signal.SIGINT] = signal.signal(signal.SIGINT, lambda number, frame: interrupted())
    except ValueError:
        pass
    return old


def put_back(old: dict[int, Any]) -> None:
    """Set the handlers that :func:`install` returned."""
    for number, handler in old.items():
        signal.signal(number, handler)


def die_by(number: int) -> None:
    """End this process by the signal that ended the program, without a second core dump."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if sys.stdout is not None:  # None where this process was started without it
        sys.stdout.flush()
    if number != signal.SIGKILL:  # it has no handler, and setting one is an error
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
