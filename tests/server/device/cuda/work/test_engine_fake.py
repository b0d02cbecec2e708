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
@pytest.mark.timeout(600)
def test_engine_on_a_fake_driver(tmp_path: Path) -> None:
    environment = fake_driver.build(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=120", "-o",
         "python_files=*_cases.py", str(fake_driver.CASES)], cwd=fake_driver.ROOT, env=environment,
        capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 25 and "skipped" not in done.stdout, done.stdout
