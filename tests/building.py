"""Builds the C++ libraries from the sources as they are, once for all tests that load them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "tests"


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Makes ``folder``, and holds a lock on it against the other test processes."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def libraries() -> Path:
    """The folder with the libraries: $RGPU_SHIM_DIR (say, built with a sanitizer), else ``build/tests``.

    Fails the test when they do not build. Test processes side by side take turns: a library that
    one of them links anew is half written for the others.
    """
    given = os.environ.get("RGPU_SHIM_DIR")
    if given:
        return Path(given).resolve()
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    cmake, ninja = shutil.which("cmake", path=tools), shutil.which("ninja", path=tools)
    if cmake is None or ninja is None:
        pytest.fail("cmake and ninja are needed to build the libraries: pip install cmake ninja")
    with one_at_a_time(BUILD):
        for command in ([cmake, "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=RelWithDebInfo"],
                        [ninja, "-C", str(BUILD)]):
            done = subprocess.run(command, env={**os.environ, "PATH": tools}, capture_output=True, text=True)
            if done.returncode:
                pytest.fail(f"{' '.join(command)}:\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}")
    return BUILD


if __name__ == "__main__":  # `make test`, before the first test's clock runs
    print(f"libraries for the tests: {libraries()}")
