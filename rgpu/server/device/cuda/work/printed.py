"""Text that kernels of the ``cuda`` device print: the driver writes it to this process's standard output.

Therefore a worker makes its standard output a memory file before the driver is
loaded: writing to it never waits, however much a kernel prints; text that was taken
is punched out of it. Positions in the file only grow.

The driver prints when something of the context synchronises (CUDA C++
Programming Guide, "Formatted Output"). This module never waits for the session's own
work (the engine polls markers), so :meth:`Printed.flush` synchronises a
stream that has no work. That may meet a lock that another call of the
driver holds while it waits for the device. Therefore a separate thread does it, and
:meth:`Printed.flush` waits for that no longer than :data:`PATIENCE`. It is done only where kernels
that may print were launched since it was last done with all work complete.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

from cuda.bindings import driver

from rgpu.server.device.cuda.engine import Engine
from rgpu.server.device.cuda.errors import check

PATIENCE = 0.25  #: seconds
BLOCK = 4096
NON_BLOCKING = 1
_PUNCH = 0x01 | 0x02  #: FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


class CapturedStdout:
    """Descriptor 1 as a memory file. Made before anything that prints is loaded; it lasts until the process ends."""

    def __init__(self) -> None:
        """Redirect descriptor 1. Raises OSError."""
        sys.stdout.flush()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        self._stdout = ctypes.c_void_p.in_dll(self._libc, "stdout")
        self._libc.fflush(self._stdout)
        #: this process's former output, for a tool that still has to write there
        self.former = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
        self._fd = os.memfd_create("rgpu-printed", os.MFD_CLOEXEC)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_APPEND)
        os.dup2(self._fd, 1, inheritable=False)
        sys.stdout = sys.stderr  # output of Python code is for the log, never for the program
        self._taken = 0  #: position
        self._punched = 0

    @property
    def written(self) -> int:
        """Bytes written so far, those that were taken too; those in the C library's buffer are not among them."""
        return os.fstat(self._fd).st_size

    @property
    def waiting(self) -> int:
        """Bytes available to :meth:`take`."""
        return self.written - self._taken

    def flush(self) -> None:
        """Write out the C library's buffer."""
        self._libc.fflush(self._stdout)

    def take(self, most: int) -> bytes:
        """Take ``most`` bytes at most. One thread at a time."""
        data = os.pread(self._fd, most, self._taken)
        self._taken += len(data)
        whole = self._taken // BLOCK * BLOCK
        if whole > self._punched:
            self._libc.fallocate(self._fd, _PUNCH, self._punched, whole - self._punched)
            self._punched = whole
        return data


class Printed:
    """Implements :class:`rgpu.server.worker.session_text.DeviceText`."""

    holds_stdout = True

    def __init__(self, stdout: CapturedStdout, contexts: Sequence[Any], engine: Engine) -> None:
        """Make a stream on each GPU; the first context is and stays current. Raises :class:`DeviceError`."""
        self._stdout, self._engine = stdout, engine
        self.former = stdout.former
        self._streams: list[tuple[Any, Any]] = []  #: (context, stream) of each GPU
        for context in reversed(contexts):
            check(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")
            self._streams.insert(0, (context, check(driver.cuStreamCreate(NON_BLOCKING), "cuStreamCreate")))
        # Through ctypes: other threads run while these calls wait.
        self._libcuda = ctypes.CDLL("libcuda.so.1")
        self._changed = threading.Condition()
        self._asked = self._done = 0
        #: the count of launches at the last flush with all work complete: while it is unchanged, nothing was printed
        self._settled = 0
        self._stuck = False  #: the thread did not finish in time
        self._stopped = False
        self._thread: threading.Thread | None = None
        self.printing = False

    def loaded(self) -> None:
        """Note that a module whose kernels may print was loaded."""
        self.printing = True

    @property
    def waiting(self) -> int:
        return self._stdout.waiting

    def take(self, most: int) -> bytes:
        """Take ``most`` bytes at most of what kernels printed."""
        return self._stdout.take(most)

    def flush(self) -> None:
        """Have the driver write out what kernels printed, if any may have since the last time."""
        if not self.printing:
            return
        count = int(self._engine.printing_launches())  # odd: a launch is being submitted
        if count == self._settled:
            return
        still = not count % 2 and self._idle()
        if self._ask() and still:
            self._settled = count

    def _idle(self) -> bool:
        """Whether no work of the session is unfinished."""
        return bool(self._engine.drain(0))

    def _ask(self) -> bool:
        """Make the driver print its buffers; False: that did not finish in time."""
        with self._changed:
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(target=self._run, name="cuda-printed", daemon=True)
                self._thread.start()
            self._asked += 1
            wanted = self._asked
            self._changed.notify_all()
            patience = 0.0 if self._stuck else PATIENCE
            self._stuck = not self._changed.wait_for(lambda: self._done >= wanted or self._stopped, patience)
            return not self._stuck

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._asked > self._done)
                if self._stopped:
                    return
                asked = self._asked
            before = self._stdout.written  # not those that wait: another thread may take some meanwhile
            for context, stream in self._streams:
                self._libcuda.cuCtxSetCurrent(ctypes.c_void_p(int(context)))
                self._libcuda.cuStreamSynchronize(ctypes.c_void_p(int(stream)))
                self._stdout.flush()
            if self._stdout.written == before and self._idle():
                for context, _ in self._streams:
                    self._libcuda.cuCtxSetCurrent(ctypes.c_void_p(int(context)))
                    self._libcuda.cuCtxSynchronize()  # the widest of the calls that print; nothing is left to wait for
                    self._stdout.flush()
            with self._changed:
                self._done, self._stuck = asked, False
                self._changed.notify_all()

    def close(self) -> None:
        """Free the streams, on a device that is drained."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(5)
            if self._thread.is_alive():
                return
        for _, stream in self._streams:
            driver.cuStreamDestroy(stream)
