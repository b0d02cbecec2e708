"""Checkpoints of this process's session beside those that a training framework writes; common to all frameworks."""

from __future__ import annotations

import logging
import threading

import rgpu

log = logging.getLogger("rgpu.integrations")


class Taking:
    """Takes checkpoints of the session that this process has, one at a time.

    ``wait``: training waits until each is durable; otherwise it goes on meanwhile, and a checkpoint that is asked for
    while one is being written is left out. ``strict``: a failure raises the class of :class:`rgpu.RgpuError`, at the
    next call where nobody waited; otherwise it is a warning of the logger ``rgpu.integrations``.

    Outside `rgpu run` nothing is taken. A process that has not used the GPU is told once, and nothing is taken either.
    """

    def __init__(self, *, wait: bool = False, strict: bool = False) -> None:
        self.wait, self.strict = wait, strict
        self.latest: rgpu.Checkpoint | None = None  #: the newest one that counts
        self._writing: threading.Thread | None = None
        self._failed: rgpu.RgpuError | None = None
        self._no_session = False

    def take(self, step: int) -> None:
        """Take one beside the framework's own of that step. With ``strict`` raises :class:`rgpu.RgpuError`."""
        self._raise()
        here = None if self._no_session else rgpu.current()
        if here is None:
            return
        if self.wait:
            self._take(here, step)
            self._raise()
        elif self._writing is not None and self._writing.is_alive():
            log.info("no checkpoint of the session at step %d: the one before is still being written", step)
        else:
            self._writing = threading.Thread(target=self._take, args=(here, step), name="rgpu-checkpoint", daemon=True)
            self._writing.start()

    def finish(self) -> None:
        """Wait for the one that is being written. With ``strict`` raises :class:`rgpu.RgpuError`."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.join()
        self._raise()

    def _take(self, here: rgpu.Current, step: int) -> None:
        try:
            session = here.name
        except rgpu.NotFound as error:
            self._no_session = True
            log.warning("no checkpoints of the session are taken: %s", error.message)
            return
        except rgpu.RgpuError as error:
            self._fails(f"the session of step {step}", error)
            return
        try:
            self.latest = here.checkpoint()
            log.info("checkpoint %s of session %s at step %d: %d pages, paused %.0f ms", self.latest.image, session,
                     step, self.latest.pages, self.latest.pause_ms)
        except rgpu.RgpuError as error:
            self._fails(f"session {session} at step {step}", error)

    def _fails(self, what: str, error: rgpu.RgpuError) -> None:
        if self.strict:
            self._failed = error
        else:
            log.warning("no checkpoint of %s: %s (%s); training goes on", what, error.message, error.code)

    def _raise(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed
