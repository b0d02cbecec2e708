"""The engine on a driver that needs no GPU: the cases run in a process of their own, where that is libcuda.so.1."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import fake_driver

pytest.importorskip("cuda.bindings.driver")


@pytest.mark.skipif(fake_driver.compiler() is None, reason="needs a C++ compiler")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sanitize", ["", pytest.param("address,undefined", marks=pytest.mark.slow)])
def test_engine_on_a_fake_driver(tmp_path: Path, sanitize: str) -> None:
    environment = fake_driver.build(tmp_path, sanitize)
    if sanitize:
        environment |= fake_driver.sanitized(tmp_path / "report")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--timeout={600 if sanitize else 120}", "-o",
         "python_files=*_cases.py", str(fake_driver.CASES)], cwd=fake_driver.ROOT, env=environment,
        capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 25 and "skipped" not in done.stdout, done.stdout
    assert not (reports := [path.read_text()[:4000] for path in tmp_path.glob("report.*")]), reports
