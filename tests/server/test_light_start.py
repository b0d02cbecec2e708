"""What a process that somebody waits for does not import when it starts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOADS = "import sys, {}; print(*(name for name in ('rich', 'pygments', 'llvmlite') if name in sys.modules))"
#: What a plain `rgpu run` does without until its program uses CUDA, or something goes wrong.
LATER = ("asyncio", "blake3.aio", "click", "cryptography", "difflib", "numpy", "pandas", "rich", "ssl", "structlog",
         "tomllib", "rgpu.cli.common", "rgpu.cli.sessions.run", "rgpu.client.data_link", "rgpu.client.detached.standby",
         "rgpu.client.journal", "rgpu.client.run.gang", "rgpu.client.session.attachment", "rgpu.client.session.shipper",
         "rgpu.client.shim_link.local", "rgpu.link.control.control_server", "rgpu.link.messages.shim", "rgpu.migrate",
         "rgpu.server", "rgpu.session.calls", "rgpu.session.objects")


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


def test_a_plain_run_imports_what_places_a_session_and_no_more() -> None:
    """Each line of it is a part of the time that somebody waits for every `rgpu run`."""
    code = "import sys; there = set(sys.modules); sys.argv = ['rgpu', 'run', '-q', '--', 'true']\n" \
           "from rgpu.client.run import launcher\n" \
           "launcher.run = lambda *words, **more: 0\n" \
           "import os; os._exit = lambda code: sys.exit(print(*sorted(set(sys.modules) - there)))\n" \
           "import rgpu.api.reaching; rgpu.api.reaching.require_pool = lambda files: None\n" \
           "from rgpu.cli.main import main; main()"
    loaded = told(code).split()
    assert "rgpu.cli.sessions.starting" in loaded
    assert [name for name in loaded if name in LATER or name.startswith(tuple(f"{one}." for one in LATER))] == []
    assert len([name for name in loaded if name.startswith("rgpu")]) < 70


def test_the_client_and_the_links_log_through_loggers_that_import_nothing() -> None:
    found = [str(path.relative_to(ROOT)) for room in ("client", "link", "api") for path in
             (ROOT / "rgpu" / room).rglob("*.py") if re.search(r"^(import|from) structlog", path.read_text(), re.M)]
    assert found == [] or found == ["rgpu/link/logging.py"], "use rgpu.link.loggers.get_logger"


def test_rich_is_there_for_those_who_want_it() -> None:
    code = "import rgpu.link.logging, structlog.dev, rich.table; assert structlog.dev.rich is None; print('ok')"
    assert told(code) == "ok\n"


def test_rich_is_there_meanwhile_for_another_thread_that_tells_of_an_error() -> None:
    """What a session needs is read in beside `rgpu run` itself, which may have to tell why it got none."""
    code = "import builtins, threading\n" \
           "told, plain = [], builtins.__import__\n" \
           "def load(name, *args):\n" \
           "    if name == 'rich' and not told:\n" \
           "        other = threading.Thread(target=lambda: told.append(plain('rich.cells')))\n" \
           "        other.start(); other.join()\n" \
           "    return plain(name, *args)\n" \
           "builtins.__import__ = load\n" \
           "import rgpu.link.logging\n" \
           "print(*(module.__name__ for module in told))"
    assert told(code) == "rich\n"
