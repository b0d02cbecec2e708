"""The benchmark's figures: medians over rounds, ratios, targets; as text and as JSON. No I/O but :meth:`Table.save`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.support.workload import Outcome

#: Units of which more is better: their ratio is remote ÷ native too, so below 1 is a loss.
RATES = ("GB/s", "TFLOP/s")


@dataclass(frozen=True)
class Target:
    """What a row is to reach. ``ratio``: a time's remote ÷ native at most, a rate's native ÷ remote at most.
    ``value``: the remote figure itself, at most for a time, at least for a rate."""

    row: str  #: the begin of the row's name
    condition: str
    ratio: float | None = None
    value: float | None = None


TARGETS = (
    Target("GPT-2 training step", "loopback", ratio=1.03), Target("GPT-2 generation", "loopback", ratio=1.10),
    Target("CNN training step", "loopback", ratio=1.10), Target("tiny launch", "loopback", ratio=1.4),
    Target("graph replay", "loopback", ratio=1.5), Target("GEMM", "loopback", ratio=1.01),
    Target(".item()", "loopback", value=120.0), Target("to device, 256 MiB", "loopback", value=6.0),
    Target("from device, 256 MiB", "loopback", value=5.0), Target("GPT-2 training step", "rtt-1", ratio=1.10),
    Target("to device, 256 MiB", "shared", value=20.0), Target("from device, 256 MiB", "shared", value=20.0),
)


class Table:
    """Collects outcomes; ``of`` names the rows of each workload."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path, self.about = path, about
        self.of: dict[str, list[str]] = {}
        self.errors: list[dict[str, str]] = []
        self._units: dict[str, str] = {}
        self._values: dict[tuple[str, str], list[float]] = {}
        self._counts: dict[tuple[str, str], dict[str, list[float]]] = {}

    def add(self, workload: str, side: str, outcome: Outcome) -> None:
        names = self.of.setdefault(workload, [])
        for name, (unit, value) in outcome.rows.items():
            if name not in names:
                names.append(name)
            self._units[name] = unit
            self._values.setdefault((name, side), []).append(value)
        for name, counts in outcome.counts.items():
            kept = self._counts.setdefault((name, side), {})
            for key, value in counts.items():
                kept.setdefault(key, []).append(value)
        if outcome.error:
            self.errors.append({"workload": workload, "side": side, "error": outcome.error})

    def rows(self, names: Iterable[str] | None = None) -> list[dict[str, Any]]:
        """``name``, ``unit``, ``native``, ``remote``, ``ratio`` (remote ÷ native), ``condition``, counts per step."""
        wanted = list(names) if names is not None else [name for rows in self.of.values() for name in rows]
        found = []
        for name in wanted:
            native = self._median(name, "native")
            sides = [side for row, side in self._values if row == name and side != "native"]
            for side in sides or ["-"]:
                remote = self._median(name, side)
                row: dict[str, Any] = {
                    "name": name, "unit": self._units[name], "native": native, "remote": remote,
                    "ratio": remote / native if native and remote is not None else None, "condition": side,
                    "rounds": len(self._values.get((name, side), ()))}
                row.update({f"{key}_per_step": statistics.median(values)
                            for key, values in self._counts.get((name, side), {}).items()})
                found.append(row)
        return found

    def _median(self, name: str, side: str) -> float | None:
        values = self._values.get((name, side))
        return statistics.median(values) if values else None

    def text(self, names: Iterable[str] | None = None) -> str:
        """The table for a terminal."""
        head = f"{'row':32s} {'condition':12s} {'unit':8s} {'native':>10s} {'remote':>10s} {'ratio':>7s}" \
               f" {'awaited':>8s} {'calls':>8s} {'bytes':>10s} {'agent':>9s} {'worker':>9s}"
        lines = [head]
        for row in self.rows(names):
            cpu = [row.get(f"{who}_cpu_s_per_step") for who in ("agent", "worker")]
            lines.append(
                f"{row['name'][:32]:32s} {row['condition']:12s} {row['unit']:8s} {_number(row['native']):>10s} "
                f"{_number(row['remote']):>10s} {_ratio(row['ratio']):>7s} "
                f"{_number(row.get('awaited_calls_per_step')):>8s} {_number(row.get('calls_per_step')):>8s} "
                f"{_number(row.get('bytes_per_step')):>10s} "
                + " ".join(f"{_number(None if c is None else c * 1e6) + ' us':>9s}" for c in cpu))
        return "\n".join(lines)

    def verdicts(self) -> str:
        """One line for each target: reached, missed, or not measured."""
        lines = []
        for target in TARGETS:
            rows = [row for row in self.rows() if row["name"].startswith(target.row)
                    and row["condition"] == target.condition and row["remote"] is not None]
            for row in rows:
                word = "reached" if reached(row, target) else "MISSED"
                lines.append(f"{word:8s} {row['name']} ({target.condition}): "
                             + (f"ratio {_ratio(row['ratio'])}, to reach {target.ratio:g}" if target.ratio else
                                f"{_number(row['remote'])} {row['unit']}, to reach {target.value:g}"))
            if not rows:
                lines.append(f"{'-':8s} {target.row} ({target.condition}): not measured")
        return "\n".join(lines)

    def save(self) -> None:
        content = {**self.about, "rows": self.rows(), "targets": self.verdicts().splitlines(), "errors": self.errors}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(content, indent=1) + "\n")


def reached(row: Mapping[str, Any], target: Target) -> bool:
    """Whether a measured row meets a target."""
    rate = row["unit"] in RATES
    if target.value is not None:
        return bool(row["remote"] >= target.value if rate else row["remote"] <= target.value)
    assert target.ratio is not None
    if row["ratio"] is None:
        return False
    return bool((1 / row["ratio"] if rate else row["ratio"]) <= target.ratio)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
