"""Readers in C++ under sanitizers: the compiled round trips of agent and worker, each between hostile ends.

``tests/fuzz/native/NAME.cpp`` drives one reader; :func:`build` compiles it with AddressSanitizer, UBSan and coverage,
:func:`fuzz` runs its loop. ``python -m tests.fuzz.run agent_exchange`` gives it as long as any other reader.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support.fake_driver import compiler

ROOT = Path(__file__).resolve().parents[2]
NATIVE = Path(__file__).parent / "native"
CHANNEL, MESSAGES = ROOT / "rgpu/link/native", ROOT / "rgpu/link/messages/native"
#: Name → (the reader's folder, where else its headers are).
TARGETS = {
    "agent_exchange": (ROOT / "rgpu/client/exchange", ROOT / "rgpu/client/shim/generated"),
    "worker_exchange": (ROOT / "rgpu/server/worker/exchange", ROOT / "rgpu/server/device/cuda/native"),
}
FLAGS = ("-std=c++20", "-g", "-O1", "-Wall", "-Wextra", "-fno-omit-frame-pointer", "-fsanitize=address,undefined",
         "-fno-sanitize-recover=all", "-pthread")
CHECKED = "-Ddlsym=checked_dlsym"  #: the memory that libcrypto is given, too, which is not instrumented
COVERED = "-fsanitize-coverage=trace-pc"  #: of what is fuzzed, not of the fuzzer


def build(name: str, folder: Path, reader: Path | None = None) -> Path:
    """Compile a fuzzer into ``folder``, which may hold objects of earlier builds, and return its path.

    ``reader``: another version of the reader's source. Raises CalledProcessError.
    """
    where, headers = TARGETS[name]
    source = reader or where / "exchange.cpp"
    program = folder / f"{name}-{'other' if reader else 'fuzzer'}"
    include = [f"-I{path}" for path in (NATIVE, CHANNEL, MESSAGES, where, headers)]
    folder.mkdir(parents=True, exist_ok=True)

    def compiled(source: Path, made: str, *flags: str) -> str:
        if not (folder / made).exists():
            words = [*FLAGS, *flags, *include, "-c", str(source), "-o", str(folder / made)]
            subprocess.run([compiler() or "c++", *words], check=True)
        return str(folder / made)

    others = [path for path in sorted(where.glob("*.cpp")) if path.name != "exchange.cpp"]
    objects = [*(compiled(path, f"{name}-{path.stem}.o", COVERED) for path in others),
               compiled(NATIVE / "fuzzing.cpp", "fuzzing.o"), compiled(NATIVE / "coverage.cpp", "coverage.o"),
               compiled(CHANNEL / "channel.cpp", "channel.o", COVERED, CHECKED),
               compiled(NATIVE / f"{name}.cpp", f"{name}.o"),
               compiled(source, f"{name}-{'other' if reader else 'reader'}.o", COVERED)]
    subprocess.run([compiler() or "c++", *FLAGS, *objects, "-ldl", "-o", str(program)], check=True)
    return program


def fuzz(program: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a fuzzer: ``--seconds N --seed N --finding FILE``, or inputs to be tried. Status 0: nothing was found.

    Leaks are not looked for: that needs ptrace, which not every container allows.
    """
    return subprocess.run([str(program), *words], capture_output=True, text=True, errors="replace",
                          env={**os.environ, "ASAN_OPTIONS": "handle_abort=1:detect_leaks=0",
                               "UBSAN_OPTIONS": "abort_on_error=1:print_stacktrace=1"})  # so that it, too, is kept
