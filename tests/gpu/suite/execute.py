"""Runs the suite's programs: natively and through ``rgpu run``, each with a time limit and a log of its own."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.suite.outputs import Run
from tests.gpu.suite.rows import Part, Row

PROGRAMS = Path(__file__).resolve().parents[1] / "programs"
#: Compilers' caches are kept apart for each side: what the native run compiled must not spare the remote one the work.
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "CUPY_CACHE_DIR": "cupy",
          "NUMBA_CACHE_DIR": "numba", "CUDA_CACHE_PATH": "cuda", "TRITON_HOME": "triton-home"}
GRACE = 8.0  #: seconds between SIGTERM and SIGKILL
_LOCK = threading.Lock()


class BuildError(Exception):
    """A C++ program does not compile; the text is the compiler's."""


@dataclass
class Pool:
    """What a remote run needs of a pool."""

    environment: Mapping[str, str]
    memory: str | None = None  #: of each session; None: as the row says
    options: tuple[str, ...] = ()  #: further ones of ``rgpu run``


class Executor:
    """Runs the parts of a row side by side and keeps their output under ``folder``."""

    def __init__(self, folder: Path, programs: Path = PROGRAMS, base: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.programs = programs
        self._base = dict(os.environ if base is None else base)
        self._built: dict[str, Path | BuildError] = {}
        self._building: dict[str, threading.Lock] = {}
        self._sessions = 0

    def native(self, row: Row) -> list[Run]:
        """Every part on this machine's own driver. Raises :class:`BuildError`."""
        environment = self._environment(row, "native")
        # a session has as many GPUs as its row asks for, however many the machine has
        environment.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(row.gpus))))
        jobs = [(part, [*self.command(part), *part.arguments], environment) for part in row.parts]
        return self._together(row, jobs, "native")

    def remote(self, row: Row, pool: Pool) -> list[Run]:
        """Every part on a session of its own. Raises :class:`BuildError`."""
        jobs, names = [], []
        for part in row.parts:
            with _LOCK:
                self._sessions += 1
                name = f"{row.name}-{self._sessions}"
            names.append(name)
            several = ["--gpus", str(row.gpus)] if row.gpus > 1 else []
            if row.ranks > 1:
                several = ["--ranks", str(row.ranks), "--gpus", f"{0.9 / row.ranks:.2f}"]
            command = [sys.executable, "-m", "rgpu.cli.main", "run", "--name", name, "--memory",
                       pool.memory or row.memory, *several, *pool.options, "--", *self.command(part), *part.arguments,
                       *part.remote]
            jobs.append((part, command, {**pool.environment, **self._environment(row, "remote", pool.environment)}))
        runs = self._together(row, jobs, "remote")
        for name, found in zip(names, runs, strict=True):
            if found.status is None:  # its agent was killed: the session would keep its memory for a while
                with contextlib.suppress(subprocess.SubprocessError):
                    subprocess.run([sys.executable, "-m", "rgpu.cli.main", "kill", name], env=dict(pool.environment),
                                   capture_output=True, timeout=20)
        return runs

    def command(self, part: Part) -> list[str]:
        if part.program.endswith(".cu"):
            return [str(self.build(part.program))]
        return [sys.executable, "-W", "ignore", str(self.programs / f"{part.program}.py")]

    def build(self, name: str) -> Path:
        """Compile a C++ program, once. Raises :class:`BuildError`."""
        with _LOCK:
            turn = self._building.setdefault(name, threading.Lock())
        with turn:
            if name not in self._built:
                self._built[name] = self._compile(name)
        built = self._built[name]
        if isinstance(built, BuildError):
            raise built
        return built

    def _compile(self, name: str) -> Path | BuildError:
        nvcc = shutil.which("nvcc") or next((p for p in ("/usr/local/cuda/bin/nvcc",) if Path(p).exists()), None)
        if nvcc is None:
            return BuildError("nvcc is not on PATH")
        target = self.folder / "bin" / name.removesuffix(".cu")
        target.parent.mkdir(parents=True, exist_ok=True)
        command = [nvcc, "-O2", "-std=c++17", "-arch", architecture(), "-cudart", "static", "--extended-lambda", "-o",
                   str(target), str(self.programs / name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        (self.folder / f"{name}.build.log").write_text(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        if done.returncode:
            return BuildError("\n".join((done.stderr or done.stdout).strip().splitlines()[:4]))
        return target

    def _environment(self, row: Row, side: str, base: Mapping[str, str] | None = None) -> dict[str, str]:
        caches = {name: str(self.folder / "cache" / side / folder) for name, folder in CACHES.items()}
        for path in caches.values():
            Path(path).mkdir(parents=True, exist_ok=True)
        return {**(self._base if base is None else base), "PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0",
                "TORCHINDUCTOR_COMPILE_THREADS": "1", **caches, **row.environment}

    def _together(self, row: Row, jobs: list[tuple[Part, list[str], dict[str, str]]], side: str) -> list[Run]:
        runs: list[Run | None] = [None] * len(jobs)

        def one(index: int) -> None:
            part, command, environment = jobs[index]
            which = f".{index + 1}-{part.label}" if len(jobs) > 1 else ""
            try:
                runs[index] = run(command, environment, row.limit, self.folder / f"{row.name}{which}.{side}.log")
            except OSError as error:  # a thread's exception would be lost
                runs[index] = Run(127, 0.0, "", f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=one, args=(index,)) for index in range(len(jobs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found if found is not None else Run(1, 0.0, "", "the runner failed") for found in runs]


def run(command: list[str], environment: Mapping[str, str], limit: float, log: Path) -> Run:
    """Run a command in a process group of its own, for at most ``limit`` seconds; keeps its output in ``log``."""
    out, err = Path(f"{log}.out"), Path(f"{log}.err")
    began = time.monotonic()
    with open(out, "wb") as stdout, open(err, "wb") as stderr:
        process = subprocess.Popen(command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=stdout,
                                   stderr=stderr, start_new_session=True, cwd=PROGRAMS)
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        seconds = time.monotonic() - began
        end_group(process, graceful=status is None)
    said = Run(status, seconds, out.read_text(errors="replace"), err.read_text(errors="replace"))
    log.write_text(f"{' '.join(command)}\nstatus {status}, {seconds:.1f} s\n== stdout\n{said.out}\n== stderr\n"
                   f"{said.err}")
    out.unlink()
    err.unlink()
    return said


def end_group(process: subprocess.Popen[bytes], graceful: bool) -> None:
    """Ends whatever is left of a process's group: SIGTERM first where the process still runs."""
    if graceful:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def architecture() -> str:
    """The first GPU's, as nvcc writes it; sm_90 where nvidia-smi cannot say."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"], capture_output=True,
                              text=True, timeout=20)
        if match := re.match(r"(\d+)\.(\d)", done.stdout):
            return f"sm_{match[1]}{match[2]}"
    return "sm_90"
