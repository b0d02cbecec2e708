"""``rgpu image …``: list, show, verify, export, import and remove the checkpoints of a pool's sessions."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any

import click

from rgpu.api.settings import parse_age
from rgpu.checkpoint.manifest.state import SessionState
from rgpu.checkpoint.store.archive import ArchiveReader, ArchiveWriter, copy_checkpoint
from rgpu.checkpoint.store.checkpoint_store import CheckpointStore
from rgpu.cli import asking, common
from rgpu.cli.groups import Group
from rgpu.cli.pool import connect
from rgpu.cli.tables import Column, Listing, list_options
from rgpu.link.control.control_client import ControlClient
from rgpu.session.errors import AlreadyExists, Corrupt

LONG = 3600.0  #: s that a verification or a collection may take
PIECE = 4 << 20


@click.group("image", cls=Group)
def command() -> None:
    """Checkpoints of sessions in the pool's store."""


COLUMNS = (
    Column("CHECKPOINT", lambda i: i["image"]), Column("", lambda i: {True: "*", None: "?"}.get(i["named"], "")),
    Column("SESSION", lambda i: i["session"], drop=1), Column("POSITION", lambda i: i["position"], drop=5),
    Column("EPOCH", lambda i: i["epoch"], drop=6), Column("MEMORY", lambda i: i["memory"], common.size, drop=4),
    Column("STORED", lambda i: i["stored"], common.size, drop=3), Column("AGE", lambda i: time.time() - i["created"],
                                                                        lambda s: common.age(s) if s >= 0 else
                                                                        "in the future", drop=2),
    Column("PAGES", lambda i: i["pages"], wide=True), Column("USER", lambda i: i["user"], wide=True),
    Column("NOTE", lambda i: i["error"], cut=True))
_operator = click.option("--operator", is_flag=True, help="Act with the operator's key: all users' checkpoints.")


@command.command("ls")
@click.argument("session", required=False)
@_operator
@common.pool_option
@list_options
@common.verb
def ls(session: str | None, operator: bool, pool: str | None, output: str, sort: str | None,
       watch: float | None) -> None:
    """List checkpoints, newest first; `*` marks those that a session would be recovered from."""
    listing = Listing(COLUMNS, "image", output, sort)
    with connect(common.settings(pool=pool), common.role(operator)) as client:
        listing.follow(lambda: client.call("image.ls", {"session": session}, timeout=120)["images"], watch)


@command.command("show")
@click.argument("checkpoint")
@_operator
@common.pool_option
@common.output_option
@common.verb
def show(checkpoint: str, operator: bool, pool: str | None, output: str) -> None:
    """Show what CHECKPOINT contains: session, position, regions, packs, statistics."""
    with connect(common.settings(pool=pool), common.role(operator)) as client:
        result = client.call("image.show", {"image": checkpoint}, timeout=120)
    common.emit(result, output, _show_one)


def _show_one(shown: dict[str, Any]) -> None:
    memory = sum(region["size"] for region in shown["regions"])
    for name, value in (("image", shown["image"]), ("session", shown["session"]), ("position", shown["position"]),
                        ("epoch", shown["epoch"]), ("counts", "yes" if shown["named"] else "no"),
                        ("built on", shown["base"] or "nothing"), ("regions", len(shown["regions"])),
                        ("memory", common.size(memory)), ("chunks", shown["chunks"]), ("packs", len(shown["packs"]))):
        common.out.print(f"{name:10} {value}", markup=False)
    for name, value in shown["statistics"].items():
        common.out.print(f"  {name}: {value}", markup=False)


@command.command("verify")
@click.argument("checkpoint")
@_operator
@common.pool_option
@common.output_option
@common.verb
def verify(checkpoint: str, operator: bool, pool: str | None, output: str) -> None:
    """Read every byte of CHECKPOINT and compare it with its hashes."""
    with connect(common.settings(pool=pool), common.role(operator)) as client:
        result = client.call("image.verify", {"image": checkpoint}, timeout=LONG)
    common.emit(result, output, lambda v: common.out.print(
        f"checkpoint {v['image']} is good: {v['pages']} pages, {v['chunks']} chunks, {v['packs']} packs", markup=False))


@command.command("rm")
@click.argument("checkpoint")
@_operator
@asking.yes_option
@common.pool_option
@common.output_option
@common.verb
def rm(checkpoint: str, operator: bool, yes: bool, pool: str | None, output: str) -> None:
    """Remove CHECKPOINT; refused for the checkpoint that its session would be recovered from.

    A person at a terminal is asked first.
    """
    with connect(common.settings(pool=pool), common.role(operator)) as client:
        asking.confirm(yes, lambda: [_what_is_removed(client.call("image.show", {"image": checkpoint}, timeout=120))])
        result = client.call("image.rm", {"image": checkpoint}, timeout=LONG)
    common.emit(result, output, lambda v: common.out.print(
        f"checkpoint {v['image']} is removed; {v['condemned_packs']} packs go when their readers had time to finish",
        markup=False))


def _what_is_removed(shown: dict[str, Any]) -> str:
    return (f"checkpoint {shown['image']} of {shown['session']} (position {shown['position']}, "
            f"{common.size(sum(region['size'] for region in shown['regions']))}) is removed for good")


@command.command("gc")
@click.option("--keep-last", type=click.IntRange(1), metavar="N", help="Keep the newest N checkpoints of each session.")
@click.option("--older-than", metavar="AGE", help="Remove checkpoints older than that: 12h, 7d.")
@click.option("--ended", metavar="AGE", help="Remove the checkpoints of sessions that ended at least so long ago.")
@click.option("--grace", default="15m", show_default=True, metavar="AGE",
              help="How long a pack that no checkpoint names is kept, for readers that still use it.")
@click.option("--dry-run", is_flag=True, help="Only print what would be removed.")
@_operator
@common.pool_option
@common.output_option
@common.verb
def gc(keep_last: int | None, older_than: str | None, ended: str | None, grace: str, dry_run: bool, operator: bool,
       pool: str | None, output: str) -> None:
    """Remove packs that no checkpoint needs, and checkpoints that the given rules release.

    Keeps the checkpoints that the registry names, and the packs that a running writer needs.
    """
    args = {"keep_last": keep_last, "max_age": None if older_than is None else parse_age(older_than),
            "ended": None if ended is None else parse_age(ended), "grace": parse_age(grace), "dry_run": dry_run}
    with connect(common.settings(pool=pool), common.role(operator)) as client:
        result = client.call("image.gc", args, timeout=LONG)
    common.emit(result, output, _show_gc)


def _show_gc(result: dict[str, Any]) -> None:
    would = "would go" if result["dry_run"] else "are gone"
    common.out.print(f"{len(result['images'])} checkpoints and {len(result['packs'])} packs {would}, "
                     f"{common.size(result['freed'])}; {len(result['condemned_packs'])} packs wait", markup=False)
    for reason in result["blocked"]:
        common.err.print(f"no pack is removed beside it: {reason}", markup=False)


# -- export, import---------------------------------------------------------------------
class _Asked:
    """A checkpoint that a node reads for this process."""

    def __init__(self, client: ControlClient, name: str) -> None:
        self.name, self._client = name, client
        data, size = b"", 1
        while len(data) < size:
            answer = client.call("image.state", {"image": name, "offset": len(data)}, timeout=120)
            size, self.facts, self.statistics = answer["size"], answer["facts"], answer["statistics"]
            if not answer["data"]:
                raise Corrupt(f"the node sends no more of the state of {name}", reason="cut short")
            data += answer["data"]
        self._state = SessionState.decode(data)

    @property
    def state(self) -> SessionState:
        return self._state

    def read_pages(self, region: int, start: int, count: int) -> list[bytes | None]:
        answer = self._client.call("image.pages", {"image": self.name, "region": region, "start": start,
                                                   "count": count}, timeout=120)
        pages = list(answer["pages"])
        if len(pages) != count or any(page is not None and not isinstance(page, bytes) for page in pages):
            raise Corrupt(f"the node sent {len(pages)} pages instead of {count}", reason="pages")
        return pages


@command.command("export")
@click.argument("checkpoint")
@click.argument("file", type=click.Path(path_type=Path))
@_operator
@common.pool_option
@common.output_option
@common.verb
def export(checkpoint: str, file: Path, operator: bool, pool: str | None, output: str) -> None:
    """Write CHECKPOINT into FILE, which `rgpu image import` reads in any pool.

    The file is readable by you alone: it contains the program's memory, and no key protects it.
    """
    if file.exists():
        raise AlreadyExists(f"{file} exists")
    with connect(common.settings(pool=pool), common.role(operator)) as client:
        asked = _Asked(client, checkpoint)
        archive = ArchiveWriter(file.absolute())
        try:
            counts = copy_checkpoint(asked, CheckpointStore(archive), checkpoint, facts=asked.facts)
            archive.commit()
        except BaseException:
            archive.discard()
            raise
    common.emit({"image": checkpoint, "file": str(file), "pages": counts["pages"], "bytes": file.stat().st_size},
                output, lambda v: common.out.print(f"{v['file']}: {common.size(v['bytes'])}", markup=False))


@command.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--name", help="Name of the checkpoint in this pool (default: the one it had).")
@common.pool_option
@common.output_option
@common.verb
def take_in(file: Path, name: str | None, pool: str | None, output: str) -> None:
    """Take the checkpoint in FILE into the pool's store. No session uses it until it is restored from."""
    with ArchiveReader(file) as archive:
        archive.checkpoint()  # a damaged file is refused here, before it is sent to the node
    number = secrets.token_hex(16)
    with connect(common.settings(pool=pool)) as client, open(file, "rb") as opened:
        offset = 0
        while piece := opened.read(PIECE):
            offset = client.call("image.import", {"id": number, "offset": offset, "data": piece}, timeout=120)["size"]
        result = client.call("image.import", {"id": number, "end": True, "name": name}, timeout=LONG)
    common.emit(result, output, lambda v: common.out.print(
        f"checkpoint {v['image']}: {v['pages']} pages, {common.size(v['bytes'])}", markup=False))
