"""`rgpu pool adopt`: repair of a registry that was restored to an older state, by the node that an operator asks.

The plan is made by :mod:`rgpu.migrate.records.repair`. The node gathers what all nodes remember
(:mod:`rgpu.server.node.pool.memory`) and hold, and carries the plan out: automation is paused, workers are raised to
their new epochs, records are written by compare-and-swap, and only then every node that answered
trusts the registry. A run that was interrupted at any point is
repeated: epochs only grow, and nothing is decided by a registry that no node trusts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
import structlog

from rgpu.link.control import ControlServer, Request
from rgpu.link.keys import Endpoint, PoolFiles
from rgpu.migrate.leader.hosts import pool_record
from rgpu.migrate.records import repair as adopting
from rgpu.migrate.records.keys import KEYS, NODES, SESSIONS, history_key, member_key, session_key
from rgpu.migrate.records.repair import Answers, Plan, Report, Step
from rgpu.migrate.records.schema import (
    MAX_TEXT,
    HistoryRecord,
    KeyRecord,
    NodeRecord,
    SessionRecord,
    decode,
    encode,
)
from rgpu.migrate.registry.base import Put, Registry, absent, txn_certain, unchanged
from rgpu.migrate.registry.open import open_registry
from rgpu.server.node.pool.peers import Peers
from rgpu.server.node.pool.trust import pause
from rgpu.session.errors import Conflict, Corrupt, PoolUnavailable, Refused, RgpuError

log = structlog.get_logger(__name__)

ASK_SECONDS = 8.0
RETURN_SECONDS = 30.0  #: for the nodes to be in the pool again before automation resumes
#: action: its name in the history
DECISIONS = {"own": "adopt", "recover": "lost", "end": "end", "forget": "end"}


class ThisNode(Protocol):
    """This node's own part (:class:`rgpu.server.node.commands.adopting.AdoptCommands`)."""

    async def holdings(self) -> dict[str, Any]:
        """Return the node's :class:`Report` as a dict."""

    async def adopt(self, *, own: dict[str, int] | None = None, forget: list[str] | None = None, cluster: str = "",
                    revision: int = 0) -> dict[str, Any]:
        """Serve sessions at new epochs, forget others; trust the registry."""


class RegistryRepair:
    """Answers `pool.adopt`. ``address``: the registry's. ``endpoints``: last known addresses of nodes, by host."""

    def __init__(self, host: str, address: str, this_node: ThisNode, peers: Peers, endpoints: Mapping[str, Endpoint],
                 files: PoolFiles) -> None:
        self._host, self._address, self._this_node, self._peers = host, address, this_node, peers
        self._endpoints, self._files = endpoints, files
        self._one = asyncio.Lock()

    def register(self, control: ControlServer) -> None:
        """Enter the verb at the control server."""
        control.register("pool.adopt", self.adopt)

    async def adopt(self, request: Request) -> dict[str, Any]:
        """Do `pool.adopt`. Raises :class:`Refused` with the problems that an operator has to decide first."""
        args = request.args
        answers = Answers({str(name): str(host) for name, host in dict(args.get("keep") or {}).items()},
                          frozenset(map(str, args.get("without") or [])), frozenset(map(str, args.get("forget") or [])))
        async with self._one:
            registry = await open_registry(self._address)
            try:
                known = [*self._endpoints.values(), *_named(args.get("endpoints")),
                         *self._files.read_description().endpoints]
                mending = Mending(self._host, registry, answers, self._this_node, self._peers, known)
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
    """One repair run. ``registry``: opened anew, without a remembered revision, so that it accepts what it reads.

    ``known``: possible addresses of nodes, the likeliest first.
    """

    def __init__(self, host: str, registry: Registry, answers: Answers, this_node: ThisNode, peers: Peers,
                 known: list[Endpoint]) -> None:
        self._host, self.registry, self.answers = host, registry, answers
        self._this_node, self._peers, self._known = this_node, peers, known
        self._at: dict[str, Endpoint] = {}  #: the endpoint at which each host answered
        self._reports: list[Report] = []
        self._by_doubt = False  #: automation was paused by a node's doubt, or by a run that was interrupted

    # -- looking -------------------------------------------------------------------------
    async def look(self) -> Plan:
        """Gather reports and make the plan; nothing is changed."""
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
        # A node key's name contains the host that it was made for.
        members = {key.name.removeprefix("node-") for key in keys if key.role == "node"}
        return adopting.plan(records, self._reports, {*places, *owners, *members}, {key.name for key in keys},
                             self.answers, time.time())

    def _places(self, nodes: list[NodeRecord]) -> dict[str, list[Endpoint]]:
        """Possible endpoints of each host: known before, named by the caller, or on record in the registry."""
        found: dict[str, list[Endpoint]] = {self._host: []}
        known = [*self._known, *(Endpoint(node.control, node.public_key, node.host) for node in nodes if node.control)]
        for endpoint in known:
            if endpoint.host and endpoint not in found.setdefault(endpoint.host, []):
                found[endpoint.host].append(endpoint)
        return found

    async def _ask(self, host: str, places: list[Endpoint]) -> Report | None:
        if host == self._host:
            return _report(await self._this_node.holdings(), host)
        for endpoint in places:
            try:
                answer = await self._peers.at(endpoint).call(
                    "node.command", {"verb": "node.holdings", "args": {}}, timeout=ASK_SECONDS)
            except RgpuError as error:
                log.info("a node does not answer", host=host, address=endpoint.address, reason=error.message)
                continue
            self._at[host] = endpoint
            return _report(answer, host)
        return None

    # -- mending -------------------------------------------------------------------------
    async def mend(self, plan: Plan) -> dict[str, Any]:
        """Carry the plan out. Raises :class:`Conflict` where the registry changed meanwhile: repeat the run then."""
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
        if host == self._host:
            await self._this_node.adopt(**args)
        else:
            await self._peers.at(self._at[host]).call("node.command", {"verb": "node.adopt", "args": args},
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
            raise Conflict(f"the record of {step.session} changed meanwhile: a node trusts this registry already; "
                           "do it again")
        log.warning("adopted", session=step.session, action=step.action, host=step.host, epoch=step.epoch)

    async def _wait_back(self) -> list[str]:
        """Wait until every node that answered is in the pool again; return the hosts that are not."""
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


def _named(endpoints: Any) -> list[Endpoint]:
    """The endpoints that the caller named; invalid ones are left out."""
    return [Endpoint(str(e["address"]), str(e["public"]), str(e.get("host") or ""))
            for e in endpoints or [] if isinstance(e, dict) and "address" in e and "public" in e]


def _report(answer: Any, host: str) -> Report:
    """Decode a node's report. Raises :class:`Corrupt` for an invalid one, or another host's."""
    try:
        report = msgspec.convert(answer, Report)
    except msgspec.ValidationError as error:
        raise Corrupt(f"{host} answered with no report: {error}", reason="report") from error
    if report.host != host:
        raise Corrupt(f"{report.host} answered for {host}", reason="report")
    return report


def _view(plan: Plan) -> dict[str, Any]:
    """The plan as returned to the caller."""
    return {"went_back": plan.went_back, "problems": list(plan.problems), "keys": [key.name for key in plan.keys],
            "steps": [{"session": step.session, "action": step.action, "host": step.host, "before": step.before,
                       "epoch": step.epoch, "reason": step.reason, "stale": list(step.stale)} for step in plan.steps]}
