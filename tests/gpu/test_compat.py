"""The compatibility suite as tests: one for each row (`make test-gpu`; `make compat` also writes the page)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import gpu_count
from tests.gpu.compat import Suite
from tests.gpu.suite.execute import Executor, Pool
from tests.gpu.suite.rows import ROWS, Row
from tests.support.pools.pool import LocalPool

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    folder = tmp_path_factory.mktemp("compat")
    with LocalPool(tmp_path_factory.mktemp("pool"), nodes=1, lease=5.0, device="cuda:0") as local:
        yield Suite(Executor(Path(folder)), Pool(local.environment), gpus=gpu_count())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row(suite: Suite, row: Row) -> None:
    result = suite.row(row)
    if result.result in ("skipped", "native", "undetermined", "not run"):
        pytest.skip(f"{result.result}: {result.text}")
    assert result.result in ("same", "refused"), f"{result.text}\nlogs: {suite.executor.folder}"
