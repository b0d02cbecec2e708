"""Stream memory operations of the ``cpu`` device: a stream writes a word, or waits until a word compares.

A wait occupies a device thread, as a spinning kernel does, and ends when the device is closed.

Sources: CUDA Driver API 13.0, "Stream Memory Operations" (CUstreamWaitValue_flags, CUstreamWriteValue_flags).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from rgpu.server.device.cpu.streams import Fault
from rgpu.session.errors import DeviceError

INVALID_VALUE, LAUNCH_FAILED = 1, 719
WRITE, WAIT = 0, 2  #: kinds: … + 1 for words of 64 bits
GEQ, EQ, AND, NOR = range(4)  #: CUstreamWaitValue_flags without the flags for flushing
_FORMS = 3
_POLL_SECONDS = 0.0005


def size_of(kind: int) -> int:
    """Return the size in bytes of an operation's word. Raises :class:`DeviceError` for an unknown kind."""
    if not WRITE <= kind <= WAIT + 1:
        raise DeviceError(f"stream memory operation {kind}", INVALID_VALUE)
    return 8 if kind & 1 else 4


def met(form: int, found: int, value: int, bits: int) -> bool:
    """Whether a word of ``bits`` bits fulfils the comparison ``form`` with ``value``."""
    mask = (1 << bits) - 1
    if form == GEQ:  # cyclic: the difference is not negative as a signed number
        return not (found - value) >> (bits - 1) & 1
    if form == EQ:
        return found == value & mask
    if form == AND:
        return bool(found & value & mask)
    return bool(~(found | value) & mask)


def work(kind: int, word: Callable[[], Any], value: int, flags: int, cancel: threading.Event) -> Callable[[], None]:
    """Return what executes an operation. ``word``: returns the word's bytes, checked; ``cancel`` ends a wait."""
    size = size_of(kind)
    value &= (1 << 8 * size) - 1

    def write() -> None:
        word().view(f"<u{size}")[:] = value

    def wait() -> None:
        while not met(flags & _FORMS, int(word().view(f"<u{size}").flat[0]), value, 8 * size):
            if cancel.wait(_POLL_SECONDS):
                raise Fault(LAUNCH_FAILED, "a stream that waits for a word: cancelled")

    return wait if kind >= WAIT else write
