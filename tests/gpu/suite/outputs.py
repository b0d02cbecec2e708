"""What a program of the suite prints, and when two runs of it agree. Pure.

A program prints, among whatever else, lines of these forms:

``digest HEX [LABEL]``          a hash of results that are the same, bit for bit, on every run
``value NAME FLOAT tol REL``    a result that may differ by REL of the larger of the two
``says NAME TEXT``              text that must be the same
``note NAME TEXT``              shown, never compared
``refused NAME TEXT``           something that the program met as refused; see :func:`compare`
``skip REASON``                 with exit status 77: this machine lacks what the program needs
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

SKIPPED = 77  #: exit status of a program that printed ``skip``
_DIGEST = re.compile(r"digest ([0-9a-f]{16,64})(?: (\S+))?")
_VALUE = re.compile(r"value (\S+) (\S+) tol (\S+)")
_WORDS = re.compile(r"(says|note|refused) (\S+) ?(.*)")


@dataclass
class Run:
    """One run of one program."""

    status: int | None  #: exit status, minus a signal's number, None: it ran past its limit
    seconds: float
    out: str = ""
    err: str = ""

    @property
    def good(self) -> bool:
        return self.status == 0


@dataclass
class Printed:
    """The lines of a run that mean something."""

    digests: dict[str, str] = field(default_factory=dict)
    values: dict[str, tuple[float, float]] = field(default_factory=dict)
    says: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    skip: str = ""
    wrong: list[str] = field(default_factory=list)  #: lines that begin like one of ours and are none


def parse(text: str) -> Printed:
    """Read a program's standard output; the label of a digest without one is its number."""
    printed = Printed()
    for line in text.splitlines():
        if match := _DIGEST.fullmatch(line):
            printed.digests[match[2] or f"#{len(printed.digests) + 1}"] = match[1]
        elif match := _VALUE.fullmatch(line):
            try:
                printed.values[match[1]] = (float(match[2]), float(match[3]))
            except ValueError:
                printed.wrong.append(line)
        elif match := _WORDS.fullmatch(line):
            {"says": printed.says, "note": printed.notes, "refused": printed.refused}[match[1]][match[2]] = match[3]
        elif line.startswith("skip "):
            printed.skip = line[5:]
        elif line.startswith(("digest ", "value ")):
            printed.wrong.append(line)
    return printed


def close(a: float, b: float, relative: float) -> bool:
    """Equal within ``relative`` of the larger; two NaNs and two equal infinities are equal."""
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    return a == b or (math.isfinite(a) and math.isfinite(b) and abs(a - b) <= relative * max(abs(a), abs(b)))


def differences(native: Printed, remote: Printed) -> list[str]:
    """What a reader of the table should know; empty when the runs agree."""
    found = [f"malformed: {line}" for line in native.wrong + remote.wrong]
    for name in native.digests.keys() | remote.digests.keys():
        one, two = native.digests.get(name), remote.digests.get(name)
        if one != two:
            found.append(f"digest {name}: native {(one or 'none')[:12]}, remote {(two or 'none')[:12]}")
    for name in native.values.keys() | remote.values.keys():
        if name not in native.values or name not in remote.values:
            found.append(f"value {name}: only printed {'natively' if name in native.values else 'remotely'}")
        elif not close(native.values[name][0], remote.values[name][0], native.values[name][1]):
            found.append(f"value {name}: native {native.values[name][0]:.9g}, remote {remote.values[name][0]:.9g}, "
                         f"tolerance {native.values[name][1]:g}")
    for name in native.says.keys() | remote.says.keys():
        if native.says.get(name) != remote.says.get(name):
            found.append(f"{name}: native {native.says.get(name)!r}, remote {remote.says.get(name)!r}")
    return sorted(found)


@dataclass
class Verdict:
    """A row's outcome: ``result`` is one of RESULTS; ``text`` says why, in a few lines."""

    result: str
    text: str = ""


#: same: agrees with native · refused: refused by name, as documented · FAIL · native: fails natively too, not counted
#: · undetermined: native differs from itself · skipped · not run
RESULTS = ("same", "refused", "FAIL", "native", "undetermined", "skipped", "not run")


def judge_native(run: Run) -> Verdict | None:
    """A verdict when the native run alone decides; None when the remote run is needed."""
    printed = parse(run.out)
    if run.status == SKIPPED:
        return Verdict("skipped", printed.skip or "no reason given")
    if not run.good:
        return Verdict("native", "fails natively too: " + failure(run))
    if not (printed.digests or printed.values or printed.says or printed.refused):
        return Verdict("native", "the program printed nothing to compare")
    return None


def compare(native: Run, remote: Run, refusal: str = "") -> Verdict:
    """``refusal``: the driver call that may be refused. A refusal counts only if the program met it as an error
    of its own kind (it printed ``refused``, and ended well) and the call's name was said on standard error."""
    if decided := judge_native(native):
        return decided
    if remote.status == SKIPPED:
        return Verdict("FAIL", f"skipped remotely, not natively: {parse(remote.out).skip}")
    if not remote.good:
        return Verdict("FAIL", failure(remote))
    one, two = parse(native.out), parse(remote.out)
    found = differences(one, two)
    if not found and not two.refused:
        return Verdict("same")
    if two.refused and refusal:
        what = "; ".join(f"{name}: {text}" for name, text in two.refused.items())
        if refusal in remote.err:
            return Verdict("refused", f"{what} ({refusal} named on stderr)")
        return Verdict("FAIL", f"{what}, but {refusal} was not named on stderr")
    found += [f"refused remotely: {name} {text}" for name, text in two.refused.items() if name not in one.refused]
    return Verdict("FAIL", "\n".join(found[:5])) if found else Verdict("same")


#: Where this tree and the packages lie on the machine: no part of a result.
_PLACES = re.compile(rf"{re.escape(str(Path(__file__).resolve().parents[3]))}/|/[^\s\"]*/site-packages/")


def failure(run: Run, lines: int = 4) -> str:
    """How a run failed: its status and the end of what it said, in at most ``lines`` + 1 lines."""
    how = "ran past its limit" if run.status is None else \
        f"signal {-run.status}" if run.status < 0 else f"exit {run.status}"
    said = [_PLACES.sub("", line.strip()) for line in (run.err or run.out).splitlines() if line.strip()]
    errors = [line for line in said if re.match(r"(\w+\.)*\w*(Error|Exception|Assert\w*)\b", line)]
    tail = said[-lines:]
    if errors and errors[-1] not in tail:
        tail = [errors[-1], *tail[1 - lines:]]
    return "\n".join([f"{how} after {run.seconds:.0f} s", *(line[:240] for line in tail)])
