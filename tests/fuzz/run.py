"""Coverage-guided fuzzing of the readers with atheris: ``make fuzz`` or ``python -m tests.fuzz.run``.

usage: python -m tests.fuzz.run [--seconds 600] [--jobs 2] [--out FILE] [TARGET …]

Each target runs in a process of its own, those in C++ (tests/fuzz/compiled.py)
under sanitizers. Inputs that reach new code are kept in --work (default: a
temporary folder) and, smallest first and a few KB in all, copied to
tests/fuzz/corpus/TARGET with --keep. A finding is copied there too, as crash-…,
so that the ordinary tests fail until it is mended (one in C++ stays in --work).
Writes a table (commit, inputs, coverage, findings) to FILE. Targets in Python
need the extra ``fuzz``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from importlib.util import find_spec
from pathlib import Path

from tests.fuzz import compiled

ROOT = Path(__file__).resolve().parents[2]
CORPUS = Path(__file__).parent / "corpus"
KEPT_FILES, KEPT_BYTES = 24, 4096  #: of one target's corpus: files, bytes of each
_STATUS = re.compile(r"#(\d+)\s.*?cov: (\d+) ft: (\d+).*?corp: (\d+)")


@dataclass
class Result:
    target: str
    seconds: float = 0.0
    runs: int = 0
    coverage: int = 0
    corpus: int = 0
    finding: str = ""
    tail: str = ""


def fuzz(target: str, seconds: int, work: Path) -> Result:
    """Run one target in a child process."""
    folder = work / target
    folder.mkdir(parents=True, exist_ok=True)
    _seed(target, folder)
    began = time.monotonic()
    child = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.run", "--child", target, str(folder), f"-max_total_time={seconds}",
         "-max_len=65536", "-timeout=25", "-rss_limit_mb=4096", "-print_final_stats=1",
         f"-artifact_prefix={work}/{target}-"],
        cwd=ROOT, capture_output=True, text=True, errors="replace",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))})
    result = Result(target, time.monotonic() - began)
    _note(result, child.stderr)
    if not child.returncode and not result.coverage:
        result.finding, result.tail = "nothing was instrumented", child.stderr[-2000:]
    if child.returncode:
        found = sorted(work.glob(f"{target}-*"), key=lambda path: path.stat().st_mtime)
        result.finding = found[-1].name if found else f"exit {child.returncode}"
        result.tail = (child.stdout + child.stderr)[-4000:]
        if found:
            (CORPUS / target).mkdir(parents=True, exist_ok=True)
            shutil.copy(found[-1], CORPUS / target / found[-1].name.removeprefix(f"{target}-"))
    return result


def fuzz_compiled(target: str, seconds: int, work: Path) -> Result:
    """Run a target in C++."""
    program = compiled.build(target, work / target)
    began = time.monotonic()
    finding = work / f"{target}-crash-{os.getpid()}"
    child = compiled.fuzz(program, "--seconds", str(seconds), "--seed", str(time.time_ns()), "--finding", str(finding))
    result = Result(target, time.monotonic() - began)
    _note(result, child.stdout)
    if child.returncode:
        result.finding = str(finding) if finding.exists() else f"exit {child.returncode}"
        result.tail = (child.stdout + child.stderr)[-4000:]
    return result


def _note(result: Result, output: str) -> None:
    for match in _STATUS.finditer(output):
        result.runs, result.coverage, result.corpus = int(match[1]), int(match[2]), int(match[4])


def _seed(target: str, folder: Path) -> None:
    from tests.fuzz.readers import TARGETS

    for number, data in enumerate(TARGETS[target][1]()):
        (folder / f"seed-{number}").write_bytes(data)
    for path in (CORPUS / target).glob("*"):
        shutil.copy(path, folder / path.name)


def keep(target: str, work: Path) -> None:
    """The smallest inputs that reached something new, under the limits."""
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    found = sorted((path for path in (work / target).iterdir() if not path.name.startswith("seed-")
                    and 0 < path.stat().st_size <= KEPT_BYTES), key=lambda path: (path.stat().st_size, path.name))
    step = max(1, len(found) // KEPT_FILES)
    for path in found[::step][:KEPT_FILES]:
        shutil.copy(path, folder / path.name)


def child(target: str, arguments: list[str]) -> None:
    """In the child: libFuzzer's loop, which does not return."""
    import atheris

    # What an editable install looks modules up with loads them around atheris: nothing would be instrumented.
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder in (BuiltinImporter, FrozenImporter, PathFinder)]
    with atheris.instrument_imports(include=["rgpu", "msgspec"]):
        from tests.fuzz.readers import TARGETS

    function = TARGETS[target][0]
    atheris.Setup([sys.argv[0], *arguments], lambda data: function(bytes(data)))
    atheris.Fuzz()


def commit() -> str:
    """The commit that is fuzzed, with ``+`` when files differ from it."""
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "--", "rgpu") else "")


def table(results: list[Result], seconds: int) -> str:
    lines = [f"fuzzing of commit {commit()}, {seconds} s for each reader, {time.strftime('%Y-%m-%d %H:%M')}", "",
             f"{'reader':16s}{'s':>7s}{'inputs':>12s}{'coverage':>10s}{'kept':>7s}  finding"]
    lines += [f"{r.target:16s}{r.seconds:7.0f}{r.runs:12d}{r.coverage:10d}{r.corpus:7d}  {r.finding or 'none'}"
              for r in results]
    return "\n".join(lines) + "\n"


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3:])
        return 0
    from tests.fuzz.readers import TARGETS

    parser = argparse.ArgumentParser(description="fuzz the readers of outside bytes")
    names = [*TARGETS, *compiled.TARGETS]
    parser.add_argument("targets", nargs="*", choices=[*names, []], metavar="TARGET")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    chosen = options.targets or names
    if find_spec("atheris") is None and set(chosen) & set(TARGETS):
        print("fuzzing needs atheris: pip install 'rgpu-live[fuzz]'", file=sys.stderr)
        return 2
    work = options.work or Path(tempfile.mkdtemp(prefix="rgpu-fuzz-"))
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda name: (fuzz_compiled if name in compiled.TARGETS else fuzz)(
            name, options.seconds, work), chosen))
    for result in results:
        if options.keep and result.target in TARGETS:
            keep(result.target, work)
        if result.finding:
            print(f"== {result.target}: {result.finding}\n{result.tail}", file=sys.stderr)
    text = table(results, options.seconds)
    print(text, end="")
    if options.out is not None:
        options.out.write_text(text)
    return 1 if any(result.finding for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
