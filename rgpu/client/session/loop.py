"""What a session's thread waits for: files, with what each is watched for, and functions that others want called."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class Loop:
    """Event loop; its methods are of one thread, but for :meth:`post`."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._masks: dict[int, int] = {}
        self._inbox: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        #: Taking it is an atomic read-modify-write, which keeps the processor from swapping what is around it.
        self.fence = threading.Lock()
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  #: ready when something was posted
        self.poll = self._poll.poll  #: (seconds) → [(file, mask)] that are ready
        self.watch(self.wake, select.EPOLLIN)

    def watch(self, fd: int, mask: int) -> None:
        """Watch the file for these events from here on; a number below 0 is no file."""
        if fd >= 0 and self._masks.get(fd) != mask:
            if fd in self._masks:
                self._poll.modify(fd, mask)
            else:
                self._poll.register(fd, mask)
            self._masks[fd] = mask

    def forget(self, fd: int) -> None:
        """The file is about to be closed, which takes it out of the kernel's list."""
        self._masks.pop(fd, None)

    def post(self, function: Callable[..., None], *args: Any) -> None:
        """Have ``function`` called by the loop; from any thread."""
        with self.fence:
            self._inbox.append((function, args))
            if self.wake >= 0:  # else the loop is over, and the number may be another file's by now
                os.eventfd_write(self.wake, 1)

    def take_posted(self) -> None:
        """Call what was posted."""
        os.eventfd_read(self.wake)
        while self._inbox:
            function, args = self._inbox.popleft()
            function(*args)

    def close(self) -> None:
        """Close the loop's files; posting to it has no effect from here on."""
        self._poll.close()
        with self.fence:
            os.close(self.wake)
            self.wake = -1
