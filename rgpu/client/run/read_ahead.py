"""Import of the modules that a session needs, before its program requests one, in otherwise idle time.

A program that uses CUDA should not wait for the imports, and a program that does not, or ends at once, should not pay
for them. So they run while the pool makes the session, else once the program has run for a moment.
"""

from __future__ import annotations

import importlib
import threading

from rgpu.link.local.promptness import keep_prompt

PATIENCE = 0.05  #: seconds: a session made sooner, whose program ends sooner, needs no imports
#: Modules for a session, its log and its bulk data, in steps that are short enough to wait for at the end.
MODULES = ("rgpu.link.logging", "rgpu.client.run.hello", "rgpu.client.journal.kept", "rgpu.client.session.shipper",
           "numpy")


class ReadAhead:
    """One thread that imports; no other has to wait for it: code that needs a module sooner imports it."""

    def __init__(self) -> None:
        self._begun = False
        self._placed = threading.Event()
        self._over = threading.Event()

    def start(self) -> None:
        """Begin, if it has not begun; the imports wait for :data:`PATIENCE`."""
        if self._begun:
            return
        self._begun = True
        threading.Thread(target=self._read, name="reads-ahead").start()

    def placed(self) -> None:
        """Note that the session is made, or is made later: the program starts."""
        self._placed.set()

    def stop(self) -> None:
        """Import nothing more after the present module."""
        self._over.set()
        self._placed.set()

    def _read(self) -> None:
        if self._placed.wait(PATIENCE) and self._over.wait(PATIENCE):
            return
        for name in MODULES:
            if self._over.is_set():
                return
            importlib.import_module(name)
        keep_prompt()
