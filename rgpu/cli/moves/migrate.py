"""``rgpu migrate S HOST``: move a session while its program runs; ``migrate status S``, ``migrate abort S``.

Two arguments are ambiguous when the first is ``status`` or ``abort``: that verb and a session, or a session of that
name and a host. They are read as the verb unless a session of that name exists; then the second argument decides, and
where it names both a session and a host neither is done. The options ``--to``, ``--status`` and ``--abort``, with the
session alone, never depend on names.
"""

from __future__ import annotations

from typing import Any

import click
from rich.text import Text

from rgpu.api import verbs
from rgpu.cli import common
from rgpu.cli.helpers import completing
from rgpu.cli.pool import connect
from rgpu.session.errors import NotFound, NotPermitted, UsageError
from rgpu.session.printable import printable

VERBS = ("status", "abort")


def parse_share(text: str | float) -> float:
    """``"50%"``, ``"0.5"`` → 0.5. Raises :class:`UsageError`."""
    number, percent, rest = str(text).strip().partition("%")
    try:
        share = float(number) / (100.0 if percent else 1.0)
    except ValueError:
        share = -1.0
    if rest or not 0.0 <= share < 1.0:
        raise UsageError(f"{text!r} is no share; write for example 50% or 0.5")
    return share


@click.command("migrate")
@click.argument("session", shell_complete=completing.sessions)
@click.argument("host", required=False, shell_complete=completing.hosts)
@click.option("--to", metavar="HOST", shell_complete=completing.hosts, help="HOST, whatever the session is called.")
@click.option("--status", "asked", flag_value="status", help="Print how far its move is.")
@click.option("--abort", "asked", flag_value="abort", help="Abort its move.")
@click.option("--mode", type=click.Choice(["auto", "copy", "replay"]), default="auto", show_default=True,
              help="Copy pages until few change; or copy a consistent snapshot and replay the calls since it. auto "
                   "predicts both and prints why it chose.")
@click.option("--max-slowdown", metavar="SHARE", default="50%", show_default=True,
              help="How much the program may be slowed while a replay catches up with it.")
@click.option("--max-downtime", metavar="TIME", help="The longest pause allowed (default: 10s).")
@click.option("--on-timeout", type=click.Choice(["abort", "freeze"]), default="abort", show_default=True,
              help="What to do when the pause gets longer: abort the move, or let the program wait.")
@click.option("--pages", type=click.Choice(["auto", "stream"]), default="auto", show_default=True,
              help="auto: between workers of one host out of the source's memory, else over the connection; "
                   "stream: always over the connection.")
@click.option("--dry-run", is_flag=True, help="Run every check, print the plan, change nothing.")
@common.operator_option
@common.pool_option
@common.output_option
@common.verb
def command(session: str, host: str | None, to: str | None, asked: str | None, mode: str, max_slowdown: str,
            max_downtime: str | None, on_timeout: str, pages: str, dry_run: bool, operator: bool,
            pool: str | None, output: str) -> None:
    """Move SESSION to HOST. `rgpu migrate status SESSION` and `rgpu migrate abort SESSION` work from anywhere.

    Every check runs before the program is paused. The move is committed in one step:
    until then the session runs where it was, whatever fails.
    """
    settings = common.settings(pool=pool, max_downtime=max_downtime)
    options = {"mode": mode, "max_downtime": settings.max_downtime, "max_slowdown": parse_share(max_slowdown),
               "on_timeout": on_timeout, "pages": pages}
    if (host is not None) + (to is not None) + (asked is not None) != 1:
        raise UsageError("give a session and where to: SESSION HOST or SESSION --to HOST; or SESSION with --status or "
                         "--abort")
    with connect(settings, common.role(operator)) as client:
        if host is not None and session in VERBS:
            asked, session, to = _read(client, session, host)
        elif host is not None:
            to = host
        if asked is not None:
            common.emit(client.call(f"session.move_{asked}", {"session": session}), output, _show_status)
        elif dry_run:
            common.emit(verbs.migrate(client, session, str(to), {**options, "dry_run": True}), output, _show_plan)
        else:
            quiet = output != "text" or not common.err.is_terminal
            common.emit(_move(client, session, str(to), options, quiet=quiet), output, _show)


def _read(client: Any, first: str, second: str) -> tuple[str | None, str, str | None]:
    """Interpret two arguments of which the first may be a verb: (verb or None, session, host or None)."""
    def is_session(name: str) -> bool:
        try:
            client.call("session.move_status", {"session": name})
        except NotFound:
            return False
        except NotPermitted:
            pass  # the session exists and is another user's
        return True

    if not is_session(first):
        return first, second, None
    if not any(row["host"] == second and row.get("state") != "lost" for row in verbs.hosts(client)):
        return first, second, None
    if is_session(second):
        raise UsageError(f"{first!r} is a session here, and {second!r} both a session and a host: write `rgpu migrate "
                         f"{first} --to {second}` or `rgpu migrate {second} --{first}`")
    return None, first, second


def _move(client: Any, session: str, host: str, options: dict[str, Any], *, quiet: bool) -> dict[str, Any]:
    if quiet:
        return verbs.migrate(client, session, host, options)
    with common.err.status(Text(f"moving {session} to {host}")) as status:
        def far(progress: dict[str, Any]) -> None:
            status.update(Text(printable(f"moving {session} to {host}: {_progress(progress)}")))

        return verbs.migrate(client, session, host, options, far)


def _progress(progress: dict[str, Any]) -> str:
    text = (f"{progress.get('phase', '')} ({progress.get('mode', '')}), round {progress.get('round', 0)}, "
            f"{progress.get('pages_sent', 0)} pages, {common.size(progress.get('bytes_sent', 0))}")
    if progress.get("behind_ms") is not None:
        text += f", the replay is {progress['behind_ms']:.0f} ms behind"
    if expected := progress.get("expected"):
        text += f"; expected: {_cost(expected)}"
    return text


def _cost(cost: dict[str, Any]) -> str:
    return f"{cost['downtime_ms']:.0f} ms stop, {cost['brownout_ms']:.0f} ms slowed in all, {cost['total_ms']:.0f} ms"


def _show(result: dict[str, Any]) -> None:
    common.out.print(
        f"{result['outcome']}: {result['from']} -> {result['to']}, epoch {result['epoch']}, by {result['mode']}\n"
        f"  downtime {result['downtime_ms']:.1f} ms and brownout {result['brownout_ms']:.1f} ms of "
        f"{result['total_ms']:.1f} ms, {result['rounds']} rounds, "
        f"{result['pages_sent']} pages sent ({result['pages_total']} in all, {common.size(result['bytes_sent'])}), "
        f"verified: {result['verified']}\n  {result['reason']}", markup=False)
    if result.get("pages_by") == "peer":
        common.out.print(f"  {common.size(result['bytes_pulled'])} pulled out of the source's memory", markup=False)
    if result["mode"] == "replay":
        common.out.print(
            f"  after the replay {result['mismatched_pages']} pages differed and were sent again "
            f"({common.size(result['repaired_bytes'])}); in a sample before, {result['sampled_mismatches']} of "
            f"{result['sampled_pages']} did", markup=False)
    for key in ("why", "fell_back"):
        if result.get(key):
            common.out.print(f"  {result[key]}", markup=False)


def _show_plan(plan: dict[str, Any]) -> None:
    common.out.print(f"{plan['session']} can move from {plan['from']} to {plan['to']}, {plan['device']}: "
                     f"{plan['reason']}", markup=False)
    found = plan.get("forecast") or {}
    if found:
        common.out.print(f"  {found['pages']} pages; at {found['assumed_speed'] / 1e9:.2f} GB/s (assumed; it is "
                         f"measured when the move begins):\n  copy: {_cost(found['copy'])}", markup=False)
        common.out.print(f"  replay: {_cost(found['replay'])}" if found.get("replay") else "  replay: not possible",
                         markup=False)
        common.out.print(f"  auto would take {found['mode']}: {found['why']}", markup=False)


def _show_status(status: dict[str, Any]) -> None:
    move = status.get("move")
    if move is None:
        common.out.print(f"{status['session']} is not being moved", markup=False)
        return
    common.out.print(f"{status['session']}: {move.get('source') or move.get('from')} -> "
                     f"{move.get('destination') or move.get('to')}, {move['state']}: {move['reason']}", markup=False)
    if status.get("progress"):
        common.out.print(f"  {_progress(status['progress'])}", markup=False)
