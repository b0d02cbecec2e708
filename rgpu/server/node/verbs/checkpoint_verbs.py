"""Verbs about checkpoints for users and operators (`rgpu image …`), answered by any node.

A user sees the checkpoints that sessions of its keys wrote, an operator those of all users; checkpoints that
a version without users wrote are shown to all and removed by operators. Only
the registry's records define which checkpoints count, so `rm` and `gc` read them first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import structlog

from rgpu.checkpoint.store import collect, retention
from rgpu.checkpoint.store.checkpoint_store import CheckpointInfo, CheckpointStore
from rgpu.checkpoint.store.grants import UserCheckpoints
from rgpu.checkpoint.store.reader import StoredCheckpoint
from rgpu.link.control import ControlServer, Request
from rgpu.link.control.access import Target, require
from rgpu.link.control.verbs import VERBS
from rgpu.server.node.store.checkpoint_quota import CheckpointQuota
from rgpu.server.node.store.node_checkpoints import NodeCheckpoints
from rgpu.server.node.store.spool import ImportSpool
from rgpu.server.node.store.take_in import take_in
from rgpu.server.node.verbs.gate import Gate
from rgpu.session.errors import LimitReached, NotFound, Refused, RgpuError, UsageError

log = structlog.get_logger(__name__)

PIECE = 4 << 20  #: bytes of one answer
PAGES = 64  #: of one answer
OPENED = 2  #: manifests kept open for exports under way
TAKEN_AT_ONCE = 2  #: archives that are imported at once, each by a process


class CheckpointVerbs:
    """Answers the verbs. ``spool``: keeps the pieces of archives being imported. ``gate``: checks access.

    ``quota``: users' limits of checkpoint bytes.
    """

    def __init__(self, checkpoints: NodeCheckpoints, spool: ImportSpool, gate: Gate, quota: CheckpointQuota) -> None:
        self._checkpoints, self._spool, self._gate, self._quota = checkpoints, spool, gate, quota
        self._taking = asyncio.Semaphore(TAKEN_AT_ONCE)
        self._opened: OrderedDict[tuple[str, str], tuple[StoredCheckpoint, bytes]] = OrderedDict()

    def register(self, control: ControlServer) -> None:
        """Enter the verbs at the control server."""
        for verb, handler in {
            "image.ls": self._ls, "image.show": self._show, "image.verify": self._verify, "image.rm": self._rm,
            "image.gc": self._gc, "image.state": self._state, "image.pages": self._pages, "image.import": self._import,
        }.items():
            control.register(verb, handler)

    # -- access --------------------------------------------------------------------
    async def _scopes(self, request: Request) -> list[tuple[str, UserCheckpoints]]:
        """(user's tag, checkpoints) that the caller may see."""
        if request.role != "operator":
            own = dict.fromkeys(self._checkpoints.tag(public) for public in self._gate.keys_of(request.actor))
            return [(tag, self._checkpoints.of_tag(tag)) for tag in own]
        tags = await self._checkpoints.tags() or [self._checkpoints.tag(request.public)]
        return [(tag, self._checkpoints.of_tag(tag)) for tag in tags]

    async def _find(self, request: Request) -> tuple[CheckpointStore, str]:
        """The namespace that holds the requested checkpoint, and its user's tag.

        Raises :class:`NotFound`, :class:`NotPermitted` for a checkpoint of another user's session.
        """
        name = str(request.args["image"])
        for tag, checkpoints in await self._scopes(request):
            with contextlib.suppress(NotFound):
                return await asyncio.to_thread(checkpoints.holding, name), tag
        if request.role != "operator":
            with contextlib.suppress(NotFound):
                await self._checkpoints.find(name)
                require(VERBS[request.verb], request.actor, Target(f"checkpoint {name}"))
        raise NotFound(f"no checkpoint {name}; `rgpu image ls` lists them", image=name)

    # -- looking ---------------------------------------------------------------------
    async def _ls(self, request: Request) -> Any:
        named = await self._named_or_none()
        session, rows, scopes = request.args.get("session"), [], await self._scopes(request)
        stores = [(tag, checkpoints.own) for tag, checkpoints in scopes] + [("", scopes[0][1].earlier)]
        for tag, store in stores:
            for info in await asyncio.to_thread(store.ls):
                if session in (None, info.session) or info.error:
                    rows.append(_row(info, tag, named))
        return {"images": rows, "store": self._checkpoints.blobs.where("")}

    async def _named_or_none(self) -> set[str] | None:
        """Names of the checkpoints that count, or None while the registry does not answer."""
        try:
            return await self._checkpoints.named()
        except RgpuError:
            return None

    async def _show(self, request: Request) -> Any:
        store, tag = await self._find(request)
        shown = await asyncio.to_thread(store.show, str(request.args["image"]))
        named = await self._named_or_none()
        return {**shown, "user": tag, "named": None if named is None else shown["image"] in named}

    async def _verify(self, request: Request) -> Any:
        store, _ = await self._find(request)
        name = str(request.args["image"])
        return {"image": name, **await asyncio.to_thread(store.verify, name)}

    # -- removing --------------------------------------------------------------------
    async def _rm(self, request: Request) -> Any:
        store, _ = await self._find(request)
        name = str(request.args["image"])
        if not store.prefix and request.role != "operator":
            raise Refused(f"checkpoint {name} was written by a version without users: an operator may remove it")
        if name in await self._checkpoints.named():
            raise Refused(f"checkpoint {name} is what its session would be recovered from: end the session, or take a "
                          "newer checkpoint first", image=name)
        freed = await asyncio.to_thread(store.forget, name)
        done = await asyncio.to_thread(collect.collect, store)
        return {"image": name, "freed": freed + done.freed, "condemned_packs": len(done.condemned)}

    async def _gc(self, request: Request) -> Any:
        args, total = request.args, collect.Collected()
        dry_run, removed = bool(args.get("dry_run")), []
        policy = None
        if args.get("keep_last") is not None or args.get("max_age") is not None:
            policy = retention.Policy(_number(args.get("keep_last"), int), _number(args.get("max_age"), float))
        grace = float(args.get("grace", collect.GRACE))
        ended = _number(args.get("ended"), float)
        scopes = await self._scopes(request)
        for tag, checkpoints in scopes:
            if policy is not None:
                removed += await self._checkpoints.retain(tag, policy, dry_run=dry_run)
            if ended is not None:
                over = [name for name in await self._checkpoints.of_ended(tag, ended) if name not in removed]
                removed += over
                if not dry_run:
                    await self._checkpoints.forget(tag, over)
            _add(total, await asyncio.to_thread(collect.collect, checkpoints.own, grace=grace, dry_run=dry_run))
        if request.role == "operator":
            _add(total, await asyncio.to_thread(collect.collect, scopes[0][1].earlier, grace=grace, dry_run=dry_run))
        return {"images": removed, "packs": total.removed, "condemned_packs": total.condemned, "freed": total.freed,
                "dead_writers": total.intents_ended, "blocked": total.blocked, "dry_run": dry_run}

    # -- exporting -------------------------------------------------------------------
    async def _open(self, request: Request) -> tuple[StoredCheckpoint, bytes]:
        """The checkpoint and its encoded state, kept for the next requests of an export."""
        key = (request.public, str(request.args["image"]))
        found = self._opened.get(key)
        if found is None:
            store, _ = await self._find(request)
            checkpoint = await asyncio.to_thread(store.open, key[1])
            found = self._opened[key] = checkpoint, await asyncio.to_thread(checkpoint.state.encode)
            while len(self._opened) > OPENED:
                self._opened.popitem(last=False)
        return found

    async def _state(self, request: Request) -> Any:
        checkpoint, state = await self._open(request)
        offset = max(0, int(request.args.get("offset") or 0))
        return {"data": state[offset:offset + PIECE], "size": len(state), "facts": checkpoint.table.body.facts,
                "statistics": checkpoint.statistics}

    async def _pages(self, request: Request) -> Any:
        checkpoint, _ = await self._open(request)
        args = request.args
        region, start, count = int(args["region"]), int(args["start"]), min(PAGES, int(args["count"]))
        if not (0 <= region < len(checkpoint.state.regions) and 0 <= start < len(checkpoint.table.pages[region])
                and count >= 1):
            raise UsageError(f"checkpoint {checkpoint.name} has no pages {region}:{start}+{count}")
        return {"pages": await asyncio.to_thread(checkpoint.read_pages, region, start, count)}

    # -- importing ---------------------------------------------------------------------
    async def _import(self, request: Request) -> Any:
        """Take the pieces of an archive, in order; the last request (``end``) makes the checkpoint."""
        args, number = request.args, str(request.args.get("id"))
        tag = self._checkpoints.tag(request.public)
        path = self._spool.path(tag, number)
        if not args.get("end"):
            if not int(args["offset"]):  # refused before any data is transferred
                await self._quota.left(request.actor.user)
            return {"size": await asyncio.to_thread(self._spool.append, tag, number, int(args["offset"]),
                                                    bytes(args["data"]))}
        try:
            async with self._taking:
                left = await self._quota.left(request.actor.user)
                with self._checkpoints.grant_of(request.public, left.bytes if left else None) as grant:
                    try:
                        taken = await asyncio.to_thread(take_in, path, grant, str(args.get("name") or ""))
                    except LimitReached as error:
                        raise left.instead_of(error) if left else error from error
                if left is not None:
                    await self._quota.confirm(left, request.public, str(taken["image"]))
                return taken
        finally:
            path.unlink(missing_ok=True)


def _number(value: Any, kind: Callable[[Any], Any]) -> Any:
    return None if value is None else kind(value)


def _add(total: collect.Collected, more: collect.Collected) -> None:
    total.removed += more.removed
    total.condemned += more.condemned
    total.freed += more.freed
    total.intents_ended += more.intents_ended
    total.blocked += more.blocked


def _row(info: CheckpointInfo, tag: str, named: set[str] | None) -> dict[str, Any]:
    return {"image": info.name, "session": info.session, "position": info.position, "epoch": info.epoch,
            "created": info.created, "memory": info.memory, "pages": info.pages, "stored": info.stored,
            "manifest_bytes": info.manifest_bytes, "error": info.error, "user": tag,
            "named": None if named is None else info.name in named}
