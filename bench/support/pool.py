"""The pool of a benchmark: one node reached directly, and one behind a delaying proxy for each added round trip."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.support.proxy import DelayProxy, Echo, build, measure
from tests.support.pools.pool import ROOT, LocalPool, VerbError
from tests.support.pools.proxy import free_port

DIRECT = "direct"
UNBOXED = "unboxed"  #: the node whose workers have no box


def host_of(round_trip_ms: float) -> str:
    """The node's name for an added round trip; ``0`` is the direct one."""
    return f"rtt-{round_trip_ms:g}ms".replace(".", "-") if round_trip_ms else DIRECT


class BenchPool(LocalPool):
    """All nodes share one device; only one is used at a time."""

    def __init__(self, folder: Path, device: str, round_trips_ms: Sequence[float] = (), unboxed: bool = False) -> None:
        """``unboxed``: a further node, whose workers have no box."""
        super().__init__(folder, 1 + len(round_trips_ms) + unboxed, 10.0, device)
        self._unboxed = unboxed
        self.environment["RGPU_RESIDENT"] = "off"  # `rgpu run` is its own agent, which is looked at by its number
        self._round_trips = list(round_trips_ms)
        self._proxies: list[DelayProxy] = []
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.measured: list[dict[str, Any]] = []  #: what each proxy really adds

    def __enter__(self) -> BenchPool:
        self.rgpu("keys", "init")
        self._start(DIRECT)
        if self._unboxed:
            self._start(UNBOXED, "--box", "off")
        try:
            binary = build(self.folder) if self._round_trips else None
            for milliseconds in self._round_trips:
                assert binary is not None
                self._measure(binary, milliseconds)
                port = free_port()
                proxy = DelayProxy(binary, port, milliseconds / 1000)
                self._proxies.append(proxy)
                self._start(host_of(milliseconds), "--data-port", str(port), "--advertise-data",
                            f"127.0.0.1:{proxy.port}")
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _measure(self, binary: Path, milliseconds: float) -> None:
        """The same proxy in front of an echo: its round trip less that of the bare loopback, and its rate."""
        echo = Echo()
        proxy = DelayProxy(binary, echo.port, milliseconds / 1000)
        (bare, bare_rate), (trip, rate) = measure(echo.port), measure(proxy.port)
        self.measured.append({"asked_ms": milliseconds, "added_ms": (trip - bare) * 1e3, "gb_per_s": rate / 1e9,
                              "bare_gb_per_s": bare_rate / 1e9})
        proxy.close()
        echo.close()

    def _start(self, host: str, *options: str) -> None:
        with open(self.folder / f"{host}.log", "ab") as log:
            self._daemons.append(subprocess.Popen(
                [sys.executable, "-m", "rgpu.cli.main", "server", "--host", host, "--device", self.device,
                 "--lease", str(self.lease), *options],
                env=self.environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log))

    def _wait(self, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                if len(self.living()) == self.nodes:
                    return
            except VerbError:
                pass
            assert time.monotonic() < deadline, f"the nodes do not come up\n{self.logs()}"
            time.sleep(0.2)

    def __exit__(self, *error: object) -> None:
        try:
            super().__exit__(*error)
        finally:
            for proxy in self._proxies:
                proxy.close()
            for daemon in self._daemons:
                daemon.kill()
                daemon.wait()
