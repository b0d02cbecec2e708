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

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "tests"
SHIM, NVML, ENGINE = ROOT / "rgpu/client/shim", ROOT / "rgpu/client/nvml", ROOT / "rgpu/server/device/cuda/native"
NCCL, CUPTI, ROUTER = ROOT / "rgpu/client/nccl", ROOT / "rgpu/client/cupti", ROOT / "rgpu/client/router"
EXCHANGE = ROOT / "rgpu/link/native", ROOT / "rgpu/client/exchange", ROOT / "rgpu/server/worker/exchange"
MESSAGES = ROOT / "rgpu/link/messages/native"
#: What an editable install (`make setup`) builds, where the package looks for it.
INSTALLED = (ROOT / "rgpu/client/lib/libcuda.so.1", ROOT / "rgpu/client/lib/libnvidia-ml.so.1",
             ROOT / "rgpu/client/lib/libcupti.so.12", ROOT / "rgpu/client/lib/libcupti.so.13",
             ROOT / "rgpu/client/lib/nccl/libnccl.so.2", ROOT / "rgpu/client/lib/router/libcuda.so.1",
             ROOT / "rgpu/client/lib/exchange/librgpu_exchange.so",
             ROOT / "rgpu/server/device/cuda/lib/librgpu_engine.so",
             ROOT / "rgpu/server/device/cuda/lib/librgpu_worker_exchange.so")


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[Path]:
    """Makes ``folder``, and holds a lock on it against the other test processes."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def as_installed() -> Path | None:
    """A folder with the installed libraries, if they are of the sources as they are: compiling takes a minute."""
    folders = (SHIM, NVML, NCCL, CUPTI, ROUTER, ENGINE, MESSAGES, *EXCHANGE)
    sources = [ROOT / "CMakeLists.txt", *(path for folder in folders for path in folder.rglob("*.?[pa]p"))]
    newest = max(path.stat().st_mtime for path in sources)
    if not all(path.exists() and path.stat().st_mtime > newest for path in INSTALLED):
        return None
    folder = ROOT / "build" / "installed"
    with one_at_a_time(folder):
        for path in INSTALLED:
            beside = path.parent.name if path.parent.name in ("nccl", "router", "exchange") else "."
            copy = folder / beside / path.name
            copy.parent.mkdir(exist_ok=True)
            if not copy.exists() or copy.stat().st_mtime != path.stat().st_mtime:
                shutil.copy2(path, folder / "part")
                (folder / "part").rename(copy)  # whole or not there: others load it
        link = folder / "libcuda.so"
        if not link.is_symlink():
            link.symlink_to("libcuda.so.1")
    return folder


def libraries() -> Path:
    """The folder with the libraries: $RGPU_SHIM_DIR (say, built with a sanitizer), else those that are installed
    if they are of these sources, else ``build/tests``.

    Fails the test when they do not build. Test processes side by side take turns: a library that
    one of them links anew is half written for the others.
    """
    given = os.environ.get("RGPU_SHIM_DIR")
    if given:
        return Path(given).resolve()
    if installed := as_installed():
        return installed
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
