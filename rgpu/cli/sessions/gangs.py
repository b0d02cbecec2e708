"""Gangs on the command line: the request of ``rgpu run`` with ``--ranks``, ``--spread``, ``--gang`` (`options.gang` of
session.create), and the display of gangs."""

from __future__ import annotations

from typing import Any

from rgpu.api import verbs
from rgpu.api.settings import Settings, parse_age
from rgpu.cli import common
from rgpu.cli.common import age, size
from rgpu.cli.pool import connect
from rgpu.cli.tables import Column, Listing, lines
from rgpu.session.devices import MAX_LIST
from rgpu.session.errors import UsageError

DEADLINE = 600.0  #: seconds


def read(name: str, gpus: str | None, ranks: int | None, spread: bool, gang: str | None, of: int | None,
         deadline: str | None, lazy: bool) -> tuple[dict[str, Any], str | None]:
    """Return the requested gang, and the GPUs of each of its ranks. Raises :class:`UsageError`."""
    if lazy:
        raise UsageError("--lazy places a session with its program's first call; the ranks of a gang are placed "
                         "together, before the program starts")
    if spread:
        if ranks is not None or gang is not None or of is not None:
            raise UsageError("--spread is one list of devices for the processes of this run: without --ranks, --gang "
                             "and --of")
        if gpus is None or not gpus.isdigit() or not 0 < int(gpus) <= MAX_LIST:
            raise UsageError(f"--spread wants --gpus N, how many whole devices of all hosts together: 1 to {MAX_LIST}")
        ranks, gpus = int(gpus), "1"
    if ranks is None:
        raise UsageError("--gang, --of and --gang-deadline are for a run that says how many processes of it use GPUs: "
                         "--ranks N")
    if of is not None and gang is None:
        raise UsageError("--of counts the ranks of several runs, which find each other by --gang NAME")
    if of is not None and ranks > of:
        raise UsageError(f"--ranks {ranks} are more than the gang has in all: --of {of}")
    patience = parse_age(deadline) if deadline is not None else DEADLINE
    if patience <= 0:
        raise UsageError("--gang-deadline 0 gives the other ranks no time to come: write for example 90s or 10m")
    return {"name": gang or name, "ranks": ranks, "of": of or ranks, "spread": spread,
            "deadline": patience}, gpus


# -- showing ------------------------------------------------------------------------


def _ranks(row: dict[str, Any]) -> str:
    """The number of ranks that have a process, of all ranks."""
    came = sum(1 for one in row["members"] if one["came"] and "/" not in one["session"])
    return f"{came}/{row['ranks']}" if row["members"] and not row["spread"] else str(row["ranks"])


def _collective(last: dict[str, Any]) -> str:
    return f"{last['number']} {last['kind']} {size(last['bytes'])}"


GANGS = (Column("GANG", lambda g: g["gang"]), Column("USER", lambda g: g.get("user"), wide=True),
         Column("STATE", lambda g: g["state"]), Column("RANKS", _ranks),
         Column("GENERATION", lambda g: g["generation"] or None, drop=2),
         Column("HOSTS", lambda g: ",".join(g["hosts"]), drop=1),
         Column("AGE", lambda g: g.get("age_s"), age, drop=3),
         Column("NOTE", lambda g: g.get("note") or "", cut=True))
MEMBERS = (Column("RANK", lambda m: m["rank"]), Column("SESSION", lambda m: m["session"]),
           Column("STATE", lambda m: m["state"]), Column("HOST", lambda m: m["host"]),
           Column("DEVICE", lambda m: m["device"]), Column("EPOCH", lambda m: m["epoch"]),
           Column("CALLS", lambda m: m["calls"]), Column("MEMORY", lambda m: m["memory_bytes"], size),
           Column("LAST COLLECTIVE", lambda m: m["collective"], _collective),
           Column("NOTE", lambda m: "no process yet" if m["came"] is False else ""))


def follow(settings: Settings, everything: bool, all_users: bool, output: str, sort: str | None,
           watch: float | None) -> None:
    """Print the pool's gangs, repeatedly with ``watch``."""
    listing = Listing(GANGS, "gang", output, sort)
    with connect(settings, common.role(all_users)) as client:
        listing.follow(lambda: verbs.gangs(client, everything=everything, all_users=all_users), watch)


def show(row: dict[str, Any]) -> None:
    """Print one gang: its common fields, each rank in a line, and which rank waits for which."""
    for key in ("gang", "user", "state", "generation", "ranks", "spread", "position", "reason"):
        if row.get(key) not in (None, "", []):
            common.out.print(f"{key}: {row[key]}", markup=False)
    for run in row["runs"]:
        last = run["first"] + run["ranks"] - 1
        ranks = f"rank {last}" if run["ranks"] == 1 else f"ranks {run['first']} to {last}"
        common.out.print(f"run: {run['run']} on {run['client'] or 'an unknown host'}: {ranks}", markup=False)
    for line in lines(MEMBERS, row["members"]) if row["members"] else ():
        common.out.print(line, markup=False, soft_wrap=True)
    for said in row["waits"]:
        common.out.print(said, markup=False, soft_wrap=True)
