"""PNG plots of runs over time, one line for each policy with and without rebalancing (first seed)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from rgpu.session.errors import StoreError, UsageError

SHOWN = {"allocated": "allocated share of the GPUs", "fragmented": "fragmented GPUs", "refused": "requests refused",
         "waiting": "mean waiting time, s", "moves": "moves"}
COLOURS = {"random": "tab:red", "best-fit": "tab:blue", "packing": "tab:orange", "fgd": "tab:green"}


def check() -> None:
    """Check that plots can be drawn. Raises :class:`UsageError` where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'rgpu-live[plot]'")


def plot(reports: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw one file for each of :data:`SHOWN` that has values; return their paths.

    Raises :class:`UsageError` without matplotlib, :class:`StoreError` when the folder cannot be written.
    """
    check()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, label in SHOWN.items():
            if not any(any(report["seeds"][0]["series"][name]) for report in reports):
                continue  # all values are zero
            figure, axes = pyplot.subplots(figsize=(6.4, 3.6))
            for report in reports:
                points = report["seeds"][0]["series"]
                axes.plot([at / _unit(report) for at in points["at"]], points[name], linewidth=1,
                          color=COLOURS.get(report["policy"]), linestyle="-" if report["rebalance"] else "--",
                          label=report["policy"] + (" + rebalancing" if report["rebalance"] else ""))
            axes.set(xlabel="tasks arrived" if _unit(reports[0]) == 1 else "virtual time, h", ylabel=label)
            axes.legend(fontsize=6)
            figure.tight_layout()
            written.append(folder / f"{name}.png")
            figure.savefig(written[-1], dpi=80)
            pyplot.close(figure)
    except OSError as error:
        raise StoreError(f"plots cannot be written to {folder}: {error.strerror}") from None
    return written


def _unit(report: dict[str, Any]) -> int:
    """Return the seconds of one unit of the time axis: an hour; when a pool is filled, a second (one task)."""
    return 3600 if report["churn_hours"] is not None else 1
