"""What a process that somebody waits for does not import when it starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOADS = "import sys, {}; print(*(name for name in ('rich', 'pygments', 'llvmlite') if name in sys.modules))"


def told(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", ["rgpu.server.worker.main", "rgpu.server.node.daemon", "rgpu.client.run.agent"])
def test_nothing_for_terminals_and_no_compiler(module: str) -> None:
    assert told(LOADS.format(module)).split() == []


def test_a_run_starts_without_arrays_and_consoles() -> None:
    code = "import sys, rgpu.cli.main, rgpu.cli.sessions.run, rgpu.client.run.launcher; " \
           "print(*(name for name in ('numpy', 'rich.console', 'pandas') if name in sys.modules))"
    assert told(code).split() == []


def test_rich_is_there_for_those_who_want_it() -> None:
    code = "import rgpu.link.logging, structlog.dev, rich.table; assert structlog.dev.rich is None; print('ok')"
    assert told(code) == "ok\n"
