"""Scenario fixtures: one pool for a module, the digests of undisturbed runs, sample or sweep."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scenarios import table
from tests.scenarios.pool import LocalPool

#: `make sweep` sets it: everything; otherwise a seeded sample.
SWEEP = bool(os.environ.get("RGPU_SWEEP"))


def sample(points: list, count: int, seed: int = 1) -> list:
    """All points in a sweep, a fixed choice of ``count`` of them otherwise."""
    if SWEEP or count >= len(points):
        return points
    return sorted(random.Random(seed).sample(points, count), key=points.index)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    with LocalPool(tmp_path_factory.mktemp("pool"), nodes=3) as running:
        yield running


@pytest.fixture
def fresh_pool(tmp_path: Path) -> Iterator[LocalPool]:
    """For tests that break nodes."""
    with LocalPool(tmp_path, nodes=3) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(pool: LocalPool) -> str:
    """The digest of the small heat run."""
    return pool.heat("undisturbed").finish()


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
