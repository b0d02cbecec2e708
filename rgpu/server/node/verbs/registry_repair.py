"""`rgpu pool adopt` on the nodes: what each remembers and reports, and the mending of a registry that went back.

The decision is :mod:`rgpu.migrate.records.repair`. A node remembers, for each session
that it holds, the record as it last read it, and for each agent the highest
epoch that it named. Whichever node an operator asks gathers that from all,
and carries the plan out: automation paused, workers raised to their new
epochs, records written by compare-and-swap, and only then the registry
believed, by every node that answered. Broken off at any point it is simply
done again: epochs only grow, and nothing is decided by a registry that no node believes.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from rgpu.link.control import Request
from rgpu.link.keys import Endpoint
from rgpu.migrate.leader.hosts import pool_record
from rgpu.migrate.records import repair as adopting
from rgpu.migrate.records.repair import Answers, Holding, Plan, Report, Step
from rgpu.migrate.records.schema import (
    KEYS,
    MAX_TEXT,
    NODES,
    OF_POOL,
    POOL,
    SESSIONS,
    HistoryRecord,
    KeyRecord,
    NodeRecord,
    SessionRecord,
    decode,
    encode,
    history_key,
    member_key,
    note_key,
    session_key,
)
from rgpu.migrate.registry.base import Put, Registry, absent, txn_certain, unchanged
from rgpu.migrate.registry.open import open_registry
from rgpu.server.node.workers import handles as workers
from rgpu.session.errors import Conflict, Corrupt, PoolUnavailable, Refused, RgpuError

if TYPE_CHECKING:
    from rgpu.server.node.daemon import Daemon

log = structlog.get_logger(__name__)

SEEN_LIMIT = 4096  #: agents whose epochs a node remembers
ASK_SECONDS = 8.0
RETURN_SECONDS = 30.0  #: for the nodes to be in the pool again before automation goes on
TRIES = 10
#: action: how the history calls it
DECISIONS = {"own": "adopt", "recover": "lost", "end": "end", "forget": "end"}


class Adopting:
    """See the module docstring."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self._records: dict[str, SessionRecord] = {}
        self._seen: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._one = asyncio.Lock()

    # -- what a node remembers --------------------------------------------------------
    def remember(self, record: SessionRecord) -> None:
        """A record that was read from a registry that is believed; kept while the session is here, over restarts."""
        node = self.daemon.node
        if record.name not in node.running and record.name not in node.incoming and record.owner != self.daemon.host:
            self._records.pop(record.name, None)
            return
        known = self._records.get(record.name)
        if known is None or (known.epoch <= record.epoch and known != record):
            self._records[record.name] = record
            path = self._path(record.name)
            if path.parent.is_dir():  # else there is no worker yet; it is looked at again when there is
                try:
                    fresh = path.with_suffix(".new")
                    fresh.write_bytes(encode(record))
                    os.replace(fresh, path)
                except OSError as error:  # a full disk must not stop what runs
                    log.warning("cannot remember a record", session=record.name, reason=str(error))

    def _path(self, session: str) -> Path:
        return workers.worker_folder(self.daemon.directory, session) / "record"

    def recall(self, session: str) -> SessionRecord | None:
        """What is remembered of a session, by this daemon or the one before it."""
        if session not in self._records:
            try:
                data = self._path(session).read_bytes()
                self._records[session] = decode(data, SessionRecord, session_key(session))
            except (OSError, RgpuError) as error:
                log.info("nothing is remembered of a session", session=session, reason=str(error))
        return self._records.get(session)

    def saw(self, session: str, agent: str, epoch: Any) -> None:
        """An agent named the highest epoch that it has seen; what is none is left out."""
        if isinstance(epoch, int) and 0 < epoch <= adopting.MOST_EPOCH:
            key = session, agent
            self._seen[key] = max(epoch, self._seen.pop(key, 0))
            while len(self._seen) > SEEN_LIMIT:
                self._seen.popitem(last=False)

    # -- what a node is asked and told by another --------------------------------------
    async def holdings(self, **_: Any) -> dict[str, Any]:
        """This node's :class:`Report`."""
        node, leadership = self.daemon.node, self.daemon.leadership
        try:
            await leadership.registry.revision()
        except RgpuError as error:
            log.info("reports without the registry", reason=error.message)
        held = []
        for session, handle in list(node.running.items()):
            view = await handle.refresh()
            paused = session in node.paused or view.get("state") == "paused"
            held.append(Holding(session=session, holds="paused" if paused else "running", epoch=node.epochs[session],
                                record=self.recall(session), attached=bool(view.get("attached")),
                                position=int(view.get("position") or 0)))
        held += [Holding(session=session, holds="incoming", epoch=incoming.epoch, record=self.recall(session))
                 for session, incoming in node.incoming.items()]
        report = Report(
            host=self.daemon.host, incarnation=leadership.incarnation, public_key=self.daemon.keys.public,
            mistrust=getattr(leadership.registry, "mistrust", ""), holdings=held,
            ended={name: int(view.get("epoch") or 0) for name, view in node.ended.items()},
            seen=[(session, agent, epoch) for (session, agent), epoch in self._seen.items()])
        return dict(msgspec.to_builtins(report, builtin_types=(bytes,)))

    async def adopt(self, *, own: dict[str, int] | None = None, forget: list[str] | None = None, cluster: str = "",
                    revision: int = 0, **_: Any) -> dict[str, Any]:
        """Serve sessions at new epochs, forget others; then, with ``cluster``, believe the registry."""
        node, leadership = self.daemon.node, self.daemon.leadership
        for session, epoch in (own or {}).items():
            await node.adopt(session, int(epoch))
        for session in forget or []:
            if session in node.running:
                await node.obey(session, "", "forget", 0)
        if cluster:
            believe = getattr(leadership.registry, "believe", None)
            if believe is not None:
                believe(cluster, revision)
            self._records.clear()
            if leadership.joined:
                # Its leaders have other revisions: those seen before would bar every new one for ever.
                self.daemon.node_verbs.highest_leader = await leadership.leader_revision()
                leadership.keyring.again()
                self.daemon.spawn(leadership.settle_all())
        return {"host": self.daemon.host}

    async def doubt(self, reason: str) -> bool:
        """The registry does not know an epoch that was seen: automation pauses, and this node believes it no more.

        False for one that is never doubted: the embedded one.
        """
        distrust = getattr(self.daemon.leadership.registry, "distrust", None)
        if distrust is None:
            return False
        try:
            await pause(self.daemon.leadership.registry, True, f"{reason}; `rgpu pool adopt` mends it")
        except RgpuError as error:
            log.warning("automation could not be paused", reason=error.message)
        distrust(reason)
        return True

    # -- what an operator asks ------------------------------------------------------------
    async def asked(self, request: Request) -> dict[str, Any]:
        """`pool.adopt`. Raises :class:`Refused` with the problems where something is to be decided first."""
        args = request.args
        answers = Answers({str(name): str(host) for name, host in dict(args.get("keep") or {}).items()},
                          frozenset(map(str, args.get("without") or [])), frozenset(map(str, args.get("forget") or [])))
        async with self._one:
            registry = await open_registry(self.daemon.options.registry or self.daemon.files.registry_address())
            try:
                mending = Mending(self.daemon, registry, answers, args.get("endpoints"))
                found = await mending.look()
                if args.get("yes") and found.went_back:
                    if found.problems:
                        raise Refused(f"nothing was changed: {'; '.join(found.problems)}",
                                      problems=list(found.problems))
                    return {**_view(found), **await mending.mend(found)}
                return {**_view(found), "done": False}
            finally:
                await registry.close()


class Mending:
    """One run. ``registry``: opened anew, so that it remembers nothing and believes what it reads."""

    def __init__(self, daemon: Daemon, registry: Registry, answers: Answers, endpoints: Any) -> None:
        self.daemon, self.registry, self.answers = daemon, registry, answers
        self._named = [Endpoint(str(e["address"]), str(e["public"]), str(e.get("host") or ""))
                       for e in endpoints or [] if isinstance(e, dict) and "address" in e and "public" in e]
        self._at: dict[str, Endpoint] = {}  #: where each host answered
        self._reports: list[Report] = []
        self._by_doubt = False  #: automation was paused by a node's doubt, or by a run that was broken off

    # -- looking -------------------------------------------------------------------------
    async def look(self) -> Plan:
        """Gather and decide; nothing is changed."""
        records: dict[str, tuple[SessionRecord, int]] = {}
        for entry in (await self.registry.list(SESSIONS)).entries:
            record = decode(entry.value, SessionRecord, entry.key)
            records[record.name] = record, entry.mod_revision
        nodes = [decode(entry.value, NodeRecord, entry.key) for entry in (await self.registry.list(NODES)).entries]
        self._by_doubt = "rgpu pool adopt" in (await pool_record(self.registry)).reason
        keys = [decode(entry.value, KeyRecord, entry.key) for entry in (await self.registry.list(KEYS)).entries]
        places = self._places(nodes)
        self._reports = [report for report in await asyncio.gather(
            *(self._ask(host, found) for host, found in places.items())) if report is not None]
        owners = {str(record.owner) for record, _ in records.values() if record.live}
        # What a key is called tells the host that it was made for.
        members = {key.name.removeprefix("node-") for key in keys if key.role == "node"}
        return adopting.plan(records, self._reports, {*places, *owners, *members}, {key.name for key in keys},
                             self.answers, time.time())

    def _places(self, nodes: list[NodeRecord]) -> dict[str, list[Endpoint]]:
        """Where each host may answer: by what was known before, what the registry says, and what the asker knows."""
        found: dict[str, list[Endpoint]] = {self.daemon.host: []}
        known = [*self.daemon.leadership.endpoints.values(), *self._named,
                 *self.daemon.files.read_description().endpoints,
                 *(Endpoint(node.control, node.public_key, node.host) for node in nodes if node.control)]
        for endpoint in known:
            if endpoint.host and endpoint not in found.setdefault(endpoint.host, []):
                found[endpoint.host].append(endpoint)
        return found

    async def _ask(self, host: str, places: list[Endpoint]) -> Report | None:
        if host == self.daemon.host:
            return _report(await self.daemon.adopting.holdings(), host)
        for endpoint in places:
            try:
                answer = await self.daemon.peer(endpoint).call(
                    "node.command", {"verb": "node.holdings", "args": {}}, timeout=ASK_SECONDS)
            except RgpuError as error:
                log.info("a node does not answer", host=host, address=endpoint.address, reason=error.message)
                continue
            self._at[host] = endpoint
            return _report(answer, host)
        return None

    # -- mending -------------------------------------------------------------------------
    async def mend(self, plan: Plan) -> dict[str, Any]:
        """Make the plan true. Raises :class:`Conflict` where the registry changed meanwhile: then ask again."""
        before = await pause(self.registry, True, f"rgpu pool adopt: {plan.went_back}") and not self._by_doubt
        for key in plan.keys:
            await txn_certain(self.registry, [absent(member_key(key.name))], [Put(member_key(key.name), encode(key))])
        own: dict[str, dict[str, int]] = {}
        forget: dict[str, list[str]] = {}
        for step in plan.changes:
            if step.action == "own":
                own.setdefault(step.host, {})[step.session] = step.epoch
            for host in step.stale:
                forget.setdefault(host, []).append(step.session)
        for host in sorted({*own, *forget}):
            await self._tell(host, {"own": own.get(host, {}), "forget": forget.get(host, [])})
        for step in plan.changes:
            await self._write(step)
        revision = await self.registry.revision()
        believed = {"cluster": self.registry.cluster_id, "revision": revision}
        for report in self._reports:
            await self._tell(report.host, believed)
        away = await self._wait_back()
        if not before and not away:
            await pause(self.registry, False, "rgpu pool adopt is done")
        return {"done": True, "away": away, "paused": bool(before or away), "revision": revision}

    async def _tell(self, host: str, args: dict[str, Any]) -> None:
        if host == self.daemon.host:
            await self.daemon.adopting.adopt(**args)
        else:
            await self.daemon.peer(self._at[host]).call("node.command", {"verb": "node.adopt", "args": args},
                                                        timeout=30.0)

    async def _write(self, step: Step) -> None:
        if step.record is None:
            return
        story = HistoryRecord(when=time.time(), session=step.session, decision=DECISIONS[step.action],
                              reason=step.reason[:MAX_TEXT], epoch=step.epoch, owner=step.record.owner)
        key = session_key(step.session)
        result = await txn_certain(self.registry, [unchanged(key, step.revision)], [
            Put(key, encode(step.record)), Put(history_key(step.session, step.revision), encode(story))])
        if not result.succeeded:
            raise Conflict(f"the record of {step.session} changed meanwhile: somebody believes this registry already; "
                           "do it again")
        log.warning("adopted", session=step.session, action=step.action, host=step.host, epoch=step.epoch)

    async def _wait_back(self) -> list[str]:
        """Until every node that answered is in the pool again; those that are not."""
        wanted = {report.host: report.incarnation for report in self._reports}
        until = time.monotonic() + RETURN_SECONDS
        while True:
            try:
                found = [decode(entry.value, NodeRecord, entry.key)
                         for entry in (await self.registry.list(NODES)).entries]
                away = sorted(set(wanted) - {n.host for n in found if wanted.get(n.host) == n.incarnation})
            except PoolUnavailable:
                away = sorted(wanted)
            if not away or time.monotonic() > until:
                return away
            await asyncio.sleep(0.3)


async def pause(registry: Registry, paused: bool, reason: str) -> bool:
    """Pause automation or let it go on; whether it was paused before. Raises :class:`Conflict`."""
    for _ in range(TRIES):
        entry, old = await registry.get(POOL), await pool_record(registry)
        if old.paused == paused:
            return old.paused
        new = old.replace(paused=paused, reason=reason[:MAX_TEXT], changed=time.time())
        story = HistoryRecord(when=time.time(), decision="pause" if paused else "resume", reason=new.reason)
        note = note_key(OF_POOL, await registry.revision())
        if (await txn_certain(registry, [unchanged(POOL, entry.mod_revision if entry else 0)],
                              [Put(POOL, encode(new)), Put(note, encode(story))])).succeeded:
            return old.paused
    raise Conflict("the pool's settings change too fast")


def _report(answer: Any, host: str) -> Report:
    """Raises :class:`Corrupt` for what is no report, or another host's."""
    try:
        report = msgspec.convert(answer, Report)
    except msgspec.ValidationError as error:
        raise Corrupt(f"{host} answered with no report: {error}", reason="report") from error
    if report.host != host:
        raise Corrupt(f"{report.host} answered for {host}", reason="report")
    return report


def _view(plan: Plan) -> dict[str, Any]:
    """For whoever asked."""
    return {"went_back": plan.went_back, "problems": list(plan.problems), "keys": [key.name for key in plan.keys],
            "steps": [{"session": step.session, "action": step.action, "host": step.host, "before": step.before,
                       "epoch": step.epoch, "reason": step.reason, "stale": list(step.stale)} for step in plan.steps]}
