"""The kinds of programs: their command lines, how large they are on which device, what they need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.suite.execute import CACHES, architecture

PROGRAMS = Path(__file__).resolve().parent / "programs"


class Missing(Exception):
    """This machine cannot run that kind of program; the text says why."""


@dataclass(frozen=True)
class Kind:
    """``gpu``, ``cpu``: steps on such a device, 0 where it cannot run; ``memory``: of its session there."""

    name: str
    program: str
    words: tuple[str, ...] = ()
    gpu: int = 0
    cpu: int = 0
    memory: str = "2GiB"

    def steps(self, device: str, scale: float) -> int:
        """Whole bursts of ten."""
        return max(20, round((self.cpu if device.startswith("cpu") else self.gpu) * scale / 10) * 10)

    def command(self, device: str, bin_folder: Path, steps: int, pace: float) -> list[str]:
        """``pace``: seconds over which it spreads its steps. Raises :class:`Missing`."""
        words = [str(steps), f"{pace:g}", *self.words]
        if self.program.endswith(".cu"):
            return [str(compiled(PROGRAMS / self.program, device, bin_folder)), *words]
        return [sys.executable, "-W", "ignore", str(PROGRAMS / self.program), *words]


KINDS = (
    Kind("torch-side", "frameworks/torch_side.py", (), 800, memory="4GiB"),
    Kind("torch-side-record", "frameworks/torch_side.py", ("--record",), 800, memory="4GiB"),
    Kind("torch-graphs", "frameworks/torch_graphs.py", (), 2000, memory="4GiB"),
    Kind("torch-compile", "frameworks/torch_compile.py", (), 1500, memory="4GiB"),
    Kind("torch-loader", "frameworks/torch_loader.py", (), 800, memory="4GiB"),
    Kind("torch-amp", "frameworks/torch_amp.py", (), 800, memory="4GiB"),
    Kind("torch-offload", "frameworks/torch_offload.py", (), 800, memory="4GiB"),
    Kind("jax", "frameworks/jax_train.py", (), 1500, memory="4GiB"),
    Kind("cupy", "frameworks/cupy_pools.py", (), 1500),
    Kind("numba", "frameworks/numba_life.py", (), 1500, 300),
    Kind("cpp", "callbacks.cu", (), 300, 500),
    Kind("cudart", "cudart_streams.py", (), 3000, 600),
    Kind("prefetch", "prefetch.py", (), 3000, 500),
    # Not on the cpu device: that is not ahead of the CPU, so that the race shows undisturbed.
    Kind("prefetch-racy", "prefetch.py", ("--racy",), 1000),
    Kind("mapped", "mapped.py", (), 2000, 400),
    Kind("managed", "managed.py", (), 1500, 300),
    Kind("addresses", "addresses.py", (), 2000, 300),
    Kind("registered", "registered.py", (), 2000, 300),
    Kind("downloads", "downloads.py", (), 2000, 300),
    Kind("textures", "textures.py", (), 1500, 100),
    Kind("graphs", "graphs.py", (), 2000, 500),
    Kind("conditions", "conditions.py", (), 1000, 300),
    Kind("churn", "churn.py", (), 2000, 400),
)
BY_NAME = {kind.name: kind for kind in KINDS}


def chosen(device: str, only: Sequence[str] = ()) -> list[Kind]:
    """Those that such a device can run, of those asked for. Raises :class:`ValueError` for a name that is no kind."""
    if unknown := set(only) - set(BY_NAME):
        raise ValueError(f"no such kind: {', '.join(sorted(unknown))}; there are {', '.join(BY_NAME)}")
    return [kind for kind in KINDS if (not only or kind.name in only)
            and (kind.cpu if device.startswith("cpu") else kind.gpu)]


def environment(folder: Path) -> dict[str, str]:
    """Of every program, native and remote: compilers' caches of their own, so that each kernel is compiled once."""
    caches = {name: str(folder / "cache" / place) for name, place in CACHES.items()}
    for path in caches.values():
        Path(path).mkdir(parents=True, exist_ok=True)
    path = [str(PROGRAMS), *filter(None, [os.environ.get("PYTHONPATH")])]  # what programs of all rooms share
    return {"PYTHONPATH": os.pathsep.join(path), "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1", **caches}


def compiled(source: Path, device: str, folder: Path) -> Path:
    """The program of a C++ file: for this GPU, or as PTX for the cpu device. Raises :class:`Missing`."""
    target = folder / source.stem
    if target.exists():
        return target
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not os.access(nvcc, os.X_OK):
        raise Missing("nvcc is not on PATH")
    code = ["-gencode", "arch=compute_75,code=compute_75"] if device.startswith("cpu") else ["-arch", architecture()]
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".new")
    done = subprocess.run([nvcc, "-O2", "-std=c++17", *code, "-cudart", "static", "-o", str(unfinished), str(source)],
                          capture_output=True, text=True, timeout=240)
    if done.returncode:
        raise Missing(f"nvcc: {(done.stderr or done.stdout).strip().splitlines()[0]}")
    os.rename(unfinished, target)
    return target
