"""What users and agents ask of the pool, answered by any node.

Verbs that only the leader may do are done here when this node leads, and
passed on otherwise (as ``node.command``, which only nodes may send; the caller's
role was checked by the node that it asked).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import structlog

from rgpu import __version__
from rgpu.link import versions
from rgpu.link.control import ControlServer, Request
from rgpu.link.control.verbs import VERBS
from rgpu.link.data import tickets
from rgpu.migrate.leader.capacity.admission import DEFAULT_QUOTA
from rgpu.migrate.leader.nodes import CHECKPOINT_SECONDS
from rgpu.migrate.leader.requests import program_of, read_order
from rgpu.migrate.leader.silence import AGENT_GRACE, grace_of
from rgpu.migrate.move.options import Wishes
from rgpu.migrate.records.schema import QUEUE, NodeRecord, QueueRecord, SessionRecord, decode
from rgpu.migrate.scheduling import placement
from rgpu.migrate.scheduling.adapter import place_by_fragmentation
from rgpu.session.addresses import device_base
from rgpu.session.devices import parts
from rgpu.session.errors import Fenced, NotFound, PoolUnavailable, Refused, RgpuError, UnknownOutcome
from rgpu.session.facts import PEER_ATOMICS, PEERS, SessionFacts

if TYPE_CHECKING:
    from rgpu.server.node.daemon import Daemon

log = structlog.get_logger(__name__)

JOURNAL_LIMIT = 256 << 20
ASK_SECONDS = 660.0  #: that a leader may take
LONGEST = {"session.checkpoint": 2 * CHECKPOINT_SECONDS + 60}  #: one may wait for another
LAST_WORDS = 256  #: ended sessions whose agent's last figures a leader keeps
LEADER_LOOK = 0.5  #: seconds between two looks whether the asked leader still leads
LEADER_AGAIN = 0.2  #: seconds until who leads is read again
ELECTION_SECONDS = 10.0  #: that an election may take once the record of the leader before has gone with its lease

#: Asks of a leader: (args, public key of the asker, how to report progress) → result
LeaderVerb = Callable[[dict[str, Any], str, Callable[[dict[str, Any]], None]], Awaitable[dict[str, Any]]]


#: Of the leader's: told by nodes, not by users.
OF_NODES = frozenset({"worker.died", "agent.silent"})


class PoolVerbs:
    """See the module docstring."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        #: What agents said as they ended their sessions: a worker may have gone before it heard of it.
        self._last_words: dict[str, dict[str, Any]] = {}
        self._leader_verbs: dict[str, LeaderVerb] = {
            "session.create": self._create, "session.end": self._end, "session.kill": self._end,
            "session.withdraw": self._withdraw,
            "session.migrate": self._migrate, "session.move_abort": self._move_abort,
            "session.checkpoint": self._checkpoint, "session.restore": self._restore,
            "session.unreachable": self._unreachable, "worker.died": self._worker_died,
            "agent.silent": self._agent_silent,
            **daemon.operator_verbs.for_the_leader}

    def register(self, control: ControlServer) -> None:
        for verb, handler in {
            "pool.ping": self._ping, "pool.stop": self._stop, "session.owner": self._owner,
            "session.candidate": self._candidate,
            "session.renew_ticket": self._renew, "session.list": self._list, "session.describe": self._describe,
            "session.logs": self._logs, "session.move_status": self._move_status, "node.list": self._node_list,
            "node.info": self._node_info,
        }.items():
            control.register(verb, handler)
        for verb in self._leader_verbs:
            if verb not in OF_NODES:
                control.register(verb, self._for_the_leader)
        self.daemon.operator_verbs.register(control)
        control.register("node.command", self._from_a_node)

    # -- passing on ------------------------------------------------------------------
    async def _for_the_leader(self, request: Request) -> Any:
        return await self.ask_leader(request.verb, request.args, request.public, self._progress(request))

    def _progress(self, request: Request) -> Callable[[dict[str, Any]], None]:
        def tell(values: dict[str, Any]) -> None:
            self.daemon.spawn(request.progress(**values))

        return tell

    async def ask_leader(self, verb: str, args: dict[str, Any], public: str = "",
                         on_progress: Callable[[dict[str, Any]], None] = lambda values: None) -> dict[str, Any]:
        """Have the leader do it, here or on the node that leads. Raises what it raises.

        A leader that stepped down is named by its record until the lease of that ends: it is asked again, or its
        successor, for that long. Raises :class:`PoolUnavailable` after it.
        """
        patience = self.daemon.options.lease + ELECTION_SECONDS
        until = time.monotonic() + patience
        while True:
            leader = await self.daemon.leadership.leader_endpoint()
            if leader is None:
                return await self._leader_verbs[verb](args, public, on_progress)
            try:
                message = {"verb": verb, "args": args, "public": public}
                call = asyncio.ensure_future(self.daemon.peer(leader[0]).call(
                    "node.command", message, timeout=LONGEST.get(verb, ASK_SECONDS), on_progress=on_progress))
                return dict(await self._while_it_leads(call, leader[1], verb) or {})
            except (Fenced, PoolUnavailable) as error:
                if error.detail.get("reason") != "not leading":
                    raise
                if time.monotonic() > until:
                    raise PoolUnavailable(f"no coordinator took {verb} for {patience:.0f} s: try again, or look with "
                                          f"`rgpu nodes` ({error.message})") from error
                await asyncio.sleep(LEADER_AGAIN)

    async def _while_it_leads(self, call: asyncio.Future[Any], revision: int, verb: str) -> Any:
        """The leader's answer; if it leads no more before it answered, nobody knows what it had done.

        Raises :class:`PoolUnavailable` with the reason "not leading" for a verb that may be repeated: the next
        leader is asked then, because nobody else will (the end of a program is told once).
        """
        while not (await asyncio.wait([call], timeout=LEADER_LOOK))[0]:
            if await self.daemon.leadership.leader_revision() != revision:
                await asyncio.wait([call], timeout=LEADER_LOOK)  # its answer may be on the way
                if not call.done():
                    call.cancel()
                    if verb not in VERBS or VERBS[verb].idempotent:
                        raise PoolUnavailable(f"the coordinator changed while it worked on {verb}",
                                              reason="not leading")
                    raise UnknownOutcome(f"the coordinator changed while it worked on {verb}; the next one finishes or "
                                         "undoes it: look with `rgpu ps`", verb=verb)
        return call.result()

    async def _from_a_node(self, request: Request) -> Any:
        """`node.command`: for the leader when it is one of the leader's verbs, else for this node."""
        verb, args = str(request.args.get("verb")), dict(request.args.get("args") or {})
        if verb not in self._leader_verbs:
            return await self.daemon.node_verbs.perform(verb, args, leader=request.leader, command_id=request.command,
                                                        on_progress=self._progress(request))
        self.daemon.leadership.leading()
        return await self._leader_verbs[verb](args, str(request.args.get("public") or ""), self._progress(request))

    @property
    def _coordinator(self) -> Any:
        return self.daemon.leadership.leading()

    # -- the leader's ------------------------------------------------------------------
    async def _create(self, args: dict[str, Any], public: str, progress: Any) -> dict[str, Any]:
        versions.check(args.get("versions"), "the client")
        order, admission = read_order(args, public), self._coordinator.admission
        if not (args.get("options") or {}).get("queue"):
            return await self._attachment(await admission.create(order), public, with_facts=True)
        found = await admission.create_or_wait(order, known=str(args.get("known") or ""),
                                               wait=float(args.get("wait") or 0.0))
        if isinstance(found, SessionRecord):
            return await self._attachment(found, public, with_facts=True)
        return {"queued": {"position": found.position, "waiting": len(admission.lines), "reason": found.reason},
                "versions": versions.ours(), "endpoints": await self._endpoints()}

    async def _end(self, args: dict[str, Any], public: str, progress: Any) -> dict[str, Any]:
        reason = str(args.get("reason") or "killed by its user")
        await self._coordinator.end(str(args["session"]), reason, float(args.get("created") or 0.0))
        if words := last_words(args.get("statistics")):
            self._last_words.pop(str(args["session"]), None)
            self._last_words[str(args["session"])] = words
            while len(self._last_words) > LAST_WORDS:
                del self._last_words[next(iter(self._last_words))]
        return {"session": args["session"], "reason": reason}

    async def _withdraw(self, args: dict[str, Any], public: str, progress: Any) -> dict[str, Any]:
        reason = str(args.get("reason") or "its client waits no more")
        await self._coordinator.admission.withdraw(
            str(args["session"]), agent=public, program=program_of(args.get("program")), reason=reason)
        return {"session": args["session"], "reason": reason}

    async def _migrate(self, args: dict[str, Any], public: str, progress: Any) -> dict[str, Any]:
        options = dict(args.get("options") or {})
        wishes = Wishes.from_options(options)
        name, host = str(args["session"]), str(args["host"])
        if options.get("dry_run"):
            return dict(await self._coordinator.plan_move(name, host, wishes=wishes))
        return dict(await self._coordinator.migrate(name, host, wishes=wishes, on_progress=progress))

    async def _move_abort(self, args: dict[str, Any], public: str, progress: Any) -> dict[str, Any]:
        await self._coordinator.move_abort(str(args["session"]), str(args.get("move") or ""))
        return await self._move_view(str(args["session"]))

    async def _checkpoint(self, args: dict[str, Any], public: str, progress: Any) -> dict[str, Any]:
        session = str(args["session"])
        if args.get("wait") is False:
            await self.daemon.leadership.session(session)  # a wrong name is told at once
            self.daemon.spawn(self._coordinator.checkpoint(session))
            return {"session": session, "waited": False}
        return dict(await self._coordinator.checkpoint(session))

    async def _restore(self, args: dict[str, Any], public: str, progress: Any) -> dict[str, Any]:
        name = str(args["image"])
        images = await self.daemon.images.find(public, name)
        about = await asyncio.to_thread(lambda: images.holding(name).summary(name))
        return dict(await self._coordinator.restore(name, about.session, position=about.position,
                                                    host=args.get("host")))

    async def _unreachable(self, args: dict[str, Any], public: str, progress: Any) -> dict[str, Any]:
        await self._coordinator.unreachable(str(args["session"]), epoch=int(args["epoch"]), reached=args.get("reached"),
                                            seconds=float(args.get("seconds") or 0.0))
        return {}

    async def _worker_died(self, args: dict[str, Any], public: str, progress: Any) -> dict[str, Any]:
        await self._coordinator.worker_died(str(args["session"]), str(args["host"]), epoch=int(args["epoch"]),
                                            position=args.get("position"), begun=args.get("begun"),
                                            complete=args.get("complete"),
                                            reason=str(args.get("reason") or "its worker died"))
        return {}

    async def _agent_silent(self, args: dict[str, Any], public: str, progress: Any) -> dict[str, Any]:
        return {"again": await self._coordinator.agent_silent(
            str(args["session"]), str(args["host"]), epoch=int(args["epoch"]), seconds=float(args["seconds"]),
            had_agent=bool(args.get("had_agent")))}

    # -- anybody's -----------------------------------------------------------------------
    async def _ping(self, request: Request) -> Any:
        return {"host": self.daemon.host, "version": __version__, "versions": versions.ours(),
                "time": time.time(), "endpoints": await self._endpoints()}

    async def _stop(self, request: Request) -> Any:
        self.daemon.stopping.set()
        return {}

    async def _owner(self, request: Request) -> Any:
        self.daemon.adopting.saw(str(request.args["session"]), request.public, request.args.get("epoch"))
        held = await self.daemon.leadership.session(str(request.args["session"]))
        return await self._attachment(held.record, request.public, ticket=False)

    async def _candidate(self, request: Request) -> Any:
        """Where a session of that size would go: the placement's own answer, to nobody's favour."""
        versions.check(request.args.get("versions"), "the client")
        order = replace(read_order(request.args, request.public), name="a session")
        nodes = await self.daemon.leadership.nodes()
        snapshot = placement.Snapshot(tuple(nodes.values()), tuple(await self.daemon.leadership.sessions()))
        wanted = placement.sized(snapshot, order.request(), order.share, DEFAULT_QUOTA)
        quota = wanted.quota
        try:
            choice = place_by_fragmentation(snapshot, wanted)
        except Refused:
            if not (request.args.get("options") or {}).get("queue"):
                raise
            # It will wait for its place: what that may be, were the pool empty.
            choice = place_by_fragmentation(placement.Snapshot(snapshot.nodes, ()), wanted)
        return {"host": choice.host, "device": choice.device, "versions": versions.ours(),
                **_facts(nodes[choice.host], choice.device, quota)}

    async def _renew(self, request: Request) -> Any:
        held = await self.daemon.leadership.session(str(request.args["session"]))
        if held.record.agent != request.public:
            raise Refused(f"session {held.record.name} belongs to another agent")
        return await self._attachment(held.record, request.public)

    async def _attachment(self, record: SessionRecord, public: str, *, ticket: bool = True,
                          with_facts: bool = False) -> dict[str, Any]:
        """What an agent needs to attach to the session's owner."""
        nodes = await self.daemon.leadership.nodes()
        node = nodes.get(record.owner or "")
        value: dict[str, Any] = {"session": record.name, "owner": record.owner, "epoch": record.epoch,
                                 "state": record.state, "reason": record.reason, "alive": node is not None,
                                 "recover": record.recover, "endpoints": await self._endpoints(nodes)}
        if node is not None and record.state in ("running", "moving"):
            host, _, port = node.data.rpartition(":")
            value["address"] = [host, int(port)]
        if ticket:
            granted = tickets.issue(self.daemon.node.pool_secret, record.name, public, "calls")
            value.update(ticket=granted.ticket, secret=granted.secret, expires=granted.expires)
        if with_facts and node is not None:
            value.update(_facts(node, record.device or "", record.quota, record.name, record.recover),
                         versions=versions.ours())
        return value

    async def _endpoints(self, nodes: dict[str, NodeRecord] | None = None) -> list[dict[str, str]]:
        nodes = nodes if nodes is not None else await self.daemon.leadership.nodes()
        return [{"address": n.control, "public": n.public_key, "host": n.host} for n in nodes.values() if n.control]

    async def _list(self, request: Request) -> Any:
        records = await self.daemon.leadership.sessions()
        infos = await self._infos()
        views = views_of(infos)
        lines = {str(line["name"]): line for info in infos for line in info.get("queue", [])}
        shown = [r for r in records if request.args.get("all") or r.state not in ("ended", "failed")]
        waiting = (await self.daemon.leadership.registry.list(QUEUE)).entries
        grace = self.daemon.options.client_grace
        return {"sessions": [_row(record, views.get(record.name, {}), lines.get(record.name), grace)
                             for record in shown],
                "queue": [_waiting_row(decode(entry.value, QueueRecord, entry.key), lines) for entry in waiting]}

    async def _infos(self) -> list[dict[str, Any]]:
        """What all nodes say of themselves; nothing of one that does not answer."""
        nodes = await self.daemon.leadership.nodes()
        return list(await asyncio.gather(*(self.info_of(node) for node in nodes.values())))

    async def _views(self) -> dict[str, dict[str, Any]]:
        """What the workers of all nodes say of themselves."""
        return views_of(await self._infos())

    async def info_of(self, node: NodeRecord) -> dict[str, Any]:
        """What a node says of itself; nothing if it does not answer."""
        if node.host == self.daemon.host:
            return await self._own_info()
        with contextlib.suppress(RgpuError):
            endpoint = await self.daemon.endpoint_of(node.host)
            return dict(await self.daemon.peer(endpoint).call("node.info", {}, timeout=3.0))
        return {}

    async def _node_info(self, request: Request) -> Any:
        return await self._own_info()

    async def _own_info(self) -> dict[str, Any]:
        node = self.daemon.node
        handles = list(node.running.items())
        views = await asyncio.gather(*(handle.refresh() for _, handle in handles))
        coordinator = self.daemon.leadership.coordinator
        return {"host": self.daemon.host, "pid": os.getpid(), "leader": coordinator is not None,
                "moves": coordinator.moves() if coordinator else {}, "time": time.time(),
                "queue": await coordinator.admission.rows() if coordinator else [],
                "rebalancing": coordinator.rebalancing.doing if coordinator else "", "last_words": self._last_words,
                "sessions": {**node.ended, **{name: view for (name, _), view in zip(handles, views, strict=True)}}}

    async def _describe(self, request: Request) -> Any:
        held = await self.daemon.leadership.session(str(request.args["session"]))
        view = (await self._views()).get(held.record.name, {})
        record = held.record
        return {**_row(record, view, grace=self.daemon.options.client_grace),
                "quota": record.quota, "device": record.device,
                "image": _plain(record.image), "move": _plain(record.move), "recover": record.recover,
                "created": record.created, "changed": record.changed,
                "worker": {key: value for key, value in view.items() if key != "last_words"}}

    async def _logs(self, request: Request) -> Any:
        session = str(request.args["session"])
        held = await self.daemon.leadership.session(session)
        owner = held.record.owner
        if owner and owner != self.daemon.host and not request.args.get("here"):
            endpoint = await self.daemon.endpoint_of(owner)
            return await self.daemon.peer(endpoint).call("node.command", {"verb": "session.logs", "args": request.args})
        return await self.daemon.node.logs(session=session, lines=int(request.args.get("lines") or 100))

    async def _move_status(self, request: Request) -> Any:
        return await self._move_view(str(request.args["session"]))

    async def _move_view(self, session: str) -> dict[str, Any]:
        """What asking for a move's state answers, and aborting it."""
        held = await self.daemon.leadership.session(session)
        view = (await self._views()).get(held.record.name, {})
        return {"session": held.record.name, "state": held.record.state, "owner": held.record.owner,
                "move": _plain(held.record.move), "progress": dict(view.get("move") or {})}

    async def _node_list(self, request: Request) -> Any:
        nodes = await self.daemon.leadership.nodes()
        infos = await asyncio.gather(*(self.info_of(node) for node in nodes.values()))
        rows = []
        for node, info in zip(nodes.values(), infos, strict=True):
            names = [one for v in info.get("sessions", {}).values() if v.get("worker_pid")
                     for one in parts(str(v.get("device")))]
            devices = [{"device": d.device, "name": d.name, "total_memory": d.memory, "free_memory": d.free_memory,
                        "healthy": d.healthy, "reason": d.reason, "sessions": names.count(d.device),
                        "compute_capability": list(d.compute_capability), "driver_version": d.driver_version}
                       for d in node.devices]
            rows.append({"host": node.host, "address": node.control, "data": node.data, "state": node.state,
                         "reason": node.reason, "version": node.version, "pid": info.get("pid"),
                         "leader": bool(info.get("leader")), "answers": bool(info), "devices": devices})
        return {"nodes": rows}


def _facts(node: NodeRecord, name: str, quota: int, session: str = "", recover: bool = True) -> dict[str, Any]:
    """What the program may know of its devices; fixed when the session is made."""
    devices = [device.facts for device in node.all_of(name)]
    if not devices:
        raise NotFound(f"{node.host} has no device {name} any more")
    told = SessionFacts.from_dict({
        "name": session, "number": 1, "driver_version": int(devices[0].get("driver_version", 13000)), "quota": quota,
        "journal_limit": JOURNAL_LIMIT, "recover": recover,
        "devices": [as_session_sees(facts, index, name) for index, facts in enumerate(devices)]})
    return {"facts": told.as_dict(), "driver_release": str(devices[0].get("driver_release") or "")}


def as_session_sees(facts: dict[str, Any], index: int, name: str) -> dict[str, Any]:
    """A node's device as the session's ``index``-th of those that ``name`` names: its range, and whom it reaches.

    On the node it says by the node's ordinals whom its kernels reach; the program counts the session's.
    """
    attributes = {int(key): value for key, value in (facts.get("attributes") or {}).items()}
    ordinals = [int(one.rpartition(":")[2]) for one in parts(name)]
    for which in (PEERS, PEER_ATOMICS):
        reached = attributes.get(which, 0)
        attributes[which] = sum(1 << n for n, ordinal in enumerate(ordinals) if n != index and reached >> ordinal & 1)
    return {**facts, "attributes": attributes, "range_base": device_base(index)}


def last_words(statistics: Any) -> dict[str, Any]:
    """An agent's figures as its session ends, from outside: numbers and short texts only."""
    given = statistics if isinstance(statistics, dict) else {}
    return {str(name): value[:300] if isinstance(value, str) else value for name, value in list(given.items())[:64]
            if isinstance(value, (int, float, str))}


def views_of(infos: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """One view of each session, from what nodes say of themselves, with its agent's last words if there are any."""
    views = newest_views(info.get("sessions", {}) for info in infos)
    for info in infos:
        for name, words in info.get("last_words", {}).items():
            views[name] = {**views.get(name, {}), "last_words": words}
    return views


def newest_views(nodes: Iterable[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """One view of each session: of several nodes', a living worker's, and then the highest epoch's.

    A node remembers what a session's worker said last there, also when the session lives elsewhere since.
    """
    found: dict[str, dict[str, Any]] = {}

    def rank(view: dict[str, Any]) -> tuple[bool, int]:
        return bool(view.get("worker_pid")), int(view.get("epoch") or 0)

    for views in nodes:
        for name, view in views.items():
            if name not in found or rank(view) > rank(found[name]):
                found[name] = view
    return found


def _waiting_row(record: QueueRecord, lines: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The line of ``rgpu ps`` of a request that waits; ``lines``: what the leader says of the queue."""
    line = lines.get(record.name, {})
    return {"session": record.name, "state": "queued", "host": None, "epoch": 0, "memory_bytes": None, "calls": None,
            "awaited_calls": None, "pid": record.program.pid, "worker_pid": None, "command": record.program.command,
            "position": line.get("position"), "priority": record.wants.priority, "quota": record.quota,
            "reason": str(line.get("reason") or record.reason), "note": _in_line(line) or record.reason,
            "age_s": max(0.0, time.time() - record.arrived)}


def _in_line(line: dict[str, Any] | None) -> str:
    """Where it stands in the queue."""
    return f"position {line['position']}: {line['reason']}" if line and line.get("position") else ""


def _silence(record: SessionRecord, view: dict[str, Any], grace: float) -> tuple[float, float, str]:
    """Since when its client's host is silent, when the session is ended for it (0: neither), and both in words."""
    since, allowed = record.silent_since, grace_of(record, grace)
    if not since or record.state != "running" or view.get("attached") and not view.get("silent_s"):
        return 0.0, 0.0, ""
    begun, over = (time.strftime("%H:%M:%S", time.localtime(when)) for when in (since, since + allowed))
    return since, since + allowed, (f"its client host is silent since {begun} ({time.time() - since:.0f} s): "
                                    f"checkpointed and ended at {over} if it does not come back")


def _row(record: SessionRecord, view: dict[str, Any], line: dict[str, Any] | None = None,
         grace: float = AGENT_GRACE) -> dict[str, Any]:
    """One line of ``rgpu ps``; ``line``: where a parked one stands in the queue."""
    stats, words, gpu = dict(view.get("stats") or {}), view.get("last_words") or {}, view.get("gpu") or {}
    if record.state == "ended" and words.get("pid") == record.program.pid:  # and not of an earlier one of that name
        stats.update(words)
    catch_up = dict(view.get("catch_up") or {})
    since, ends, silent = _silence(record, view, grace)
    notes = [record.reason if record.state not in ("running",) else "", _in_line(line), silent,
             str(stats.get("blocked_reason") or ""),
             f"diverged: {stats['divergence']}" if stats.get("divergence") else "",
             str(view.get("error_detail") or ""), _pinned(view.get("pins")),
             f"catching up ({catch_up['state']}): {catch_up.get('reason')}"
             if catch_up.get("state") in ("ordered", "overlapping") else ""]
    return {"session": record.name, "state": record.state, "host": record.owner, "epoch": record.epoch,
            "memory_bytes": view.get("memory_bytes"), "calls": stats.get("calls", view.get("position")),
            "awaited_calls": stats.get("awaited_calls"), "bytes": stats.get("bytes"), "pid": record.program.pid,
            "worker_pid": view.get("worker_pid"), "command": record.program.command, "attached": view.get("attached"),
            "module_bytes": stats.get("module_bytes"), "module_bytes_saved": stats.get("module_bytes_saved"),
            "modules": view.get("modules"), "journal_bytes": stats.get("journal_bytes"), "reason": record.reason,
            "shared_bytes_to_device": stats.get("shared_bytes_to_device"),
            "shared_bytes_from_device": stats.get("shared_bytes_from_device"),
            "same_host": str(stats.get("same_host") or "")[:300],
            "divergences": stats.get("divergences", 0), "exposure": stats.get("exposure"),
            "unsupported_calls": _names(stats.get("unsupported_calls")), "compute": record.wants.compute or None,
            "gpu_seconds": gpu.get("busy_s"), "gpu_share": gpu.get("recent"), "compute_limit": gpu.get("limit"),
            "held_seconds": gpu.get("held_s"), "catch_up": catch_up.get("state"),
            "catch_ups": catch_up.get("catch_ups"), "catch_up_stalls": catch_up.get("stalls"),
            "priority": record.wants.priority, "position": line.get("position") if line else None,
            "silent_since": since or None, "ends_at": ends or None,
            "note": "; ".join(note for note in notes if note), "age_s": max(0.0, time.time() - record.created)}


def _pinned(pins: Any) -> str:
    """Why a session cannot move, if anything keeps it."""
    return f"cannot move: {'; '.join(_names(pins))}" if pins else ""


def _names(value: Any) -> list[str]:
    """Names of functions, from an agent, which may say anything."""
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _plain(record: Any) -> dict[str, Any] | None:
    return None if record is None else {name: getattr(record, name) for name in record.__struct_fields__}
