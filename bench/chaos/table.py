"""The table of a chaos: kinds, disturbances, verdicts, longest gaps, and how to repeat what failed. No I/O."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.chaos.plan import DECK
from bench.chaos.session import HUNG, LATE, LOST, SAME, WRONG, Case

VERDICTS = (SAME, WRONG, LOST, HUNG, LATE)


def kinds(cases: Sequence[Case]) -> list[str]:
    """A line for each kind of program."""
    lines = [f"{'kind':18s} {'sessions':>8s} " + " ".join(f"{verdict:>5s}" for verdict in VERDICTS)
             + f" {'disturbed':>9s} {'longest gap':>12s} {'median':>8s}"]
    for kind in sorted({case.plan.kind for case in cases}):
        mine = [case for case in cases if case.plan.kind == kind]
        lines.append(_line(kind, mine))
    lines.append(_line("all", cases))
    return lines


def _line(name: str, cases: Sequence[Case]) -> str:
    counts = Counter(case.verdict for case in cases)
    gaps = [case.gap for case in cases] or [0.0]
    done = sum(deed.done for case in cases for deed in case.deeds)
    return (f"{name:18s} {len(cases):8d} " + " ".join(f"{counts[verdict]:5d}" for verdict in VERDICTS)
            + f" {done:9d} {max(gaps):10.1f} s {statistics.median(gaps):6.1f} s")


def disturbances(cases: Sequence[Case]) -> list[str]:
    """A line for each kind of disturbance. Of those done, ``broken`` were broken off by what came on top of them, and
    ``during`` came together with another or in its wake."""
    lines = [f"{'disturbance':24s} {'planned':>8s} {'done':>6s} {'broken':>7s} {'during':>7s} {'refused':>8s} "
             f"{'missed':>7s}"]
    deeds = [deed for case in cases for deed in case.deeds]
    for what in [*DECK, "all"]:
        mine = [deed for deed in deeds if what in (deed.fault.what, "all")]
        during = sum(deed.done and deed.fault.after is not None for deed in mine)
        broken = sum(deed.outcome.startswith("broken") for deed in mine)
        lines.append(f"{what:24s} {len(mine):8d} {sum(deed.done for deed in mine):6d} {broken:7d} {during:7d} "
                     f"{sum(deed.outcome.startswith('refused') for deed in mine):8d} "
                     f"{sum(deed.outcome.startswith(('missed', 'under way')) for deed in mine):7d}")
    return lines


def failures(cases: Sequence[Case], command: str) -> list[str]:
    """What failed or stood still for long, how to repeat it, what was done to it, where what was kept of it lies."""
    lines = []
    for case in cases:
        if case.verdict != SAME or case.evidence:
            who = f"{case.plan.kind}, session {case.plan.number} of seed {case.plan.seed}"
            what = f"no step for {case.gap:.1f} s before step {case.gap_step}" if case.verdict == SAME else case.text
            lines += [f"{case.verdict}: {who}: {what}",
                      f"  repeat: {command} --seed {case.plan.seed} --session {case.plan.number}",
                      f"  kept:   {case.evidence}", *(f"    {deed}" for deed in case.deeds)]
    return lines


def why_not(cases: Sequence[Case], missing: Mapping[str, str]) -> str:
    """Return why this is no success, in a line; empty where every session computed the same and nothing is missing."""
    if not cases:
        return "no session ran"
    others = Counter(case.verdict for case in cases if case.verdict != SAME)
    parts = [f"{count} of {len(cases)} sessions {verdict}" for verdict, count in sorted(others.items())]
    return "; ".join([*parts, *(f"not run: {name}: {reason}" for name, reason in missing.items())])


def text(cases: Sequence[Case], missing: Mapping[str, str], about: Mapping[str, Any], command: str) -> str:
    """The whole. ``missing``: what was not run, and why; ``command``: what repeats a session, but for its number."""
    lines = [" ".join(f"{name}: {value}" for name, value in about.items()), "", *kinds(cases), "", *disturbances(cases)]
    if missing:
        lines += ["", *(f"not run: {name}: {reason}" for name, reason in missing.items())]
    if found := failures(cases, command):
        lines += ["", *found]
    return "\n".join(lines) + "\n"


def as_json(cases: Sequence[Case], missing: Mapping[str, str], about: Mapping[str, Any]) -> dict[str, Any]:
    counts = Counter(case.verdict for case in cases)
    return {**about, "verdicts": {verdict: counts[verdict] for verdict in VERDICTS}, "not_run": dict(missing),
            "disturbances": dict(Counter(deed.fault.what for case in cases for deed in case.deeds if deed.done)),
            "sessions": [{"kind": case.plan.kind, "number": case.plan.number, "seed": case.plan.seed,
                          "verdict": case.verdict, "text": case.text, "gap_s": round(case.gap, 3),
                          "gap_step": case.gap_step, "seconds": round(case.seconds, 1),
                          "deeds": [{**asdict(deed.fault), "step_of_program": deed.step, "when_s": round(deed.when, 2),
                                     "outcome": deed.outcome} for deed in case.deeds]} for case in cases]}
