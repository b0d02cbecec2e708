"""The package as it is installed: import rules, generated files, the wheel and the library in it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from rgpu.client.run import launcher
from tests.support.building import one_at_a_time

ROOT = Path(__file__).resolve().parents[1]


def test_import_rules() -> None:
    """Imports point one way (pyproject.toml, [tool.importlinter])."""
    done = subprocess.run([Path(sys.executable).parent / "lint-imports", "--no-cache"], cwd=ROOT, capture_output=True,
                          text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr


def test_generated_files_are_current() -> None:
    done = subprocess.run([sys.executable, "-m", "rgpu.session.calls.generate", "--check"], cwd=ROOT,
                          capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr


def test_commits_are_checked_as_make_lint_does() -> None:
    recipe = re.search(r"^lint: setup\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    hooks = re.findall(r"^ +entry: (.+)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE)
    assert recipe and hooks == [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()]


def test_license_is_named() -> None:
    """The whole text as a file, and its SPDX identifier in the metadata (PEP 639)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0" and project["license-files"] == ["LICENSE"]
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built where `make setup` built it: only what has changed since is compiled."""
    folder = tmp_path_factory.mktemp("wheel")
    with one_at_a_time(ROOT / "build" / "wheel"):
        done = subprocess.run(
            [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir",
             str(folder), str(ROOT)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = folder.glob("*.whl")
    return found


def test_wheel(wheel: Path, tmp_path: Path) -> None:
    """One wheel for every Python 3; the driver library under its SONAME, hidden but for the driver's names."""
    assert wheel.name.startswith("rgpu_live-") and wheel.name.endswith("-py3-none-linux_x86_64.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert {"rgpu/client/lib/libcuda.so.1", "rgpu/client/lib/libcuda.so", "rgpu/client/lib/libnvidia-ml.so.1",
                "rgpu/client/lib/link/libcuda.so", "rgpu/client/lib/libcupti.so.12", "rgpu/client/lib/libcupti.so.13",
                "rgpu/cli/main.py", "rgpu/py.typed", "rgpu/examples/heat.py",
                "rgpu/server/device/cuda/lib/librgpu_engine.so"} <= set(names)
        assert [n for n in names if n.endswith(".dist-info/licenses/LICENSE")]
        assert not [n for n in names if n.split("/")[0] not in ("rgpu",) and ".dist-info" not in n]
        archive.extractall(tmp_path)
    library = tmp_path / "rgpu" / "client" / "lib" / "libcuda.so.1"
    dynamic = subprocess.run(["readelf", "-dW", library], capture_output=True, text=True, check=True).stdout
    assert "Library soname: [libcuda.so.1]" in dynamic
    needed = set(re.findall(r"Shared library: \[([^\]]+)\]", dynamic))
    assert needed <= {"libc.so.6", "libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libdl.so.2", "libpthread.so.0",
                      "ld-linux-x86-64.so.2"}, needed
    symbols = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    exported = {line.split()[-1].split("@")[0] for line in symbols.splitlines()}
    assert not [name for name in exported if not name.startswith("cu")], sorted(exported)[:20]
    wanted = {line.strip() for line in (ROOT / "rgpu/session/calls/symbols.txt").read_text().splitlines()
              if line.strip() and not line.startswith("#")}
    assert wanted <= exported, sorted(wanted - exported)[:20]


def test_libcuda_so_is_the_same_driver(wheel: Path, tmp_path: Path) -> None:
    """Opened by both names, one library is loaded: a second copy would be a second driver."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = ("import ctypes; a = ctypes.CDLL('libcuda.so.1'); b = ctypes.CDLL('libcuda.so');"
            "print(ctypes.cast(a.cuInit, ctypes.c_void_p).value == ctypes.cast(b.cuInit, ctypes.c_void_p).value)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path / "rgpu/client/lib")})
    assert done.stdout.strip() == "True", done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_programs_are_linked_with_lcuda(wheel: Path, tmp_path: Path) -> None:
    """By what LIBRARY_PATH is under `rgpu run`; what comes out needs the driver by its own name."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    source, program = tmp_path / "p.c", tmp_path / "p"
    source.write_text("int cuInit(unsigned); int main(void) { return cuInit(7) == 1 ? 0 : 1; }")
    library = tmp_path / "rgpu" / "client" / "lib"
    environment = launcher.environment({"PATH": os.environ["PATH"]}, library, tmp_path / "agent")
    done = subprocess.run(["cc", source, "-o", program, "-lcuda"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    dynamic = subprocess.run(["readelf", "-dW", program], capture_output=True, text=True, check=True).stdout
    assert "Shared library: [libcuda.so.1]" in dynamic and "[libcuda.so]" not in dynamic
    assert subprocess.run([program], env=environment).returncode == 0, "the shim's cuInit takes no flags"
