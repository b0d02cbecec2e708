"""Signals of `rgpu run`: which it hands on to its program, and how it ends by the one that ended that.

Little is imported: `rgpu run` in front of a resident's agent needs it too.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGQUIT)


def install(forward: Callable[[int, Any], None], interrupted: Callable[[], None]) -> dict[int, Any]:
    """Our handlers, while the child runs; returns those before. Only the main thread may have any."""
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
    if sys.stdout is not None:  # as where this process was started without
        sys.stdout.flush()
    if number != signal.SIGKILL:  # which has no handler to take away, and setting one is an error
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
