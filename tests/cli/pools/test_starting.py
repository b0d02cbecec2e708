"""How long `rgpu up` waits for a daemon: as long as its log grows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rgpu.cli import pool
from rgpu.link.keys import PoolFiles
from rgpu.session.errors import PoolUnavailable, TimedOut

#: Logs a line every 0.2 s, six times; then the rest of the arguments is executed.
LOGS = """
import sys, time
for line in range(6):
    print(f"a device is examined {line}", file=open(sys.argv[1], "a"), flush=True)
    time.sleep(0.2)
exec(sys.argv[2])
"""


@pytest.fixture
def files(tmp_path: Path) -> PoolFiles:
    (tmp_path / "nodes" / "a").mkdir(parents=True)
    return PoolFiles(tmp_path)


def daemon(files: PoolFiles, end: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", LOGS, str(files.root / "nodes" / "a" / "server.log"), end])


def test_a_daemon_that_logs_is_waited_for(files: PoolFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "QUIET_SECONDS", 5.0)
    with daemon(files, "sys.exit(3)") as process, pytest.raises(PoolUnavailable, match="(?s)status 3.*examined 5"):
        pool.wait_ready(files, "a", process)


@pytest.mark.parametrize(("quiet", "whole", "said"), [
    (0.9, 60.0, "is not ready, and logged nothing for 1 s: .*examined 5"),
    (60.0, 0.5, "was not ready after 0 s: .*examined"),
])
def test_one_that_is_silent_is_not(files: PoolFiles, monkeypatch: pytest.MonkeyPatch, quiet: float, whole: float,
                                   said: str) -> None:
    monkeypatch.setattr(pool, "QUIET_SECONDS", quiet)
    monkeypatch.setattr(pool, "START_SECONDS", whole)
    process = daemon(files, "time.sleep(60)")
    try:
        with pytest.raises(TimedOut, match=f"(?s){said}"):
            pool.wait_ready(files, "a", process)
    finally:
        process.kill()
        process.wait()
