"""The node's MPS control daemon: its workers then run side by side on a GPU rather than in turns.

Source: NVIDIA, "Multi-Process Service", of the driver (``nvidia-cuda-mps-control``). The control daemon outlives this
one, as workers do; a daemon that starts again finds it by its folder. No setting of a GPU is changed: workers that were
started without it, and other programs, share the GPU with its clients in turns, as before.

Only sessions that can be recovered become clients, and only until a first error: a context's error under MPS may be
another session's (:mod:`rgpu.server.device.hardware`), so it ends the worker, and the next one, outside MPS, replays.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from blake3 import blake3

from rgpu.server.device import mps
from rgpu.session.errors import Refused, RgpuError

log = structlog.get_logger(__name__)

PROGRAM = "nvidia-cuda-mps-control"
SECONDS = 10.0  #: that a command to the control daemon may take
LOOK_SECONDS = 10.0  #: between two looks whether it runs
LONGEST = 90  #: bytes of the folder's path; the names of sockets in it have to fit in 107


@dataclass(frozen=True)
class MpsServer:
    """``directory``: the node's own. ``share``: per cent of a GPU's multiprocessors that one worker may use."""

    directory: Path
    share: int
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    @property
    def pipes(self) -> Path:
        """The folder of the control daemon's entries: in the node's, or in that of temporary files if its sockets fit
        only there."""
        own = self.directory.absolute() / "mps"
        if len(os.fsencode(own)) <= LONGEST:
            return own
        digest = blake3(os.fsencode(own)).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"rgpu-mps-{os.getuid()}-{digest}"

    def environment(self) -> dict[str, str]:
        """Return the variables by which a worker becomes a client."""
        return {**self._place(), mps.SHARE: str(self.share)}

    def start(self) -> None:
        """Start the control daemon if it does not run. Raises :class:`Refused`."""
        if shutil.which(PROGRAM, path=self.environ.get("PATH")) is None:
            raise Refused(f"--mps: {PROGRAM} is not on PATH; it comes with NVIDIA's driver")
        self.pipes.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self.pipes.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise Refused(f"--mps: {self.pipes} is not a folder of this user alone")
        if self.runs():
            log.info("the MPS control daemon runs already", pipes=str(self.pipes))
            return
        done = self._control(["-d"])
        if done.returncode:
            raise Refused(f"--mps: {PROGRAM} -d: {(done.stderr or done.stdout).strip() or f'exit {done.returncode}'}")
        log.info("the MPS control daemon was started", pipes=str(self.pipes), share=self.share)

    async def keep(self) -> None:
        """Start the control daemon again whenever it has ended, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                if not await asyncio.to_thread(self.runs):
                    log.error("the MPS control daemon has ended: its sessions are recovered, and it is started again")
                    await asyncio.to_thread(self.start)
            except (RgpuError, OSError, subprocess.TimeoutExpired) as error:
                log.error("the MPS control daemon does not run", reason=str(error))

    def runs(self) -> bool:
        """Whether the control daemon answers."""
        try:
            return mps.used(self._place()) and not self._control([], "get_server_list\n").returncode
        except subprocess.TimeoutExpired:
            return False

    def terminate(self, pid: int) -> None:
        """Take a client off its server before its process is killed: else all clients get an error. Raises nothing."""
        try:
            for server in self._control([], "get_server_list\n").stdout.split():
                self._control([], f"terminate_client {int(server)} {pid}\n")
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            log.warning("a client of the MPS server is killed without being taken off it", pid=pid, reason=str(error))

    def stop(self) -> None:
        """End the control daemon and its servers; for a node without workers. Raises nothing."""
        try:
            self._control([], "quit\n")
        except (OSError, subprocess.TimeoutExpired) as error:
            log.warning("the MPS control daemon was not ended", reason=str(error))
        if self.pipes.parent != self.directory.absolute():
            shutil.rmtree(self.pipes, ignore_errors=True)

    def _place(self) -> dict[str, str]:
        pipes = str(self.pipes)
        return {mps.PIPES: pipes, mps.LOGS: pipes}

    def _control(self, arguments: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run([PROGRAM, *arguments], input=text, env={**self.environ, **self._place()}, text=True,
                              capture_output=True, timeout=SECONDS, start_new_session=True)
