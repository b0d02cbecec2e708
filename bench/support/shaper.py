"""A relay that shapes: a token bucket in each direction lets so many bytes a second pass. For benchmarks of moves.

What it adds in delay is one hop of this machine; a link of 10 Gb/s is the rate, not the distance.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

PIECE = 256 * 1024


class TokenBucket:
    """``rate`` bytes a second, ``burst`` bytes at once at most. Thread-safe: connections share it as they share a link.

    Pure but for ``clock`` and ``sleep``.
    """

    def __init__(self, rate: float, burst: float = 1 << 20, clock: Callable[[], float] = time.monotonic,
                 sleep: Callable[[float], None] = time.sleep) -> None:
        self.rate, self.burst = rate, burst
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._level, self._at = burst, clock()

    def take(self, count: int) -> None:
        """Wait until ``count`` bytes may pass. More than it holds is debt, which the next one waits for."""
        with self._lock:
            now = self._clock()
            self._level = min(self.burst, self._level + (now - self._at) * self.rate) - count
            self._at = now
            wait = -self._level / self.rate
        if wait > 0:
            self._sleep(wait)


class Shaper:
    """Listens on 127.0.0.1 and relays to ``target`` at ``gigabits`` Gb/s each way, all connections together."""

    def __init__(self, target: tuple[str, int], gigabits: float) -> None:
        self.target = target
        self.passed = 0
        self._buckets = TokenBucket(gigabits * 1e9 / 8), TokenBucket(gigabits * 1e9 / 8)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self.target, 5)
            except OSError:
                return
            for source, sink, bucket in ((near, far, self._buckets[0]), (far, near, self._buckets[1])):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._relay, args=(source, sink, bucket), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket, bucket: TokenBucket) -> None:
        buffer = memoryview(bytearray(PIECE))
        try:
            while count := source.recv_into(buffer):
                bucket.take(count)
                sink.sendall(buffer[:count])
                self.passed += count
        except OSError:
            pass
        finally:
            for sock in (source, sink):
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
