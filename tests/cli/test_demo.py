"""Where `rgpu demo` finds its program: in a wheel, in a checkout, and what it says where it cannot run it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from rgpu.cli.helpers import demo
from rgpu.session.errors import NotFound

ROOT = Path(__file__).resolve().parents[2]


def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *programs: str) -> Path:
    """A copy of the package's folders with an example at each of ``programs``; the module stands in it."""
    for name in programs:
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.touch()
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "rgpu" / "cli" / "helpers" / "demo.py"))
    return tmp_path


def test_checkout() -> None:
    assert demo._example() == ROOT / "examples" / "heat.py"


def test_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's own program, whatever lies beside the package or in the working directory."""
    root = layout(tmp_path, monkeypatch, "rgpu/examples/heat.py", "examples/heat.py", "here/examples/heat.py")
    monkeypatch.chdir(root / "here")
    assert demo._example() == root / "rgpu" / "examples" / "heat.py"


def test_the_command_of_an_installed_package(tmp_path: Path) -> None:
    """What it says before it starts anything, of a package that lies as a wheel installs it.

    Without ``site``: an editable installation's hook would give the checkout's own package first.
    """
    shutil.copytree(ROOT / "rgpu", tmp_path / "site" / "rgpu",
                    ignore=lambda folder, names: {name for name in names if Path(name).suffix not in ("", ".py")
                                                  or name in ("lib", "native", "__pycache__")})
    program = ("import runpy, sys, cuda.pathfinder as p\ndef no(name): raise p.DynamicLibNotFoundError(name)\n"
               "p.load_nvidia_dynamic_lib = no\nsys.argv = ['rgpu', 'demo']\n"
               "runpy.run_module('rgpu.cli.main', run_name='__main__')\n")
    for example, says in ((False, "install the package again"), (True, "pip install 'rgpu-live[examples]'")):
        if example:
            (tmp_path / "site" / "rgpu" / "examples").mkdir()
            (tmp_path / "site" / "rgpu" / "examples" / "heat.py").touch()
        done = subprocess.run([sys.executable, "-S", "-c", program], cwd=tmp_path, capture_output=True,
                              text=True, timeout=60,
                              env={**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}:{sysconfig.get_path('purelib')}"})
        assert done.returncode == NotFound.exit_code and done.stdout == "", done
        assert len(done.stderr.splitlines()) == 1 and says in done.stderr and "checkout" not in done.stderr, done


def test_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = layout(tmp_path, monkeypatch)
    with pytest.raises(NotFound, match=f"neither in {root}/rgpu nor beside it"):
        demo._example()


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain install has no CUDA bindings; the message names the extra that brings them."""
    monkeypatch.setattr(demo, "_installed", lambda name: name != "cuda.core")
    with pytest.raises(NotFound, match=r"needs cuda\.core: pip install 'rgpu-live\[examples\]'"):
        demo._example()


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    """By the process, before it starts anything."""
    (tmp_path / "sitecustomize.py").write_text(
        "import cuda.pathfinder as p\ndef no(name): raise p.DynamicLibNotFoundError(name)\n"
        "p.load_nvidia_dynamic_lib = no\n")
    done = subprocess.run([sys.executable, "-m", "rgpu.cli.main", "demo"], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}, timeout=60)
    assert done.returncode == NotFound.exit_code and done.stdout == ""
    assert done.stderr == ("rgpu: the demonstration's program needs NVRTC (nvidia-cuda-nvrtc): "
                           "pip install 'rgpu-live[examples]'\n")


def test_installed() -> None:
    assert demo._installed("rgpu.cli") and not demo._installed("rgpu.no_such") and not demo._installed("no.such")
