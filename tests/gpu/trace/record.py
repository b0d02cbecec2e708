"""Records what the machine's own driver answers to the script, as the reference of ``test_trace.py``.

    python -m tests.gpu.trace.record            writes tests/gpu/trace/native_580.json (and to $OUT, where that is set)

Each section runs twice: what differs between the two runs is left out of the recording, by name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.gpu.trace.script import SECTIONS

ROOT = Path(__file__).resolve().parents[3]
FILE = Path(__file__).with_name("native_580.json")


def answers(section: str, prefix: tuple[str, ...] = (), environment: dict[str, str] | None = None,
            limit: float = 60.0) -> list[list[Any]]:
    """A section's answers, run by this interpreter. Raises ``RuntimeError`` with what it said when it failed."""
    done = subprocess.run([*prefix, sys.executable, "-m", "tests.gpu.trace.script", section], cwd=ROOT,
                          env=environment, capture_output=True, text=True, timeout=limit, stdin=subprocess.DEVNULL)
    for line in reversed(done.stdout.splitlines()):
        if line.startswith('{"answers"'):
            content = json.loads(line)
            if "failed" in content:
                raise RuntimeError(f"{section}: {content['failed'][0]} gave {content['failed'][1]}, after "
                                   f"{content['answers'][-1:]}")
            return list(content["answers"])
    raise RuntimeError(f"{section}: exit {done.returncode}: {done.stderr[-1500:]}")


def flat(recorded: list[list[Any]]) -> dict[str, Any]:
    """One entry for each call, by its name and the word behind it; one that comes again is numbered."""
    found: dict[str, Any] = {}
    for name, *answer in recorded:
        base = f"{name} / {answer[0]}" if answer and isinstance(answer[0], str) else name
        key, number = base, 2
        while key in found:
            key, number = f"{base} #{number}", number + 1
        found[key] = answer
    return found


def main() -> int:
    content: dict[str, Any] = {"recorded": time.strftime("%Y-%m-%d"), "driver": _driver(), "sections": {},
                               "volatile": []}
    bad = 0
    for section in SECTIONS:
        try:
            first, second = flat(answers(section)), flat(answers(section))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{section:16s} FAILED: {error}")
            bad += 1
            continue
        volatile = sorted(key for key in first.keys() | second.keys() if first.get(key) != second.get(key))
        content["volatile"] += [f"{section}: {key}" for key in volatile]
        content["sections"][section] = {key: value for key, value in first.items() if key not in volatile}
        print(f"{section:16s} {len(content['sections'][section])} answers"
              + (f", left out as volatile: {volatile}" if volatile else ""))
    text = json.dumps(content, indent=1) + "\n"
    targets = [FILE, *([Path(os.environ["OUT"]) / FILE.name] if os.environ.get("OUT") else [])]
    for target in targets:
        target.write_text(text)
        print(f"written: {target}")
    return 1 if bad else 0


def _driver() -> str:
    try:
        return subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                              capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
