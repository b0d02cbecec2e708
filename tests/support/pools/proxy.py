"""A relay in front of a node's data port that can lose, hold, delay, cut and flip what passes."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import deque
from pathlib import Path

MOST = 300  #: ports of one process at a time; those drawn longest ago are given up first
_drawn: deque[socket.socket] = deque()


def free_port(host: str = "127.0.0.1") -> int:
    """A port for a server that is started later: none that the system would give to somebody else meanwhile.

    It stays this process's, beside other runs of tests, by an abstract socket of that number.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(10_000, max(lowest, 10_001))
        mine = socket.socket(socket.AF_UNIX)
        try:
            mine.bind(f"\0rgpu-test-port-{port}")
            with socket.create_server((host, port)):
                _drawn.append(mine)
                if len(_drawn) > MOST:
                    _drawn.popleft().close()
                return port
        except OSError:  # a server of ours may not listen there yet, or another one does
            mine.close()


class Proxy:
    """Listens on a port of its own and relays to ``target``; set ``mode`` while it runs.

    ``pass``, ``drop`` (every connection ends, new ones too), ``stall`` (nothing passes),
    ``delay`` (each piece ``late`` seconds late), ``cut`` (half a piece passes, then the connection ends; once),
    ``flip`` (one bit of one piece changes; once), ``duplicate`` (one piece passes twice; once), ``longer in``,
    ``longer out`` (a sealed frame to, or from, the target says that it is 1 MiB longer; once), ``slow in``, ``slow
    out`` (all connections together carry ``rate`` bytes a second to, or from, the target).
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.mode = "pass"
        self.late = 0.02
        self.rate = 300_000.0
        self._turn = threading.Lock()  #: whose piece passes
        self.hit = threading.Event()
        self.joined = threading.Event()  #: somebody has connected
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def set(self, mode: str) -> None:
        self.mode = mode
        if mode == "drop":
            self.hit.set()
            self._close_all()

    def close(self) -> None:
        self.mode = "drop"
        self._listener.close()
        self._close_all()

    def _close_all(self) -> None:
        with self._lock:
            open_now, self._open = self._open, []
        for sock in open_now:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self.mode == "drop":
                near.close()
                continue
            try:
                far = socket.create_connection(self.target, 5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            with self._lock:
                self._open += [near, far]
            self.joined.set()
            for source, sink, way in ((near, far, "in"), (far, near, "out")):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._relay, args=(source, sink, way), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        try:
            while data := source.recv(65536):
                while self.mode == "stall":
                    self.hit.set()
                    time.sleep(0.02)
                if self.mode == "delay":
                    self.hit.set()
                    time.sleep(self.late)
                elif self.mode == f"slow {way}":
                    self.hit.set()
                    with self._turn:
                        time.sleep(len(data) / self.rate)
                elif self.mode in ("cut", "flip", "duplicate") and len(data) > 64:
                    mode, self.mode = self.mode, "pass"
                    self.hit.set()
                    if mode == "cut":
                        sink.sendall(data[:len(data) // 2])
                        return
                    if mode == "duplicate":
                        sink.sendall(data)
                    else:
                        changed = bytearray(data)
                        changed[len(data) // 2] ^= 4
                        data = bytes(changed)
                elif self.mode == f"longer {way}" and 4 + int.from_bytes(data[:4], "little") == len(data):
                    self.mode = "pass"
                    self.hit.set()
                    data = data[:2] + bytes([data[2] ^ 1 << 4]) + data[3:]
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for sock in (source, sink):
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
