"""Report from `rgpu run` to the process that started it by :meth:`rgpu.Pool.run`: one line of JSON through a pipe.

``{"started": {"name": NAME, "pid": PID}}`` once the program runs, with ``"runs"``, the folder of its record, for a
detached run; or ``{"refused": {"error": …}}``. Nothing is written when it ended before: see its exit status.
"""

from __future__ import annotations

import json
import os
from typing import Any

from rgpu.session.errors import RgpuError

LONGEST = 1 << 20  #: bytes of a line


class Report:
    """The writing end of the pipe. ``fd``: None where no report was requested."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        if fd is not None:
            os.set_inheritable(fd, False)  # the program does not inherit the pipe

    def started(self, name: str, pid: int, runs: str = "") -> None:
        """Report that the program runs as process ``pid``, and that its first session is called ``name``.

        ``runs``: for a detached run, the folder of its record.
        """
        self._say({"started": {"name": name, "pid": pid, **({"runs": runs} if runs else {})}})

    def refused(self, error: RgpuError) -> bool:
        """Report that the program was not started. Return whether the report was written."""
        return self._say({"refused": error.as_dict()})

    def _say(self, word: dict[str, Any]) -> bool:
        fd, self._fd = self._fd, None
        if fd is None:
            return False
        try:
            with open(fd, "wb") as pipe:
                pipe.write(json.dumps(word, default=str).encode() + b"\n")
        except OSError:
            return False  # the reader has ended: the program runs on
        return True
