"""Users with a resident."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agent.resident_user import ResidentUser


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("lib")
    subprocess.run(["cc", "-shared", "-o", directory / "libcuda.so.1", "-x", "c", "/dev/null"], check=True)
    return directory


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory, library: Path) -> Iterator[ResidentUser]:
    """One whose resident listens."""
    with ResidentUser(tmp_path_factory.mktemp("user"), library) as one:
        one.ready()
        yield one


@pytest.fixture
def fresh(tmp_path: Path, library: Path) -> Iterator[ResidentUser]:
    """One who never ran anything."""
    with ResidentUser(tmp_path, library) as one:
        yield one
