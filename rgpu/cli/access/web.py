"""``rgpu web login``: a link that logs this user in on a node's web page."""

from __future__ import annotations

from typing import Any

import click

from rgpu.api import verbs
from rgpu.cli import common
from rgpu.cli.groups import Group
from rgpu.cli.helpers import completing
from rgpu.cli.pool import connect, pool_files
from rgpu.link.control.control_client import ControlClient
from rgpu.link.keys import Endpoint, KeyPair
from rgpu.session.errors import NotFound, Refused


@click.group("web", cls=Group)
def command() -> None:
    """The web page of the pool (docs/operators/web.md)."""


@command.command("login")
@click.option("--host", metavar="HOST", shell_complete=completing.hosts, help="The page of this host (default: the "
              "first one that serves one).")
@click.option("--url", metavar="URL", help="Address that the link begins with, where the browser reaches the page "
              "under another one (a tunnel).")
@common.operator_option
@common.pool_option
@common.output_option
@common.verb
def login(host: str | None, url: str | None, operator: bool, pool: str | None, output: str) -> None:
    """Print a link that logs you in on the web page: good once, for five minutes.

    The browser that opens it has your key's rights for eight hours; with --operator, the operator's key's.
    """
    settings, role = common.settings(pool=pool), common.role(operator)
    files = pool_files(settings)
    with connect(settings, role) as client:
        node = serving(verbs.hosts(client), host)
        # The public key is read from the pool's description, never from an answer.
        known = {one.host: one for one in files.read_description().endpoints}.get(node["host"])
        if known is None:
            raise NotFound(f"the address of {node['host']} is not known here yet: try again in a moment")
    keys = KeyPair.load(files.key_for(role))
    with ControlClient(keys, [Endpoint(node["address"], known.public, node["host"])]) as client:
        answer = client.call("web.login", {})
    base = (url or str(answer["url"])).rstrip("/")
    common.emit({"url": f"{base}/login?code={answer['code']}", "host": node["host"], "user": keys.user or keys.name,
                 "role": keys.role, "seconds": answer["seconds"]}, output, _show)


def serving(nodes: list[dict[str, Any]], host: str | None) -> dict[str, Any]:
    """Return the row of the host whose page is selected. Raises :class:`NotFound`, :class:`Refused`."""
    pages = [node for node in nodes if node.get("web")]
    if host is None:
        if not pages:
            raise Refused("no host of the pool serves the web page: start one's daemon with `rgpu server --web "
                          "HOST:PORT`, or the local pool with `rgpu up --web HOST:PORT`")
        return pages[0]
    for node in nodes:
        if node["host"] == host:
            if node in pages:
                return node
            others = f"; {', '.join(one['host'] for one in pages)} does" if pages else ""
            raise Refused(f"{host} serves no web page{others}")
    raise NotFound(f"no host is called {host}", host=host)


def _show(value: dict[str, Any]) -> None:
    common.out.print(value["url"], markup=False)
    common.err.print(f"opens the page of {value['host']} as {value['user']} ({value['role']}), once, within "
                     f"{value['seconds'] / 60:.0f} minutes", markup=False)
