#!/usr/bin/env python3
"""numba-cuda's own test suite, which its wheel ships, as programs of a pool: one session for each module.

    python -m tests.suites.numba_cuda                                  cudadrv and cudapy, on a pool of one cpu node
    python -m tests.suites.numba_cuda --only 'cudadrv.*' --jobs 2
    python -m tests.suites.numba_cuda --docs docs/users/numba.md       also writes the page
    python -m tests.suites.numba_cuda --device cuda:0 --native --jobs 8    natively too: the same ends?

Modules are printed as they end. Each module's log and lines, and numba-cuda.json with all counts and the rest, are
written to --output ($OUT, or bench/results/numba-cuda). Every test that does not pass needs its reason in the table of
``numba_reasons.py``. Exit status 1 when a test without a reason did not pass, or one that has a reason passed. With
--native: when a test ends otherwise than natively.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.suites.numba_reasons import SKIPS, reason_of, skip_group
from tests.support.pools.pool import ROOT, LocalPool

PROGRAM = Path(__file__).parent / "programs" / "unittest_lines.py"
PACKAGE = "numba.cuda.tests"
FOLDERS = ("cudadrv", "cudapy")
GOOD = ("passed", "skipped")
INSTALLED = re.compile(r"/\S*/site-packages/")  #: where this machine has packages is nobody's concern
VERSIONS = ("numba-cuda", "numba", "numpy", "llvmlite", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc")


@dataclass(frozen=True, slots=True)
class Test:
    """What became of one test. ``reason``: the exception's own words, or why the suite skipped it."""

    id: str
    outcome: str  #: passed, failed, error, skipped, or lost: the process ended before
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Module:
    """One module's session: its tests, its seconds, and how the process ended (0, an exit code, or a sentence)."""

    name: str
    seconds: float
    ended: str
    tests: list[Test] = field(default_factory=list)

    def counts(self) -> Counter[str]:
        """How many tests had each outcome."""
        return Counter(test.outcome for test in self.tests)


def modules() -> list[str]:
    """Names of the suite's modules, as ``cudapy.test_sm``. Raises ModuleNotFoundError without numba-cuda."""
    import numba_cuda  # noqa: PLC0415 - not needed to read the reasons

    folder = Path(numba_cuda.__path__[0]) / "numba" / "cuda" / "tests"
    found = [f"{name}.{path.stem}" for name in FOLDERS for path in sorted((folder / name).glob("test_*.py"))]
    if not found:
        raise ModuleNotFoundError(f"numba-cuda has no tests in {folder}")
    return found


def read(path: Path) -> list[Test]:
    """The tests of a file that ``unittest_lines.py`` wrote; those that it only planned are lost."""
    if not path.exists():
        return []
    planned: dict[str, None] = {}
    tests: list[Test] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        fields = json.loads(line)
        if "planned" in fields:
            planned = dict.fromkeys(fields["planned"])
            continue
        name = fields["id"].removeprefix(PACKAGE + ".")
        reason = INSTALLED.sub("", fields["reason"].removeprefix("Skipped: "))
        tests.append(Test(name, fields["outcome"], " ".join(reason.split())[-400:]))
        planned.pop(fields["id"], None)
    tests += [Test(name.removeprefix(PACKAGE + "."), "lost") for name in planned]
    return tests


def run_module(name: str, environment: Mapping[str, str] | None, output: Path, limit: float,
               words: Sequence[str] = ()) -> Module:
    """Run one module under ``rgpu run WORDS``, natively where ``environment`` is None.

    ``limit``: seconds until it is ended.
    """
    lines, log = output / f"{name}.jsonl", output / f"{name}.log"
    lines.unlink(missing_ok=True)
    command = [sys.executable, str(PROGRAM), str(lines), f"{PACKAGE}.{name}"]
    if environment is None:
        command = ["timeout", "--kill-after=5", str(int(limit)), *command]
    else:
        command = [sys.executable, "-m", "rgpu.cli.main", "run", "--quiet", "--time-limit", f"{int(limit)}s",
                   "--kill-after", "5s", *words, "--", *command]
    begun = time.monotonic()
    with open(log, "wb") as text:
        code = subprocess.run(command, env=dict(environment or {"CUDA_VISIBLE_DEVICES": "0", **os.environ}), cwd=ROOT,
                              stdin=subprocess.DEVNULL, stdout=text, stderr=text).returncode
    seconds = time.monotonic() - begun
    ended = "" if code == 0 else f"not within {limit:.0f} s" if seconds >= limit else f"exit status {code}"
    return Module(name, round(seconds, 1), ended, read(lines))


def run(names: Sequence[str], environment: Mapping[str, str] | None, output: Path, jobs: int = 2, limit: float = 600,
        after: Callable[[Module], None] = lambda module: None, words: Sequence[str] = ()) -> list[Module]:
    """Run modules, ``jobs`` at a time; ``after`` is called for each as it ends. ``environment``, ``words``: as
    run_module takes them.
    """
    output.mkdir(parents=True, exist_ok=True)
    done: list[Module] = []

    def one(name: str) -> Module:
        module = run_module(name, environment, output, limit, words)
        after(module)
        return module

    with ThreadPoolExecutor(jobs) as threads:
        done += threads.map(one, names)
    return done


def problems(found: Sequence[Module]) -> list[str]:
    """What the table of reasons does not say: tests that failed without one, tests that passed in spite of one."""
    said = []
    for module in found:
        if not module.tests:
            said.append(f"{module.name}: no test was run ({module.ended or 'no tests in it'})")
        for test in module.tests:
            known = reason_of(test.id)
            if test.outcome not in GOOD and known is None:
                said.append(f"{test.id}: {test.outcome}: {test.reason or module.ended}")
            elif test.outcome == "passed" and known is not None and not known.sometimes:
                said.append(f"{test.id}: passed, and is listed as failing: {known.text}")
    return said


def differences(native: Sequence[Module], remote: Sequence[Module]) -> list[str]:
    """Name the tests that end otherwise under ``rgpu run`` than natively, also those that only one side has."""
    at_home, here = ({test.id: test for module in side for test in module.tests} for side in (native, remote))
    none = Test("", "not there")
    return [f"{name}: {test.outcome}, natively {other.outcome}: {test.reason or other.reason}"
            for name in sorted({*at_home, *here})
            if (test := here.get(name, none)).outcome != (other := at_home.get(name, none)).outcome]


def summary(found: Sequence[Module]) -> dict[str, dict[str, int]]:
    """Counts of outcomes by folder."""
    by: dict[str, Counter[str]] = {}
    for module in found:
        by.setdefault(module.name.partition(".")[0], Counter()).update(module.counts())
    return {name: dict(sorted(counts.items())) for name, counts in sorted(by.items())}


def report(found: Sequence[Module], command: str) -> dict[str, Any]:
    """All that a result file says: date, command, versions, counts, every test that did not pass."""
    versions = {name: _version(name) for name in VERSIONS}
    versions["nvidia-nvjitlink"] = "present" if importlib.util.find_spec("nvidia.nvjitlink") else "absent"
    return {
        "date": time.strftime("%Y-%m-%d"), "command": command, "processors": os.cpu_count(), "versions": versions,
        "summary": summary(found),
        "modules": {m.name: {**dict(sorted(m.counts().items())), **({"seconds": m.seconds} if m.seconds else {}),
                             **({"ended": m.ended} if m.ended else {})} for m in found},
        "rest": [{**asdict(test), "cause": known.text if (known := reason_of(test.id)) else ""}
                 for module in found for test in module.tests if test.outcome not in GOOD],
        "skipped": dict(Counter(skip_group(test.reason) for m in found for test in m.tests
                                if test.outcome == "skipped").most_common()),
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


def page(about: Mapping[str, Any]) -> str:
    """The page of the documentation, from a report."""
    lines = ["# numba-cuda's own tests", "",
             f"Written by `{about['command']}` on {about['date']}: the tests that numba-cuda "
             f"{about['versions']['numba-cuda']} ships, unchanged, in default settings, under `rgpu run` on the `cpu` "
             "device, one session for each module. `make sweep` runs all of them, `make test` a part.", "",
             "| folder | passed | skipped by the suite | not passed |", "|---|---|---|---|"]
    for folder, counts in about["summary"].items():
        rest = sum(count for outcome, count in counts.items() if outcome not in GOOD)
        lines.append(f"| {folder} | {counts.get('passed', 0)} | {counts.get('skipped', 0)} | {rest} |")
    lines += ["", "## What does not pass", "", "| cause | tests |", "|---|---|"]
    causes: dict[str, list[str]] = {}
    for test in about["rest"]:
        causes.setdefault(test["cause"] or "unknown", []).append(test["id"])
    lines += [f"| {cause} | {', '.join(f'`{name}`' for name in names)} |" for cause, names in causes.items()]
    lines += ["", "## What the suite skips itself", "", "| its reason | tests |", "|---|---|"]
    lines += [f"| {reason or '(none given)'}{f' ({SKIPS[reason]})' if SKIPS.get(reason) else ''} | {count} |"
              for reason, count in about["skipped"].items()]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lines += ["", f"Versions: {versions}.", ""]
    return "\n".join(lines)


def show(module: Module) -> None:
    """Print one module's line, and each of its tests that did not pass."""
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(module.counts().items()))
    print(f"{module.name:40s} {module.seconds:6.1f} s  {counts or 'no tests'}  {module.ended}".rstrip())
    for test in module.tests:
        if test.outcome not in GOOD:
            print(f"    {test.outcome} {test.id}: {test.reason[:160]}")
    sys.stdout.flush()


def earlier(names: Sequence[str], output: Path) -> list[Module]:
    """What an earlier run left in ``output``; modules that it did not run are left out."""
    return [Module(name, 0.0, "", tests) for name in names if (tests := read(output / f"{name}.jsonl"))]


def run_on_pool(names: Sequence[str], options: argparse.Namespace) -> list[Module]:
    """Run modules on a pool of their own."""
    with tempfile.TemporaryDirectory(prefix="rgpu-numba-") as folder, \
            LocalPool(Path(folder), nodes=1, lease=10.0, device=options.device) as pool:
        # By default a session would have the whole GPU, and others beside it no place.
        words = ("--memory", options.memory) if options.device != "cpu" else ()
        return run(names, pool.environment, options.output, options.jobs, options.limit, show, words)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="modules, as 'cudapy.test_sm*'")
    parser.add_argument("--jobs", type=int, default=2, help="sessions side by side (default 2)")
    parser.add_argument("--limit", type=float, default=600, metavar="SECONDS", help="for each module (default 600)")
    parser.add_argument("--device", default="cpu", help="of the pool's node: cpu (default), cuda:0")
    parser.add_argument("--memory", default="8GiB", help="of each session on a GPU (default 8GiB)")
    parser.add_argument("--output", type=Path,
                        default=Path(os.environ.get("OUT", ROOT / "bench" / "results")) / "numba-cuda")
    parser.add_argument("--native", action="store_true", help="run them natively too, on a GPU of this machine")
    parser.add_argument("--read", action="store_true", help="run nothing: count what an earlier run left in --output")
    parser.add_argument("--docs", type=Path, help="write this page from the results")
    options = parser.parse_args()
    names = [name for name in modules()
             if not options.only or any(fnmatch.fnmatchcase(name, pattern) for pattern in options.only)]
    if not names:
        parser.error(f"no module matches {' '.join(options.only)}")
    at_home: list[Module] = []
    if options.native:
        folder = options.output / "native"
        at_home = (earlier(names, folder) if options.read else
                   run(names, None, folder, options.jobs, options.limit, show))
    found = earlier(names, options.output) if options.read else run_on_pool(names, options)
    patterns = [word for pattern in options.only for word in ("--only", pattern)]
    on = (["--device", options.device] if options.device != "cpu" else []) + ["--native"] * options.native
    about = report(found, shlex.join(["python", "-m", "tests.suites.numba_cuda", *on, *patterns]))
    said = differences(at_home, found) if options.native else problems(found)
    if options.native:
        about |= {"native": summary(at_home), "differing": said}
    (options.output / "numba-cuda.json").write_text(json.dumps(about, indent=1) + "\n")
    if options.docs:
        options.docs.write_text(page(about), encoding="utf-8")
    print("\n".join([json.dumps(about["summary"]), *said]))
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
