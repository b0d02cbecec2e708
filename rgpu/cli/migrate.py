"""``rgpu migrate S HOST``: move a session while its program runs."""

from __future__ import annotations

from typing import Any

import click

from rgpu.cli import common, completing
from rgpu.cli.pool import connect


@click.command("migrate")
@click.argument("session", shell_complete=completing.sessions)
@click.argument("host", shell_complete=completing.hosts)
@click.option("--max-downtime", metavar="TIME", help="Abort when the stop would last longer (default: 10s).")
@common.pool_option
@common.output_option
@common.verb
def command(session: str, host: str, max_downtime: str | None, pool: str | None, output: str) -> None:
    """Move SESSION to HOST.

    Every check runs before anything stops. The move is committed in one step:
    until then the session runs where it was, whatever fails.
    """
    settings = common.settings(pool=pool, max_downtime=max_downtime)
    arguments = {"session": session, "host": host, "options": {"max_downtime": settings.max_downtime}}
    with connect(settings) as client:
        if output == "json" or not common.err.is_terminal:
            result = client.call("session.migrate", arguments, timeout=600)
        else:
            with common.err.status(f"moving {session} to {host}") as status:
                result = client.call("session.migrate", arguments, timeout=600,
                                     on_progress=lambda p: status.update(_progress(session, host, p)))
    common.emit(result, output, _show)


def _progress(session: str, host: str, progress: dict[str, Any]) -> str:
    return (f"moving {session} to {host}: {progress.get('phase', '')}, round {progress.get('round', 0)}, "
            f"{progress.get('pages_sent', 0)} pages, {common.size(progress.get('bytes_sent', 0))}")


def _show(result: dict[str, Any]) -> None:
    common.out.print(
        f"{result['outcome']}: {result['from']} -> {result['to']}, epoch {result['epoch']}\n"
        f"  downtime {result['downtime_ms']:.1f} ms of {result['total_ms']:.1f} ms, {result['rounds']} rounds, "
        f"{result['pages_sent']} pages sent ({result['pages_total']} in all, "
        f"{common.size(result['bytes_sent'])}), verified: {result['verified']}\n  {result['reason']}", markup=False)
