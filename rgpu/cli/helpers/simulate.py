"""``rgpu simulate``: the pool's own scheduling code over a recorded task list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rgpu.cli import common
from rgpu.session.errors import UsageError

COLUMNS = ("POLICY", "REBALANCE", "LOAD", "ALLOCATED", "FRAGMENTED", "REFUSED", "MOVES", "WAITING", "DECISION",
           "P99")


@click.command("simulate")
@click.option("--nodes", type=click.Path(path_type=Path), required=True, help="The hosts, CSV.")
@click.option("--tasks", type=click.Path(path_type=Path), required=True, help="The recorded tasks, CSV.")
@click.option("--policy", default="fgd", show_default=True,
              help="Placement policies, several with commas, or all; a wrong name lists them.")
@click.option("--rebalance", type=click.Choice(["on", "off", "both"]), default="off", show_default=True)
@click.option("--gangs", is_flag=True, help="Spread tasks of several GPUs over several hosts where one has too few.")
@click.option("--load", type=click.FloatRange(0.01, 10), default=1.3, show_default=True,
              help="Demand as a multiple of the pool's GPUs.")
@click.option("--seeds", type=click.IntRange(1, 1000), default=5, show_default=True)
@click.option("--churn/--no-churn", default=None,
              help="Whether tasks end when they did; default: at loads up to 1.")
@click.option("--hours", type=click.FloatRange(0.01, 10000), default=4.0, show_default=True,
              help="Virtual time, with churn.")
@click.option("--move-rate", type=click.FloatRange(1), default=1900.0, show_default=True,
              help="MiB a second that a move copies.")
@click.option("--move-pause", type=click.FloatRange(0), default=2.0, show_default=True,
              help="Seconds for which a moved program is paused.")
@click.option("--gpu-memory", type=click.IntRange(0), default=16384, show_default=True,
              help="MiB that a session with a whole GPU uses.")
@click.option("--plot", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Write PNG files there.")
@common.output_option
@common.verb
def command(nodes: Path, tasks: Path, policy: str, rebalance: str, load: float, seeds: int, churn: bool | None,
            hours: float, move_rate: float, move_pause: float, gpu_memory: int, plot: Path | None, gangs: bool,
            output: str) -> None:
    """Replay recorded tasks against placement, queue and rebalancing, and print the results."""
    from rgpu.migrate.scheduling.costs import Costs
    from rgpu.migrate.scheduling.policies import POLICIES
    from rgpu.migrate.simulation import plots, report, trace
    from rgpu.migrate.simulation.run import Options

    if plot is not None:
        plots.check()  # fails before the simulation rather than after it
    names = list(POLICIES) if policy == "all" else policy.split(",")
    unknown = [name for name in names if name not in POLICIES]
    if unknown:
        raise UsageError(f"no placement policy is called {unknown[0]!r}; there are: {', '.join(POLICIES)}, all")
    churning = load <= 1 if churn is None else churn
    hosts, recorded = trace.read_nodes(nodes), trace.read_tasks(tasks, lives=churning)
    costs, reports = Costs(rate_mib=move_rate, pause=move_pause), []
    for name in names:
        for moving in {"on": [True], "off": [False], "both": [False, True]}[rebalance]:
            def options(seed: int, name: str = name, moving: bool = moving) -> Options:
                return Options(name, moving, seed, gpu_memory_mib=gpu_memory, costs=costs, gangs=gangs)

            def progress(line: str, title: str = f"{name}{' + rebalancing' if moving else ''}") -> None:
                common.err.print(f"{title}, {line}", markup=False)

            reports.append(report.simulate(hosts, recorded, load, seeds, hours if churning else None, options,
                                           progress))
    if plot is not None:
        for path in plots.plot(reports, plot):
            common.err.print(f"wrote {path}", markup=False)
    common.emit(reports[0] if len(reports) == 1 else reports, output, lambda _: _show(reports))


def _show(reports: list[dict[str, Any]]) -> None:
    common.table(COLUMNS, (
        (r["policy"], "on" if r["rebalance"] else "off", f"{r['load']:g}", f"{r['mean']['allocated_share']:.2%}",
         f"{r['mean']['fragmented_gpus']:.1f}", f"{r['mean']['refused']:.1f}", f"{r['mean']['moves']:.1f}",
         f"{r['mean']['waiting_s']:.1f} s", f"{r['mean']['decision_us']:.0f} us",
         f"{r['mean']['decision_p99_us']:.0f} us") for r in reports), drop=("P99", "DECISION", "WAITING", "MOVES"))
