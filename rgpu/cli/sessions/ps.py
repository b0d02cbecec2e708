"""``rgpu ps``: the sessions of the pool."""

from __future__ import annotations

from typing import Any

import click

from rgpu.api import verbs
from rgpu.cli import common, selecting
from rgpu.cli.common import age, moment, size
from rgpu.cli.pool import connect, pool_files
from rgpu.cli.runs import finding
from rgpu.cli.runs import listing as running
from rgpu.cli.sessions import gangs
from rgpu.cli.tables import Column, Listing, list_options
from rgpu.session.errors import UsageError

SESSION = Column("SESSION", lambda s: s["session"])
USER = Column("USER", lambda s: s.get("user"))
STATE = Column("STATE", lambda s: s["state"])
HOST = Column("HOST", lambda s: s.get("host"))
NOTE = Column("NOTE", lambda s: s.get("note") or "", cut=True)
MORE = (Column("USER", lambda s: s.get("user"), wide=True),
        Column("LABELS", lambda s: ",".join(f"{k}={v}" for k, v in (s.get("labels") or {}).items()), wide=True),
        Column("GANG", lambda s: f"{s['gang']}[{s['rank']}]" if s.get("gang") and s.get("rank") is not None else
               s.get("gang"), wide=True),
        Column("AGE", lambda s: s.get("age_s"), age, wide=True),
        Column("COMMAND", lambda s: s.get("command"), wide=True))
LIVE = (SESSION, STATE, HOST, Column("EPOCH", lambda s: s["epoch"] or None, drop=5),
        Column("MEMORY", lambda s: s.get("memory_bytes"), size, drop=2),
        Column("GPU", lambda s: s.get("gpu_share"), lambda share: f"{share:.0%}", drop=3),
        Column("OF", lambda s: s.get("compute_limit"), lambda share: f"{share:.0%}", drop=4),
        Column("CALLS", lambda s: s.get("calls"), drop=6), Column("AWAITED", lambda s: s.get("awaited_calls"), drop=7),
        Column("PID", lambda s: s.get("pid"), drop=8), Column("WORKER", lambda s: s.get("worker_pid"), drop=9),
        *MORE, Column("NOTE", NOTE.value, drop=1, cut=True))
ALL = (SESSION, STATE, Column("HOST", HOST.value, drop=4), Column("EXIT", lambda s: s.get("exit_code"), drop=1),
       Column("ENDED", lambda s: s.get("ended"), moment, drop=2),
       Column("LASTED", lambda s: s.get("lasted_s"), age, drop=3),
       Column("MEMORY", lambda s: s.get("memory_bytes"), size, drop=5), *MORE, NOTE)


@click.command("ps")
@click.option("-a", "--all", "everything", is_flag=True, help="Also sessions that ended or failed: exit code, when, "
              "how long they lasted, and why.")
@click.option("--gangs", "of_gangs", is_flag=True, help="Gangs instead: their ranks, their hosts, and which rank the "
              "others wait for (-o json: with all members).")
@click.option("--detached", is_flag=True, help="Only detached runs of this machine, without a request to a pool.")
@selecting.session_options
@click.option("--all-users", is_flag=True, help="All users', with the operator's key (default: your own).")
@common.pool_option
@list_options
@common.verb
def command(everything: bool, all_users: bool, pool: str | None, output: str, sort: str | None, watch: float | None,
            hosts: tuple[str, ...], states: tuple[str, ...], users: tuple[str, ...], labels: tuple[str, ...],
            detached: bool, of_gangs: bool) -> None:
    """List sessions (where they run, what they hold, how often they wait) and requests that wait for a place.

    Detached runs of this machine are among them, also those whose program has not used the GPU yet.
    """
    if of_gangs:
        if detached or hosts or states or users or labels:
            raise UsageError("--gangs lists gangs: without --detached, --host, --state, --user and --label")
        gangs.follow(common.settings(pool=pool), everything, all_users, output, sort, watch)
        return
    columns: tuple[Column, ...] = ALL if everything else LIVE
    if all_users:
        columns = (SESSION, USER, *(column for column in columns[1:] if column.title != USER.title))
    listing = Listing(columns, "session", output, sort)
    selecting.read_labels(labels)
    everything = everything or bool({"ended", "failed"} & set(states))
    settings = common.settings(pool=pool)
    runs = finding.runs(settings)
    if detached:
        listing.follow(lambda: selecting.select(running.rows(runs, everything), hosts, states, users, labels), watch)
        return
    files = pool_files(settings)
    with connect(settings, common.role(all_users)) as client:

        def look() -> list[dict[str, Any]]:
            found = verbs.sessions(client, everything=everything, all_users=all_users)
            found = running.merged(found, runs, files.root, everything)
            return selecting.select(found, hosts, states, users, labels)

        listing.follow(look, watch)
