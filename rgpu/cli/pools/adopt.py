"""``rgpu pool adopt``: correct a registry that went back to an older state."""

from __future__ import annotations

from typing import Any

import click

from rgpu.cli import common
from rgpu.cli.pool import connect, pool_files
from rgpu.session.errors import Refused, UsageError

SECONDS = 180.0


@click.command("adopt")
@click.option("--yes", is_flag=True, help="Do it; without this only the plan is shown.")
@click.option("--keep", "kept", multiple=True, metavar="SESSION=HOST",
              help="For a session that is claimed twice: the copy of HOST continues, the others are forgotten.")
@click.option("--without", multiple=True, metavar="HOST", help="This host will not return; its sessions are recovered.")
@click.option("--forget", multiple=True, metavar="SESSION", help="Give this session up, wherever it runs.")
@common.pool_option
@common.output_option
@common.verb
def command(yes: bool, kept: tuple[str, ...], without: tuple[str, ...], forget: tuple[str, ...], pool: str | None,
            output: str) -> None:
    """Repair a registry that was restored from a backup, wiped or exchanged.

    Every node reports its sessions. Sessions that run are written into the
    registry as they are, each at an epoch above all that were seen; those that
    ended since are ended there, those that no node holds are recovered. Then the
    nodes trust the registry again. Programs run on meanwhile.

    Conflicts that the reports leave open are printed; nothing is done before you
    decide them.
    """
    keep = dict(_pair(text) for text in kept)
    settings = common.settings(pool=pool)
    endpoints = [{"address": e.address, "public": e.public, "host": e.host}
                 for e in pool_files(settings).read_description().endpoints]
    with connect(settings, role="operator") as client:
        found = client.call("pool.adopt", {"yes": yes, "keep": keep, "without": list(without),
                                           "forget": list(forget), "endpoints": endpoints}, timeout=SECONDS)
    common.emit(found, output, _show)
    if found["went_back"] and found["problems"]:
        raise Refused(f"{len(found['problems'])} things are yours to decide first")


def _pair(text: str) -> tuple[str, str]:
    session, _, host = text.partition("=")
    if not session or not host:
        raise UsageError(f"--keep {text!r} is no SESSION=HOST")
    return session, host


def _show(found: dict[str, Any]) -> None:
    def say(text: str) -> None:
        common.out.print(text, markup=False)

    if not found["went_back"]:
        say("the registry did not go back: there is nothing to adopt")
        return
    say(f"the registry went back: {found['went_back']}")
    changed = [step for step in found["steps"] if step["action"] != "keep"]
    if changed:
        common.table(("SESSION", "WHAT", "HOST", "EPOCH", "WHY"), [
            (step["session"], step["action"], step["host"], f"{step['before'] or '-'} → {step['epoch']}",
             step["reason"] + (f"; forgotten on {', '.join(step['stale'])}" if step["stale"] else ""))
            for step in changed], drop=("EPOCH", "HOST"), cut=("WHY",))
    say(f"{len(found['steps']) - len(changed)} sessions stay as they are on record")
    for name in found["keys"]:
        say(f"let in again: {name}")
    for problem in found["problems"]:
        say(f"to be decided: {problem}")
    if found["done"]:
        say("done" + (f"; not back yet, so automation is paused: {', '.join(found['away'])}" if found["away"] else ""))
    elif not found["problems"]:
        say("nothing was changed; --yes does it")
