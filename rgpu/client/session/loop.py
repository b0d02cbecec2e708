"""Event loop of a session's thread: descriptors with the events watched for, and functions posted by other threads."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class Loop:
    """Event loop; all of its methods but :meth:`post` are for one thread."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._masks: dict[int, int] = {}
        self._inbox: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        #: Taking it is an atomic read-modify-write, which keeps the processor from reordering the accesses around it.
        self.fence = threading.Lock()
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  #: ready when something was posted
        self.poll = self._poll.poll  #: (seconds) → [(file, mask)] that are ready
        self.watch(self.wake, select.EPOLLIN)

    def fileno(self) -> int:
        """Descriptor of the list of watched descriptors (epoll)."""
        return self._poll.fileno()

    def watch(self, fd: int, mask: int) -> None:
        """Watch a descriptor for the events of ``mask`` (epoll) from now on; a negative one is ignored."""
        if fd >= 0 and self._masks.get(fd) != mask:
            if fd in self._masks:
                self._poll.modify(fd, mask)
            else:
                self._poll.register(fd, mask)
            self._masks[fd] = mask

    def forget(self, fd: int) -> None:
        """Forget a descriptor that is about to be closed, which removes it from the kernel's list."""
        self._masks.pop(fd, None)

    def post(self, function: Callable[..., None], *args: Any) -> None:
        """Have ``function`` called by the loop; from any thread."""
        with self.fence:
            self._inbox.append((function, args))
            if self.wake >= 0:  # else the loop is closed, and the number may be another file's by now
                os.eventfd_write(self.wake, 1)

    def take_posted(self) -> None:
        """Call the posted functions."""
        os.eventfd_read(self.wake)
        while self._inbox:
            function, args = self._inbox.popleft()
            function(*args)

    def close(self) -> None:
        """Close the loop's files; posting to it has no effect from now on."""
        self._poll.close()
        with self.fence:
            os.close(self.wake)
            self.wake = -1
