"""``rgpu rebalance``: the moves that admit waiting requests, or reduce the pool's fragmentation."""

from __future__ import annotations

from typing import Any

import click

from rgpu.cli import common
from rgpu.cli.pool import connect
from rgpu.session.errors import UsageError

PATIENCE = 120.0  #: seconds without a message from the pool while a plan is carried out


@click.command("rebalance")
@click.option("--apply", is_flag=True, help="Carry the plan out, and wait for its end.")
@click.option("--auto", type=click.Choice(["on", "off"]),
              help="Whether the pool does this by itself from now on when it is needed (default: on with etcd).")
@common.pool_option
@common.output_option
@common.verb
def command(apply: bool, auto: str | None, pool: str | None, output: str) -> None:
    """Print the moves that the pool would make now, with their reasons.

    They admit the first request that waits (`rgpu run --queue`) when what it needs is free in total
    but not in one place; when no request waits, they reduce fragmentation. Each session is moved
    at most once in ten minutes.
    """
    if apply and auto is not None:
        raise UsageError("--auto sets how the pool behaves, --apply does something now: give one of them")
    args = {"apply": apply, "auto": None if auto is None else auto == "on"}
    with connect(common.settings(pool=pool), role="operator") as client:
        found = client.call("pool.rebalance", args, timeout=PATIENCE, on_progress=lambda values: None)
    common.emit(found, output, _show)


def _show(found: dict[str, Any]) -> None:
    state = "on" if found["auto"] else "off"
    common.out.print(f"automatic rebalancing is {state}" + (f"; {found['paused']}" if found["paused"] else "")
                     + f"; {found['fragmentation']:.1%} of the pool is fragmented", markup=False)
    common.out.print(found["reason"], markup=False)
    results = {result["session"]: result for result in found.get("results") or []}
    for move in found["moves"]:
        done = results.get(move["session"])
        said = f" ({done['outcome']}, {done['downtime_ms']:.0f} ms of downtime)" if done else ""
        where = f"{move['session']}: {move['from']} -> {move['to']} {move['device']}"
        common.out.print(f"  {where}{said}: {move['reason']}", markup=False)
    if found["moves"] and not found["applied"]:
        common.out.print("nothing was moved: `rgpu rebalance --apply` does it", markup=False)
