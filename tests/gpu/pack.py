#!/usr/bin/env python3
"""Packs what rgpu and its tests need on a GPU machine that reaches no package index and has no compiler.

    python tests/gpu/pack.py DIR [--python 3.12] [--tests] [--without PACKAGE]…

Writes DIR/site.tar.xz (the dependencies, for that Python on Linux x86-64; with --tests pytest and what the tests on the
cpu device import, too), DIR/libs.tar.xz (the libraries that `make setup` and `python -m tests.support.building` have
built here) and DIR/enter.sh. There, in a copy of the repository: ``. DIR/enter.sh`` unpacks them once into
$RGPU_UNPACKED (/tmp/rgpu-unpacked), copies the tree beside them, and goes there with PATH and PYTHONPATH set.
PyTorch and CUDA's own packages are that machine's; --without: others that it has.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
#: Of manylinux wheels, the newest first: pip takes a wheel of any of them.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 26, 24, 17, 12, 5)] + \
    [f"manylinux{year}_x86_64" for year in ("2014", "2010", "1")]
#: Pure Python without a wheel, taken from this environment.
HERE = ("etcd3",)
#: What the machine with the GPU has anyway, or what no test there needs.
LEFT_OUT = ("cuda-core", "cuda-bindings", "numba-cuda", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "playwright",
            "ruff", "mypy", "vulture", "import-linter", "scikit-build-core", "cmake", "ninja", "gpustat", "mpmath")
#: Dependencies of dependencies: pip resolves none for another Python.
FURTHER = ("platformdirs", "cffi", "pycparser", "mdit-py-plugins", "markdown-it-py", "mdurl", "pygments",
           "linkify-it-py", "uc-micro-py", "tenacity", "six", "typing-extensions")
FURTHER_TESTS = ("iniconfig", "packaging", "pluggy", "execnet", "sortedcontainers", "anyio", "idna", "certifi",
                 "httpcore", "h11", "markupsafe", "attrs", "sniffio")
LIBRARIES = ("rgpu/client/lib", "rgpu/server/device/cuda/lib", "build/installed")
PROGRAMS = ("etcd", "etcdctl")

ENTER = """# Sourced in a copy of the repository: unpacks what is beside this file, and goes into a copy of the tree.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
to=${RGPU_UNPACKED:-/tmp/rgpu-unpacked}
if [ ! -e "$to/ready" ]; then
  mkdir -p "$to/tree" "$to/bin"
  tar xJf "$here/site.tar.xz" -C "$to" &
  tar c --exclude=./.git --exclude="./${here##*/}" . | tar x -C "$to/tree"
  tar xJf "$here/libs.tar.xz" -C "$to/tree"
  find "$to/tree" -name '*.so*' -exec touch {} +  # newer than the sources, so that no test compiles them
  printf '#!/bin/sh\\nexec python3 -m rgpu.cli.main "$@"\\n' > "$to/bin/rgpu"
  chmod 755 "$to/bin/rgpu"
  wait
  touch "$to/ready"
fi
unset CUDA_VISIBLE_DEVICES PYTHONDONTWRITEBYTECODE
export PATH="$to/bin:$to/site/bin:$PATH" PYTHONPATH="$to/tree:$to/site" PYTHONUNBUFFERED=1
cd "$to/tree" || return 1
"""


def requirements(tests: bool, without: Sequence[str] = ()) -> list[str]:
    """Return what is packed, as pyproject.toml has it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extra["cuda"], *extra["web"], *FURTHER]
    if tests:
        wanted += [*extra["test"], *FURTHER_TESTS]
    own = [name for name in wanted if name.startswith("rgpu-live")]
    found = {Requirement(one).name: one for one in reversed(wanted) if one not in own}
    return [one for name, one in sorted(found.items()) if name not in (*LEFT_OUT, *HERE, *without)]


def pack(folder: Path, python: str, tests: bool, without: Sequence[str] = ()) -> None:
    """Write the packages. Raises :class:`SystemExit` with what is missing here."""
    if missing := [name for name in LIBRARIES if not (ROOT / name).is_dir()]:
        raise SystemExit(f"{', '.join(missing)}: not built; `make setup` and `python -m tests.support.building` do")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        site = Path(scratch) / "site"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
                   "--no-compile", "--python-version", python, "--implementation", "cp", "--only-binary=:all:",
                   *(word for name in PLATFORMS for word in ("--platform", name)), "--target", str(site)]
        subprocess.run([*command, *requirements(tests, without)], check=True)
        for name in HERE:
            spec = importlib.util.find_spec(name)
            if spec is None or spec.origin is None:
                raise SystemExit(f"{name} is not installed here")
            shutil.copytree(Path(spec.origin).parent, site / name)
        shutil.rmtree(site / "include", ignore_errors=True)
        for left in [path for path in site.rglob("tests") if path.is_dir()]:
            shutil.rmtree(left)
        # Not those that auditwheel put beside a package: they are patched, and stripped they no longer load.
        for library in [path for path in site.rglob("*.so*") if not path.parent.name.endswith(".libs")]:
            subprocess.run(["strip", "--strip-unneeded", str(library)], check=False, stderr=subprocess.DEVNULL)
        (site / "bin").mkdir(exist_ok=True)
        for program in PROGRAMS:
            if found := shutil.which(program):
                shutil.copy2(found, site / "bin" / program)
        archive(folder / "site.tar.xz", {"site": site})
    archive(folder / "libs.tar.xz", {name: ROOT / name for name in LIBRARIES})
    (folder / "enter.sh").write_text(ENTER)
    for path in sorted(folder.glob("*.tar.xz")):
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


def archive(target: Path, folders: dict[str, Path]) -> None:
    """Write an archive of these folders, each under its name; by xz, which uses all processors."""
    with subprocess.Popen(["xz", "-6", "-T0"], stdin=subprocess.PIPE, stdout=target.open("wb")) as xz:
        with tarfile.open(fileobj=xz.stdin, mode="w|") as out:
            for name, path in folders.items():
                out.add(path, name)
        xz.communicate()
    if xz.returncode:
        raise SystemExit(f"{target}: xz ended with {xz.returncode}")


def main() -> None:
    """Pack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--python", default="3.12", metavar="VERSION", help="of the other machine")
    parser.add_argument("--tests", action="store_true", help="with what the tests on the cpu device import")
    parser.add_argument("--without", action="append", default=[], metavar="PACKAGE", help="that the machine has")
    options = parser.parse_args()
    pack(options.folder, options.python, options.tests, options.without)


if __name__ == "__main__":
    main()
