"""The node daemon: makes the parts of a node, connects them, and starts and stops them in order.

One asyncio loop. Blocking work (workers' sockets, the store, the registry's SQLite) runs in threads. Only the code that
starts the daemon imports this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
from pathlib import Path

import structlog

from rgpu import __version__
from rgpu.checkpoint.blobs import places
from rgpu.checkpoint.store import retention
from rgpu.link.control import ControlServer
from rgpu.link.control.access import Actor
from rgpu.link.description import update_endpoint
from rgpu.link.gate.budget import budget_for
from rgpu.link.keys import Endpoint
from rgpu.link.loggers import configure_logging
from rgpu.link.secrets import PoolSecrets
from rgpu.migrate.leader.hosts import pool_record
from rgpu.migrate.membership.members import node_name
from rgpu.migrate.membership.registration import new_incarnation
from rgpu.server.box import privileges
from rgpu.server.node import belonging
from rgpu.server.node.background import Background
from rgpu.server.node.commands.adopting import AdoptCommands
from rgpu.server.node.commands.checkpoints import CheckpointCommand
from rgpu.server.node.commands.entrance import Command, CommandEntrance
from rgpu.server.node.commands.fence import LeaderFence
from rgpu.server.node.commands.keys import KeyCommands
from rgpu.server.node.commands.moves import MoveCommands
from rgpu.server.node.commands.starts import SessionStarts
from rgpu.server.node.commands.workers import WorkerCommands
from rgpu.server.node.devices.examining import Examining
from rgpu.server.node.devices.look import device_records, device_slot
from rgpu.server.node.devices.mps_server import MpsServer
from rgpu.server.node.devices.slots import DeviceSlots
from rgpu.server.node.devices.using import DeviceUse
from rgpu.server.node.endings import Endings
from rgpu.server.node.gangs.verbs import GangVerbs
from rgpu.server.node.identity import Identity
from rgpu.server.node.metrics import Metrics
from rgpu.server.node.node_state import NodeState
from rgpu.server.node.options import Options
from rgpu.server.node.pool.candidacy import Candidacy
from rgpu.server.node.pool.commanding import NodeCommander
from rgpu.server.node.pool.description import Description
from rgpu.server.node.pool.keyring import Keyring
from rgpu.server.node.pool.leader_link import LeaderLink
from rgpu.server.node.pool.leader_reports import LeaderReports
from rgpu.server.node.pool.local_leader import LocalLeader
from rgpu.server.node.pool.memory import RecordMemory
from rgpu.server.node.pool.peers import Peers
from rgpu.server.node.pool.reconciler import Reconciler
from rgpu.server.node.pool.records import PoolRecords
from rgpu.server.node.pool.registration import Registration
from rgpu.server.node.pool.taking_back import TakingBack
from rgpu.server.node.pool.trust import RegistryTrust
from rgpu.server.node.ports.data_port import DataPort
from rgpu.server.node.ports.port_watch import PortWatch
from rgpu.server.node.ports.web_page import Told, WebPage
from rgpu.server.node.rank_links import RankLinks
from rgpu.server.node.rotation.following import SecretsFollower
from rgpu.server.node.rotation.verbs import SecretVerbs
from rgpu.server.node.sessions.agents import SessionAgents
from rgpu.server.node.sessions.deadline import Deadline
from rgpu.server.node.sessions.device_room import DeviceRoom
from rgpu.server.node.sessions.held import HeldSessions
from rgpu.server.node.sessions.move_progress import MoveProgress
from rgpu.server.node.sharing import SharedMemory
from rgpu.server.node.state_file import Reserve, hold_name, write_state
from rgpu.server.node.store.checkpoint_quota import CheckpointQuota
from rgpu.server.node.store.checkpoint_shares import CheckpointShares
from rgpu.server.node.store.node_checkpoints import NodeCheckpoints
from rgpu.server.node.store.spool import ImportSpool
from rgpu.server.node.verbs.attachments import Attachments
from rgpu.server.node.verbs.audit import Audit
from rgpu.server.node.verbs.checkpoint_verbs import CheckpointVerbs
from rgpu.server.node.verbs.gate import Gate
from rgpu.server.node.verbs.leader_verbs import LeaderRequests, LeaderVerbs
from rgpu.server.node.verbs.member_verbs import MemberVerbs
from rgpu.server.node.verbs.node_verbs import NodeVerbs
from rgpu.server.node.verbs.operator_verbs import HostVerbs, PoolVerbs
from rgpu.server.node.verbs.quota_verbs import QuotaVerbs
from rgpu.server.node.verbs.registry_repair import RegistryRepair
from rgpu.server.node.verbs.session_verbs import OwnerVerbs, SessionVerbs
from rgpu.server.node.verbs.views import LastWords, NodeViews
from rgpu.server.node.verbs.web_verbs import WebVerbs
from rgpu.server.node.worker_events import WorkerDeaths, WorkerEvents
from rgpu.server.node.workers import handles
from rgpu.server.node.workers.boxes import Boxes, usual_memory
from rgpu.server.node.workers.compute import ComputeShares
from rgpu.server.node.workers.derived_files import DerivedFiles
from rgpu.server.node.workers.logs import WorkerLogs
from rgpu.server.node.workers.long_kernels import LongKernels
from rgpu.server.node.workers.starter import WorkerStarter
from rgpu.server.node.workers.warm_workers import WarmWorkers
from rgpu.session.errors import Refused, RgpuError

log = structlog.get_logger(__name__)

LEAVE_SECONDS = 5.0
#: Descriptors that a daemon requests, where its hard limit allows: each control connection takes three.
MOST_DESCRIPTORS = 65536


class Daemon:
    """One node of the pool. Make it in the loop that runs it."""

    def __init__(self, options: Options) -> None:
        """Raises :class:`AlreadyExists` where a daemon of that name runs on this host, and what its devices raise."""
        self.options = options
        directory = options.files.node_directory(options.host)
        self.identity = Identity(options.host, new_incarnation(), options.files.add_node(options.host), directory)
        self._name = hold_name(directory, options.host)  # kept open: it holds the lock on the name
        self.background = Background()
        self.reserve = Reserve()
        descriptors = raise_descriptor_limit()
        self.budget = budget_for(descriptors)
        self.authorized = options.files.authorized
        self.secrets = PoolSecrets(options.files)
        self.control = ControlServer(self.identity.keys, self.authorized,
                                     f"tcp://{options.listen}:{options.control_port or '*'}",
                                     budget_for(descriptors, each=3))
        self.metrics = Metrics()
        self.web = WebPage(options.web, options.web_url, options.host) if options.web else None
        if self.web is not None:
            self.control.own_processes[self.web.keys.public] = self.web.keys.public_key()
        self.audit = Audit(directory / "audit.jsonl", options.host)
        self.control.audit, self.control.stranger = self.audit.answered, self.audit.stranger
        self.control.observe = lambda verb, outcome: self.metrics.count("rgpu_requests_total", verb, outcome)
        self._answers = False
        self._elsewhere = False  #: the registry in the options is not that of this node's pool
        self._make_sessions()
        self._make_pool()
        self._make_verbs_of_the_leader()
        self._make_reports()
        self._make_commands()

    # -- parts ------------------------------------------------------------------
    def _make_sessions(self) -> None:
        """Devices, and the sessions that are held on them."""
        options, host, directory = self.options, self.identity.host, self.identity.directory
        slots = [device_slot(spec, host, options.device_memory) for spec in options.devices]
        self.held = HeldSessions(host)
        self.devices = DeviceSlots(host, {slot.spec: slot for slot in slots}, self.held.handles,
                                   lambda spec: self.warm.memory(spec))
        self.boxes = Boxes.of_node(directory, options.box, users=options.worker_uids, cgroup=options.cgroup,
                                   memory=options.worker_memory or usual_memory(), io=options.worker_io,
                                   devices=options.devices, store=self._store_folder())
        self.mps = MpsServer(directory, options.mps) if options.mps else None
        if self.mps is not None:
            self.boxes.mps, self.boxes.before_kill = self.mps.environment(), self.mps.terminate
        self.warm = WarmWorkers(
            directory, options.spares, spawn=self.boxes.spawn, release=self.boxes.release, room=self.devices.free,
            options=handles.common_options(directory, options.log_level, options.module_cache_size,
                                           self.boxes.memory))
        self.shares = CheckpointShares(options.checkpoint_bandwidth, self.devices.free)
        self.room = DeviceRoom(self.devices, self.held.leaving, self.shares, self.warm.give_way)
        self.progress = MoveProgress()
        self.logs = WorkerLogs(host, directory)

    def _store_folder(self) -> Path | None:
        """The folder of checkpoints, if they are stored in one on this host."""
        place = places.parse(self.options.store or str(self.options.files.root / "images"))
        return Path(place.path) if place.is_directory else None

    def _make_pool(self) -> None:
        """The registry, the store, the other nodes, and this node's place among them."""
        options, host = self.options, self.identity.host
        self.memory = RecordMemory(host, self.identity.directory, self.held.here)
        self.records = PoolRecords(self.memory.remember)
        self.trust = RegistryTrust(self.records)
        self.peers = Peers(self.identity.keys)
        self.local = LocalLeader(host)
        self.fence = LeaderFence(host, self.records.leader)
        own = options.files.root / "images"
        self.checkpoints = NodeCheckpoints(
            places.connect(places.parse(options.store or str(own)),
                           places.credentials(options.store_credentials, os.environ)),
            self.secrets.of_checkpoints, self.records.record, self.records.sessions,
            retention.Policy(options.keep_images or None), direct=self.boxes.store is not None)
        self.spool = ImportSpool(self.identity.directory / "imports")
        self.compute = ComputeShares(options.enforce_compute, lambda: list(self.held.running.values()),
                                     self.records.record)
        self.registration = Registration(self.identity, lambda: device_records(self.devices), options.lease,
                                         options.store or f"{socket.gethostname()}:{own.resolve()}")
        self.following = SecretsFollower(host, self.secrets, self.records, self.peers, self.registration.tell_secret)
        self.deadline = Deadline(host, self.registration.in_time, lambda: self.registration.keeper.page.fd)

    def _make_verbs_of_the_leader(self) -> None:
        """The leader's verbs, used while this node leads, and the link to the node that leads."""
        options = self.options
        words = LastWords()
        self.views = NodeViews(self.held, self.local, words, self.records, self.peers, DeviceUse(self.devices.slots))
        self.attachments = Attachments(self.records, self.secrets)
        self.gate = Gate(self.authorized, self.records)
        self.control.admit = self.gate.admit
        self.members = MemberVerbs(self.local, self.records, options.files, self.authorized, options.registry_address,
                                   self.secrets)
        sessions = LeaderVerbs(self.local, self.records, self.attachments, self.views, words, self.checkpoints,
                               self.background, self.gate)
        self.checkpoint_quota = CheckpointQuota(self.checkpoints, self.records, self.authorized, self.gate.user_of)
        self.quotas = QuotaVerbs(self.local, self.records, self.authorized, self.checkpoint_quota)
        self.leader_verbs = self.gate.guard({**sessions.table, **HostVerbs(self.local, self.gate).table,
                                             **self.members.table, **self.quotas.table})
        me = Actor("node", node_name(options.host), public=self.identity.keys.public)
        self.link = LeaderLink(self.local, self.leader_verbs, self.records, self.peers, options.lease, me)

    def _make_reports(self) -> None:
        """Reactions to the registry's records and to workers' events."""
        self.reports = LeaderReports(self.identity.host, self.link.ask, self.background.stopping)
        self.reconciler = Reconciler(self.identity, self.records, self.held, self.trust, self.reports,
                                     self.background.spawn)
        self.taking_back = TakingBack(self.identity, self.held, self.records, self.reconciler, self.boxes)
        self.examining = Examining(self.devices.slots, self.registration.tell_devices, self.background.spawn)
        self.endings = Endings(self.identity.directory, self.held, self.link.ask, self.memory.recall, self.background)
        deaths = WorkerDeaths(self.held, self.reports, self.background, self.metrics, self.examining)
        self.events = WorkerEvents(deaths, self.reconciler, self.endings, self.progress, self.background,
                                   RankLinks(self.held, self.records, self.secrets, self.gate.user_of),
                                   SharedMemory(self.held, self.records, self.link.ask, self.gate.user_of))

    def _make_commands(self) -> None:
        """Commands of the leader to this node, and of this node to others while it leads."""
        options, host = self.options, self.identity.host
        self.agents = SessionAgents(self.memory.recall, self.records.find, self.authorized,
                                    asyncio.get_running_loop(), self.background.spawn)
        self.port = DataPort((options.listen, options.data_port), self.secrets, self.held, self.deadline,
                             self.budget, self.identity.keys, self.agents, options.advertised)
        self.watch = PortWatch(self.port, lambda: self.control.bound, self._reached)
        self.adopting = AdoptCommands(self.identity, self.held, self.memory, self.trust, self.fence,
                                      self._believed_again, self.trust.mending)
        self.entrance = CommandEntrance(
            self._commands(), self.fence, self.progress, self.metrics.command,
            lambda verb, args, actor, peer, outcome, reason, favour: self.audit.done(
                verb, args, actor, peer, outcome, reason, favour=favour))
        commander = NodeCommander(host, self.entrance.perform, self.records, self.peers, options.lease)
        self.candidacy = Candidacy(self.local, commander, options.lease, options.client_grace, self.metrics.leader)

    def _commands(self) -> dict[str, Command]:
        """Each command of the leader, with the function that carries it out."""
        options, spawn = self.options, self.background.spawn
        starter = WorkerStarter(self.identity.directory, self.events.hear, options.log_level,
                                options.module_cache_size, self.warm, self.boxes,
                                DerivedFiles(self.identity.directory, options.module_cache_size),
                                self.checkpoints.tag_of, self.records.recoverable if self.mps is not None else None)
        starts = SessionStarts(self.held, self.room, starter, self.checkpoints, self.deadline, self.reconciler.watch,
                               lambda device, why: spawn(self.examining.suspect(device, why)))
        moves = MoveCommands(self.held, self.room, starter, self.deadline, self.reconciler.watch, self.port.admit)
        workers = WorkerCommands(self.held, lambda session: spawn(self.records.session(session)))
        checkpoints = CheckpointCommand(self.held, self.checkpoints, self.shares, self.deadline,
                                        self.checkpoint_quota)
        return {
            "worker.start": starts.start, "worker.describe": workers.describe, "worker.forget": workers.forget,
            "move.receive": moves.receive, "move.send": moves.send, "move.reconcile": self.reconciler.reconcile,
            "move.settle": self.reconciler.reconcile,
            "session.image": checkpoints.checkpoint, "session.cut": checkpoints.cut,
            "session.notice": workers.notice, "session.drop": workers.drop,
            "keys.forget": KeyCommands(self.authorized, self.identity.keys.public, self._not_wanted).forget,
            "session.logs": self.logs.newest, "node.holdings": self.adopting.holdings,
            "node.adopt": self.adopting.adopt}

    def _register(self) -> None:
        """Enter the verbs of the control port: users', operators', and the leader's commands by their own entrance."""
        requests = LeaderRequests(self.link, self.local, self.leader_verbs, self.background, self.gate,
                                  self.audit)
        for verbs in (
                requests, self.members, self.quotas,
                NodeVerbs(self.identity.host, self.records, self.views, self.attachments, self.background.stopping,
                          self.gate),
                OwnerVerbs(self.records, self.attachments, self.memory),
                SessionVerbs(self.records, self.views, self.logs, self.peers, self.options.client_grace,
                             self.gate),
                GangVerbs(self.records, self.views, self.gate),
                PoolVerbs(self.records, self.views, self.gate),
                WebVerbs(self.identity.host, self.web.url if self.web else "", self.control.grants, self.authorized),
                SecretVerbs(self.secrets, self.records),
                CheckpointVerbs(self.checkpoints, self.spool, self.gate, self.checkpoint_quota),
                RegistryRepair(self.identity.host, self.options.registry_address, self.adopting, self.peers,
                               self.records.endpoints, self.options.files)):
            verbs.register(self.control)
        self.entrance.register(self.control, self.background.reporter, dict.fromkeys(self.leader_verbs, requests.take))

    # -- life -------------------------------------------------------------------
    async def run(self) -> None:
        """Serve until a signal, or `pool.stop`. Raises what opening the registry, joining and listening raise."""
        loop, stopping = asyncio.get_running_loop(), self.background.stopping
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.set)
        try:
            if self.mps is not None:
                await asyncio.to_thread(self.mps.start)
            for device in self.options.devices:
                if device.startswith("cuda"):  # which walls a vendor's driver bears is found by trying
                    await asyncio.to_thread(self.boxes.prove, device)
            self.boxes.warn()
            await self.taking_back.connect(self.events.hear)
            await self._settle()
            await self.records.open(self.options.registry_address, self.identity.directory / "registry.json", stopping)
            self._register()
            await self._wait_believed()
            await belonging.claim(self.records.registry, self.options.files.read_description().id)
            await self._join(loop)
            self._write_state(ready=True)
            log.info("node is ready", host=self.identity.host, control=self.control.address,
                     data=address(self.port.bound), devices=list(self.devices.slots), version=__version__)
            self._work()
            await stopping.wait()
            log.info("node stops", host=self.identity.host)
        finally:
            await self._stop()

    async def _settle(self) -> None:
        """Check the registry's pool. Raises :class:`Refused` for another pool's; the workers here are kept then."""
        try:
            await belonging.settle(self.options.files, self.identity.host, self.options.registry_address,
                                   self.background.stopping)
        except Refused:
            self._elsewhere = True
            raise

    async def _join(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take back the sessions of workers that were taken over, open the ports, and register."""
        self.registration.keep(self.options.registry_address)
        self.keyring = Keyring(self.authorized, self.records.registry, self.identity.keys.public, self._not_wanted)
        await self.keyring.start()
        # A leader that was deposed while this daemon was down must not be obeyed (OWNERSHIP 6).
        self.fence.begin(await self.records.leader())
        await self.taking_back.take_back(self.deadline.descriptor(), self._wait_believed, self.background.stopping)
        await self._answer()
        await self.following.start()
        self.port.start()
        if self.options.metrics.address:
            state = NodeState(self.held, self.devices, self.fence, self.registration.in_time, self.local, self.records,
                              self._ports)
            self.metrics.serve(self.options.metrics, loop, state.read)
        await self.registration.join(self.records.registry, self.control.address, self.port.address,
                                     self.following.mark, self._returned)

    def _ports(self) -> dict[str, tuple[float, int, int]]:
        """Each port with: 1 if it can be reached, unauthenticated connections that wait, connections turned away."""
        gates = {"data": self.port.gate, "control": self.control.gate}
        return {name: (float(not self.watch.reach[f"{name} port"].why), gate.waiting, gate.turned_away)
                for name, gate in gates.items() if gate is not None}

    def _not_wanted(self) -> None:
        """Leave the pool, because this node's own key was revoked; other nodes recover its sessions."""
        if not self.background.stopping.is_set():
            log.error("this host's key was revoked: the node stops", host=self.identity.host)
            asyncio.get_running_loop().call_later(0.5, self.background.stopping.set)  # the leader is answered first

    def _returned(self) -> None:
        self.background.spawn(self.reconciler.reconcile_all())

    def _work(self) -> None:
        """Start the background tasks."""
        spawn = self.background.spawn
        if self.options.coordinator:
            spawn(self.candidacy.run(self.records.registry, self.identity, self.registration))
        spawn(self.keyring.run())
        spawn(self.following.run())
        spawn(Description(self.options.files, self.records, self.authorized).run())
        spawn(self.registration.refresh())
        spawn(self.watch.run())
        spawn(self.spool.run())
        spawn(self.logs.run())
        spawn(self.taking_back.tell_agents(self.control.address, list(self.held.running.values())))
        self.warm.start(list(self.devices.slots))
        if self.mps is not None:
            spawn(self.mps.keep())
        spawn(self.compute.run())
        spawn(LongKernels(lambda: list(self.held.running.values()), self._most_kernel_seconds,
                          lambda session, reason: self.link.ask("session.end", {"session": session, "reason": reason})
                          ).run())
        self.endings.left_behind()
        spawn(self.endings.run())
        self.examining.watch()
        if self.web is not None:
            self.views.web = self.web.url
            told = Told(self.identity.host, self.control.address, self.identity.keys.public, self.options.log_level)
            spawn(self.web.run(told, self.background.stopping.is_set))

    async def _most_kernel_seconds(self) -> int:
        return (await pool_record(self.records.registry)).max_kernel_seconds

    async def _wait_believed(self) -> None:
        """Wait until the registry is trusted."""
        if self.trust.mistrust():
            await self.trust.wait_believed(self.options.registry_address, self.authorized, self.background.stopping,
                                           self._answer)

    async def _believed_again(self) -> tuple[str, int] | None:
        """Read everything anew; return the leader's (host, revision) on record, None before this node has joined."""
        if not self.registration.joined:
            return None
        leader = await self.records.leader()
        self.keyring.again()
        self._returned()
        return leader or ("", 0)

    async def _answer(self) -> None:
        """Open the control port: at the start's end, or earlier, where `rgpu pool adopt` has to be answered first."""
        if not self._answers:
            self._answers = True
            await self.control.start()
            update_endpoint(self.options.files,
                            Endpoint(self.control.address, self.identity.keys.public, self.identity.host))

    async def _reached(self, why: str) -> None:
        """Write into the state file and the record why a port cannot be reached, or (``why`` empty) that all can be."""
        try:
            with self.reserve.given():
                self._write_state(ready=not why, reason=why)
        finally:
            await self.registration.stand_aside(why)

    def _write_state(self, ready: bool, reason: str = "") -> None:
        write_state(self.options.files, self.identity.host, {
            "ready": ready, "reason": reason, "control": self.control.address, "data": address(self.port.address),
            "devices": list(self.devices.slots), "metrics": self.metrics.port,
            "web": self.web.url if self.web else ""})

    async def _stop(self) -> None:
        self.port.close()
        self.examining.close()
        self.warm.close()
        await asyncio.to_thread(self.metrics.close)
        if self.web is not None:
            await self.web.close()
        self.background.cancel()
        with contextlib.suppress(RgpuError, asyncio.TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                await self._leave()
        for session in [] if self._elsewhere else [*self.held.running, *self.held.incoming]:
            with contextlib.suppress(RgpuError):
                await self.held.end(session, "the node stops")
        if self.mps is not None and not (self._elsewhere or self.held.handles()):
            await asyncio.to_thread(self.mps.stop)
        await self.control.stop()
        await self.peers.close()
        self._write_state(ready=False)
        self.audit.close()

    async def _leave(self) -> None:
        await self.registration.leave()
        await self.records.close()


def address(pair: tuple[str, int]) -> str:
    """``host:port``."""
    return f"{pair[0]}:{pair[1]}"


def raise_descriptor_limit() -> int:
    """Raise the descriptor limit to the hard limit, :data:`MOST_DESCRIPTORS` at most; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(MOST_DESCRIPTORS, hard if hard != resource.RLIM_INFINITY else MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return min(soft, MOST_DESCRIPTORS) if soft != resource.RLIM_INFINITY else MOST_DESCRIPTORS


def run(options: Options) -> None:
    """Run the daemon until SIGTERM."""
    configure_logging(level=options.log_level, host=options.host)
    privileges.hide_memory()  # the process holds the pool's secret

    async def main() -> None:
        await Daemon(options).run()

    asyncio.run(main())
