"""Scenario fixtures: one pool for a module, the digests of undisturbed runs, sample or sweep."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.building import one_at_a_time
from tests.support.pools import table
from tests.support.pools.pool import LocalPool
from tests.support.pools.sweep import SWEEP


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    with LocalPool(tmp_path_factory.mktemp("pool"), nodes=3, lease=8.0) as running:
        yield running


@pytest.fixture
def fresh_pool(tmp_path: Path) -> Iterator[LocalPool]:
    """For tests that break nodes."""
    with LocalPool(tmp_path, nodes=3) as running:
        yield running


@pytest.fixture(scope="session")
def heat_digest(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The digest of an undisturbed run of the heat example, by its arguments: run once, for all test processes."""
    shared = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        shared = shared.parent

    def digest(**arguments: int) -> str:
        name = "-".join(f"{key}{value}" for key, value in sorted(arguments.items())) or "default"
        with one_at_a_time(shared / "digests" / name) as folder:
            known = folder / "digest"
            if not known.exists():
                with LocalPool(tmp_path_factory.mktemp("still"), nodes=1) as pool:
                    known.write_text(pool.heat("still", rest=0, **arguments).finish(300))
            return known.read_text()

    return digest


@pytest.fixture
def undisturbed(heat_digest: Callable[..., str]) -> str:
    """The digest of the small heat run."""
    return heat_digest()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """A failing scenario shows the end of every daemon's and worker's log."""
    outcome = yield
    report = outcome.get_result()
    if report.when == "call" and report.failed:
        for name in ("pool", "fresh_pool"):
            running = getattr(item, "funcargs", {}).get(name)
            if running is not None:
                report.sections.append(("pool logs", running.logs()[-20000:]))


BEGAN = time.time()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A sweep ends with its tables: point, who broke and how, owner afterwards, digest."""
    if SWEEP:
        for path in sorted(table.folder().glob(f"{time.strftime('%Y-%m-%d')}-*.txt")):
            if path.stat().st_mtime >= BEGAN and path.read_text().startswith(table.HEAD[:40]):
                terminalreporter.section(path.name)
                terminalreporter.write_line(path.read_text())
