"""The engine and a driver library for tests, built with the system's compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.building import libraries

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CASES = ROOT / "tests/server/device/cuda/fake_driver"


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++"))


def build(folder: Path, sanitize: str = "") -> dict[str, str]:
    """``libcuda.so.1``, ``libcupti.so.13`` and the engine in ``folder``; returns the environment that finds the driver
    and the engine. A real CUPTI beside this driver could do anything: RGPU_CUPTI is off, unless a case names ours.

    The engine is the one that all tests load, unless it shall be built with a sanitizer.
    """
    flags = [compiler() or "c++", "-std=c++20", "-O1", "-g", "-fPIC", "-shared", "-Wall", "-Wextra",
             "-fvisibility=hidden"]
    if sanitize:
        flags.append(f"-fsanitize={sanitize}")
    whole = folder / "driver.cpp"  # one unit: the headers of the standard library are most of the work
    whole.write_text("".join(f'#include "{part}"\n' for part in sorted(HERE.glob("*.cpp"))))
    jobs = [[*flags, f"-I{HERE}", "-Wl,-soname,libcuda.so.1", str(whole), "-o", str(folder / "libcuda.so.1"),
             "-ldl", "-lpthread"],
            [*flags, "-Wl,-soname,libcupti.so.13", str(HERE / "cupti" / "cupti.cpp"), "-o",
             str(folder / "libcupti.so.13"), "-ldl"]]
    if sanitize:
        beside = Path(sys.executable).with_name("cmake")  # of the virtual environment
        cmake = str(beside) if beside.exists() else "cmake"
        jobs += [[cmake, "-S", str(ROOT), "-B", str(folder / "cmake"), f"-DCMAKE_CXX_FLAGS=-g -fsanitize={sanitize}",
                  f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={folder}"],
                 [cmake, "--build", str(folder / "cmake"), "--target", "rgpu_engine",
                  "rgpu_worker_exchange"]]
    else:
        for library in ("librgpu_engine.so", "librgpu_worker_exchange.so"):
            shutil.copy2(libraries() / library, folder)
    for job in jobs:
        done = subprocess.run(job, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(job)}\n{done.stderr}")
    path = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    return {**os.environ, "LD_LIBRARY_PATH": path, "RGPU_ENGINE_DIR": str(folder), "RGPU_CUPTI": "off",
            "RGPU_ENGINE_RING": str(32 << 20),
            "RGPU_ENGINE_ARENA": str(16 << 20), "PYTHONPATH": str(ROOT)}


def sanitized(report: Path) -> dict[str, str]:
    """The environment in which Python loads what was built with "address,undefined"; findings: ``report``.PID."""
    library = subprocess.run([compiler() or "c++", "-print-file-name=libasan.so"], capture_output=True, text=True,
                             check=True).stdout.strip()
    # Leaks are the interpreter's; the engine maps memory at chosen addresses, where the shadow would be protected.
    return {"LD_PRELOAD": library,
            "ASAN_OPTIONS": f"detect_leaks=0:halt_on_error=0:protect_shadow_gap=0:log_path={report}",
            "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={report}"}
