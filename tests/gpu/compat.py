#!/usr/bin/env python3
"""The compatibility suite: each program natively and remotely in one call, results compared.

    python tests/gpu/compat.py                      every row, on GPU 0 of this machine
    python tests/gpu/compat.py --only 'torch-gpt2*' --only cpp-graph
    python tests/gpu/compat.py --skip 'jax-*' --jobs 3 --budget 540
    python tests/gpu/compat.py --merge a.json b.json --docs docs/users/compatibility.md

Rows are printed as they end. Logs of every run, compat.json and compatibility.md
are written to --output ($OUT, or bench/results), also when the run is broken off.
Exit status 1 when a row failed.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.gpu.suite import report  # noqa: E402
from tests.gpu.suite.admission import Turns, asked, card_memory  # noqa: E402
from tests.gpu.suite.execute import BuildError, Executor, Pool  # noqa: E402
from tests.gpu.suite.outputs import Run, Verdict, compare, failure, judge_native, parse  # noqa: E402
from tests.gpu.suite.report import Result  # noqa: E402
from tests.gpu.suite.rows import ROWS, Row  # noqa: E402


@dataclass
class Suite:
    """Runs rows: native runs ``native_jobs`` at a time, each followed by its remote run, ``jobs`` at a time at most.

    ``card``: bytes that the sessions of remote runs may have together, 0: not known.
    """

    executor: Executor
    pool: Pool
    native_jobs: int = 4
    jobs: int = 1
    deadline: float = float("inf")  #: of ``time.monotonic``: rows that have not begun by then are not run
    gpus: int = 1
    card: int = 0
    results: dict[str, Result] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._native_turn, self._turns = threading.Semaphore(self.native_jobs), Turns(self.jobs, self.card)

    def run(self, rows: Sequence[Row], after: Callable[[Result], None] = lambda result: None) -> list[Result]:
        """Runs them all; ``after(result)`` is called for each as it ends, one at a time.

        Those that run alone come last, one after the other.
        """
        several = [row for row in rows if not row.alone]
        for together in (several, *([row] for row in rows if row.alone)):
            with ThreadPoolExecutor(max(1, len(together))) as threads:
                found = {threads.submit(self.row, row): row.name for row in together}
                for future in as_completed(found):
                    self.results[found[future]] = future.result()
                    after(future.result())
        return [self.results[row.name] for row in rows]

    def row(self, row: Row) -> Result:
        """One row: its native runs, then its remote ones, each when it is their turn."""
        result = Result(row.name, row.framework, row.what, "")
        try:
            with self._native_turn:
                native = self._native(row)
            verdict = native if isinstance(native, Verdict) else self._decide(row, native, result)
        except Exception as error:  # noqa: BLE001 - a mistake of the runner is shown as its row's, not lost
            verdict = Verdict("FAIL", f"the runner: {type(error).__name__}: {error}")
        result.result, result.text = verdict.result, verdict.text
        return result

    def _native(self, row: Row) -> list[Run] | Verdict:
        if row.gpus > self.gpus:
            return Verdict("skipped", f"needs {row.gpus} GPUs, this machine has {self.gpus}")
        if time.monotonic() > self.deadline:
            return Verdict("not run", "time was up")
        try:
            return self.executor.native(row)
        except BuildError as error:
            return Verdict("native", f"does not compile: {error}")

    def _decide(self, row: Row, native: list[Run], result: Result) -> Verdict:
        result.native_seconds = max(run.seconds for run in native)
        result.native = "runs" if all(run.good for run in native) else failure(next(
            run for run in native if not run.good), 0)
        decided = [verdict for run in native if (verdict := judge_native(run))]
        if decided:
            return decided[0]
        with self._turns.turn(asked(row, self.pool.memory)):
            if time.monotonic() > self.deadline:
                return Verdict("not run", "time was up")
            remote = self.executor.remote(row, self.pool)
        result.remote_seconds = max(run.seconds for run in remote)
        result.remote = "runs" if all(run.good for run in remote) else failure(next(
            run for run in remote if not run.good), 0)
        for run in remote:
            result.notes.update(parse(run.out).notes)
        verdicts = [compare(one, two, row.refusal) for one, two in zip(native, remote, strict=True)]
        bad = [f"{part.label}: {v.text}" if len(row.parts) > 1 else v.text
               for part, v in zip(row.parts, verdicts, strict=True) if v.result == "FAIL"]
        if bad:
            return self._recheck(row, native, "\n".join(bad)) if all(run.good for run in remote) \
                else Verdict("FAIL", "\n".join(bad))
        return next((v for v in verdicts if v.result != "same"), verdicts[0])

    def _recheck(self, row: Row, first: list[Run], text: str) -> Verdict:
        """Both ended well and differ: does the native run agree with itself?"""
        if time.monotonic() < self.deadline:
            again = self.executor.native(row)
            same = all(compare(one, two).result == "same" for one, two in zip(first, again, strict=True))
            if not same:
                return Verdict("undetermined", f"two native runs differ too\n{text}")
        return Verdict("FAIL", text)


def chosen(rows: Sequence[Row], only: Sequence[str], skip: Sequence[str]) -> list[Row]:
    """Rows whose name matches a pattern of ``only`` (all without one) and none of ``skip``."""
    def matches(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatch(name, pattern) or name.startswith(pattern + "-") for pattern in patterns)

    return [row for row in rows if (not only or matches(row.name, only)) and not matches(row.name, skip)]


def main() -> int:
    options = _arguments()
    if options.list:
        print("\n".join(f"{row.name:24s} {row.what}" for row in chosen(ROWS, options.only, options.skip)))
        return 0
    if options.merge:
        return _merge(options)
    from tests.conftest import gpu_count
    from tests.support.pools.pool import LocalPool, VerbError

    rows = [replace(row, limit=min(row.limit, options.limit)) for row in chosen(ROWS, options.only, options.skip)]
    if not rows:
        print("no row has such a name; --list shows them", file=sys.stderr)
        return 2
    folder: Path = options.output
    (folder / "compat-logs").mkdir(parents=True, exist_ok=True)
    about = {**report.environment(), "command": " ".join(["python", "tests/gpu/compat.py", *sys.argv[1:]])}
    ended: list[Result] = []

    def after(result: Result) -> None:
        ended.append(result)
        print(report.line(result), flush=True)
        _write(folder, ended, about, options.docs)

    most, here = max(row.gpus for row in rows), gpu_count()
    device = options.device or ",".join(f"cuda:{number}" for number in range(max(1, min(most, here))))
    with LocalPool(Path(tempfile.mkdtemp(prefix="rgpu-compat-")), nodes=1, device=device, lease=5.0) as pool:
        # What an ended session had may be free a moment after its program's end: who comes next waits for it.
        words = (*options.run_option, *(["--queue"] if options.jobs > 1 else []))
        suite = Suite(Executor(folder / "compat-logs"), Pool(pool.environment, options.memory, words),
                      options.native_jobs, options.jobs, time.monotonic() + options.budget, here,
                      card_memory(pool.living()))
        suite.run(rows, after)
        (folder / "compat-logs" / "pool.log").write_text(pool.logs())
        # What each session waited for: why is a row slower than natively?
        with contextlib.suppress(VerbError):  # no daemon answers: its log says why
            (folder / "compat-logs" / "sessions.json").write_text(json.dumps(pool.rgpu("ps", "--all"), indent=1))
    print(f"\n{report.summary(ended)}; logs in {folder / 'compat-logs'}")
    for result in ended:
        if result.result == "FAIL":
            print(report.line(result))
    return 1 if any(result.result == "FAIL" for result in ended) else 0


def _write(folder: Path, results: Sequence[Result], about: dict, docs: Path | None) -> None:
    ordered = report.merged([results], [row.name for row in ROWS])
    report.save(folder / "compat.json", ordered, about)
    text = report.markdown(ordered, about, "make compat")
    for path in (folder / "compatibility.md", *([docs] if docs else [])):
        path.write_text(text)


def _merge(options: argparse.Namespace) -> int:
    loaded = [report.load(path) for path in options.merge]
    results = report.merged([rows for rows, _ in loaded], [row.name for row in ROWS])
    about = loaded[-1][1]
    print(report.summary(results))
    if options.docs:
        options.docs.write_text(report.markdown(results, about, "make compat"))
    options.output.mkdir(parents=True, exist_ok=True)
    report.save(options.output / "compat-merged.json", results, about)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The compatibility suite: programs natively and remotely, compared.")
    parser.add_argument("--only", action="append", default=[], metavar="ROW", help="name, pattern or framework")
    parser.add_argument("--skip", action="append", default=[], metavar="ROW")
    parser.add_argument("--list", action="store_true", help="show the rows and end")
    parser.add_argument("--device", help="the node's devices, with commas (default: as many GPUs as a row needs)")
    parser.add_argument("--memory", help="device memory of every session (default: as the row says, mostly 16GiB)")
    parser.add_argument("--jobs", type=int, default=1,
                        help="remote runs at a time, while their sessions fit the card together")
    parser.add_argument("--native-jobs", type=int, default=4, help="native runs at a time")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds after which no further row begins")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one run, if less than the row's own")
    parser.add_argument("--run-option", action="append", default=[], help="a further word for `rgpu run`")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT") or ROOT / "bench" / "results"))
    parser.add_argument("--docs", type=Path, help="also write the page here (docs/users/compatibility.md)")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="JSON", help="join the results of several runs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
