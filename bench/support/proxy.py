"""The delaying proxy: built from ``delay_proxy.cpp``, started, and measured by what it really adds."""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
import threading
import time
from pathlib import Path

SOURCE = Path(__file__).with_name("delay_proxy.cpp")


def build(folder: Path) -> Path:
    """Compile the proxy into ``folder``. Raises ``RuntimeError`` with the compiler's words."""
    binary = folder / "delay_proxy"
    if not binary.exists() or binary.stat().st_mtime < SOURCE.stat().st_mtime:
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or "c++"
        done = subprocess.run([compiler, "-O2", "-std=c++20", "-pthread", "-o", str(binary), str(SOURCE)],
                              capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the proxy does not compile: {done.stderr[:800]}")
    return binary


class DelayProxy:
    """Relays 127.0.0.1:``port`` to ``target`` and adds ``round_trip`` seconds, half of it each way."""

    def __init__(self, binary: Path, target: int, round_trip: float) -> None:
        self.round_trip = round_trip
        self._process = subprocess.Popen([str(binary), str(target), str(round_trip / 2 * 1e6)],
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline().split()[1])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()


class Echo:
    """A server that sends back what it gets, or swallows it: what a link is measured with."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer = bytearray(1 << 20)
        with connection:
            swallow = connection.recv(1) == b"s"
            while n := connection.recv_into(buffer):
                if not swallow:
                    connection.sendall(buffer[:n])
            if swallow:
                connection.sendall(b"e")

    def close(self) -> None:
        self._listener.close()


def measure(port: int, turns: int = 60, megabytes: int = 256) -> tuple[float, float]:
    """Median round trip in seconds, and bytes per second to an :class:`Echo` behind ``port``."""
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.sendall(b"e")
        trips = []
        for _ in range(turns):
            began = time.perf_counter()
            link.sendall(b"x" * 64)
            got = 0
            while got < 64:
                got += len(link.recv(64))
            trips.append(time.perf_counter() - began)
    block = bytes(1 << 20)
    with socket.create_connection(("127.0.0.1", port)) as link:
        began = time.perf_counter()
        link.sendall(b"s")
        for _ in range(megabytes):
            link.sendall(block)
        link.shutdown(socket.SHUT_WR)
        link.recv(1)
        rate = (megabytes << 20) / (time.perf_counter() - began)
    return statistics.median(trips), rate
