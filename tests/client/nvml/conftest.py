"""Where the NVML library comes from, and an agent that answers as the test says."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rgpu.link.messages.shim import OBSERVE, OBSERVED, REFUSED
from rgpu.session.facts import DeviceInfo, SessionFacts
from rgpu.session.observed import Observation, Process
from tests.support.building import libraries

ROOT = Path(__file__).resolve().parents[3]
GIB = 1 << 30


@pytest.fixture(scope="session")
def library() -> Path:
    """``libnvidia-ml.so.1`` in $RGPU_SHIM_DIR, else built from the sources as they are."""
    return libraries() / "libnvidia-ml.so.1"


def observation(devices: int = 1, used: int = 3 << 20, live: bool = True, release: str = "580.65.06") -> Observation:
    """A session with a quota of 1 GiB on each of some H200s."""
    attributes = {75: 9, 76: 0, 16: 132, 37: 6144, 20: 0}
    known = tuple(DeviceInfo("NVIDIA H200", bytes(range(16 * i, 16 * i + 16)), 140 * GIB, (0, 0x1b + i, 0),
                             attributes=attributes) for i in range(devices))
    processes = tuple(Process(os.getpid(), i, used) for i in range(devices)) if live else ()
    return Observation(SessionFacts("s", 1, 13000, GIB, 1 << 20, True, known), live, release,
                       (used if live else 0,) * devices, processes)


class Answering:
    """An agent that answers OBSERVE with ``reply``: an observation, raw bytes, a refusal's CUresult; or one of each
    of a list after the other."""

    def __init__(self, folder: Path, reply: Observation | bytes | int | list[bytes]) -> None:
        self.path, self.reply = str(folder / "agent.sock"), reply
        self.asked = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(8)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock:
                question = sock.recv(12)
                assert question == struct.pack("<III", 4, OBSERVE, 1), question
                self.asked += 1
                sock.sendall(self._message())

    def _message(self) -> bytes:
        reply = self.reply.pop(0) if isinstance(self.reply, list) else self.reply
        if isinstance(reply, int):
            body = struct.pack("<iH", reply, 2) + b"no"
            return struct.pack("<II", len(body), REFUSED) + body
        body = reply.encode() if isinstance(reply, Observation) else reply
        return struct.pack("<II", len(body), OBSERVED) + body

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closed already
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Answering]:
    answering = Answering(tmp_path, observation())
    yield answering
    answering.close()


def run(library: Path, agent: Answering | None, code: str) -> str:
    """The output of a Python program that has pynvml as ``n`` and the library's folder on its path."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is in the test extra")
    env = {**os.environ, "LD_LIBRARY_PATH": str(library.parent)}
    env.pop("RGPU_AGENT", None)
    if agent is not None:
        env["RGPU_AGENT"] = agent.path
    done = subprocess.run([sys.executable, "-c", "import os, sys, pynvml as n\n" + code], env=env, capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
