"""One side of a workload that takes turns: its process, told when to take a sample, asked what came of it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.support.workload import ROOT, Side, command_of


class PlayerLost(Exception):
    """A side ended, or said nothing for too long."""


class Player:
    """A workload under ``BENCH_TURNS`` (``bench/workloads/common.py``). All methods but :meth:`close` raise
    :class:`PlayerLost`."""

    def __init__(self, name: str, side: Side, file: str, words: Sequence[str], errors: Path, limit: float,
                 settings: dict[str, str] | None = None) -> None:
        """``errors``: where its standard error goes. ``limit``: seconds to wait for a line of it."""
        self.name, self.limit, self._errors = name, limit, errors
        command, base = command_of(side, file, words, f"paired-{errors.stem}"[:60])
        with open(errors, "wb") as said:
            self.process = subprocess.Popen(
                command, env={**base, **(settings or {}), "BENCH_TURNS": "1", "BENCH_QUICK": "1"}, cwd=ROOT,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, start_new_session=True)
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def next_row(self) -> tuple[str, str]:
        """Name and unit of the row that it is ready for; ("", "") when it ended well."""
        found = self._get("turn", end=True)
        return (found["turn"], found["unit"]) if found else ("", "")

    def sample(self) -> float:
        """Let it take one, in the row's unit."""
        self._say("go")
        return float(self._get("sample")["sample"])

    def leave_row(self) -> None:
        """It goes on to its next row."""
        self._say("next")

    def close(self) -> None:
        """End it, whatever it does."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    pass

    def _read(self) -> None:
        assert self.process.stdout is not None
        try:
            for text in self.process.stdout:
                try:
                    found = json.loads(text)
                except ValueError:
                    continue
                if isinstance(found, dict):
                    self._lines.put(found)
        except (OSError, ValueError):
            pass  # closed meanwhile
        self._lines.put(None)

    def _get(self, key: str, end: bool = False) -> dict[str, Any]:
        while True:
            try:
                found = self._lines.get(timeout=self.limit)
            except queue.Empty:
                raise PlayerLost(f"{self.name}: nothing for {self.limit:g} s{self._said()}") from None
            if found is None:
                self._lines.put(None)  # whoever asks again hears it again
                status = self.process.wait()
                if end and status == 0:
                    return {}
                raise PlayerLost(f"{self.name}: ended with {status}{self._said()}")
            if key in found:
                return found

    def _say(self, word: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise PlayerLost(f"{self.name}: {error}{self._said()}") from None

    def _said(self) -> str:
        lines = [text for text in self._errors.read_text(errors="replace").splitlines() if text.strip()]
        return "".join(f"\n    {text}" for text in lines[-4:])
