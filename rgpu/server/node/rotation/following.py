"""Following of the rotation of the pool's secret by its record: once before the node answers agents, then always.

Missing secrets are requested from other nodes, first from the one where they were made, and checked by their mark.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import structlog

from rgpu.link.keys import Endpoint
from rgpu.link.secrets import PoolSecrets, check_secret, mark
from rgpu.migrate.membership import rotation
from rgpu.migrate.records.schema import NodeRecord
from rgpu.migrate.records.secrets import SECRETS, Named, SecretsRecord
from rgpu.migrate.registry.base import Compacted
from rgpu.server.node.pool.peers import Peers
from rgpu.server.node.pool.records import PoolRecords
from rgpu.session.errors import Corrupt, RgpuError

log = structlog.get_logger(__name__)

LOOK_SECONDS = 1.0  #: between two looks while a rotation is under way
QUIET_SECONDS = 10.0  #: and while none is, without changes of the record
ASK_SECONDS = 3.0  #: for another node to give a secret
START_SECONDS = 10.0  #: that a starting node waits for missing secrets


class SecretsFollower:
    """``tell``: called with the mark of the newest secret on record once it is held here (empty: it is not)."""

    def __init__(self, host: str, secrets: PoolSecrets, records: PoolRecords, peers: Peers,
                 tell: Callable[[str], Awaitable[None]]) -> None:
        self._host, self._secrets, self._records, self._peers, self._tell = host, secrets, records, peers, tell
        self._record: SecretsRecord | None = None
        self._reason = ""
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Get the secrets in force before agents are answered. A node that cannot logs an error and goes on without.

        Raises what reading the registry and the files raises.
        """
        self._record = await rotation_record(self._records)
        until = time.monotonic() + START_SECONDS
        while not await self._follow():
            if time.monotonic() > until:
                log.error("this node lacks the pool's newest secret, and no other node gives it: agents that hold "
                          "tickets made with it are refused here", host=self._host)
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def run(self) -> None:
        """Follow the record until cancelled. Without the registry the last record counts, and its times run on."""
        watch = asyncio.ensure_future(self._watch())
        settled = False
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(QUIET_SECONDS if settled else LOOK_SECONDS):
                        await self._changed.wait()
                self._changed.clear()
                settled = await self._look()
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _look(self) -> bool:
        """Read and follow the record; return whether no rotation is known to be under way and no secret is missing."""
        settled = True
        try:
            self._record = await rotation_record(self._records)
            settled = self._record is None or self._record.new is None
        except RgpuError as error:
            settled = False
            log.info("the rotation of the pool's secret is not known now", reason=error.message)
        try:
            settled = await self._follow() and settled
            await self._tell(self.mark)
        except (RgpuError, OSError) as error:
            settled = False
            log.warning("the pool's secret cannot be followed", reason=str(error))
        return settled

    async def _watch(self) -> None:
        while True:
            try:
                registry = self._records.registry
                revision = (await registry.list(SECRETS)).revision
                self._changed.set()
                async for _ in registry.watch(SECRETS, revision + 1):
                    self._changed.set()
            except Compacted:
                continue
            except RgpuError:
                await asyncio.sleep(LOOK_SECONDS)

    @property
    def mark(self) -> str:
        """Mark of the newest secret on record, if this node holds it; else empty."""
        named = rotation.newest(self._record) if self._record is not None else None
        return named.mark if named is not None and self._held().has(named) else ""

    async def _follow(self) -> bool:
        """Do what the record requires; return whether no secret is missing. Raises what the files raise."""
        await asyncio.to_thread(self._secrets.read)  # another daemon of this folder may have changed them
        step = rotation.follow(self._record, self._held(), time.time())
        if step.fetch and await self._fetch(step.fetch):
            step = rotation.follow(self._record, self._held(), time.time())
        self._secrets.count(step.issue, step.accept)
        if await asyncio.to_thread(self._secrets.drop, step.drop):
            log.info("an old secret of the pool was dropped", host=self._host, highest=step.drop)
        said = f"{step.issue} {step.accept} {[named.number for named in step.fetch]}"
        if said != self._reason:
            self._reason = said
            log.info("the pool's secret", host=self._host, issue=step.issue, accept=step.accept, reason=step.reason)
        return not step.fetch

    def _held(self) -> rotation.Held:
        return rotation.Held(self._secrets.marks(), self._secrets.dropped)

    async def _fetch(self, wanted: tuple[Named, ...]) -> bool:
        """Request secrets from the other nodes; return whether one was received."""
        holder = self._record.holder if self._record is not None else ""
        try:
            nodes = sorted((await self._records.nodes()).values(), key=lambda node: (node.host != holder, node.host))
        except RgpuError as error:
            log.info("nobody can be asked for the pool's secret", reason=error.message)
            return False
        came = False
        for named in wanted:
            for node in nodes:
                if node.control and node.host != self._host and (secret := await self._ask(node, named)):
                    await asyncio.to_thread(self._secrets.add, named.number, secret)
                    log.info("got a secret of the pool", host=self._host, number=named.number, giver=node.host)
                    came = True
                    break
        return came

    async def _ask(self, node: NodeRecord, named: Named) -> bytes | None:
        try:
            client = self._peers.at(Endpoint(node.control, node.public_key, node.host))
            answer = await client.call("pool.secret", {"number": named.number, "mark": named.mark}, timeout=ASK_SECONDS)
            secret = check_secret(dict(answer or {}).get("secret"))
            if mark(secret) != named.mark:
                raise Corrupt(f"{node.host} gave another secret than the record names", reason="mark")
            return secret
        except (RgpuError, TypeError, ValueError) as error:
            log.info("a node does not give the pool's secret", giver=node.host, number=named.number, reason=str(error))
            return None


async def rotation_record(records: PoolRecords) -> SecretsRecord | None:
    """The record as it is now; None while no secret was ever rotated. Raises what reading it raises."""
    entry = await records.registry.get(SECRETS)
    return rotation.decoded(entry.value) if entry is not None else None
