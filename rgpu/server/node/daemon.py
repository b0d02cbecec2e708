"""The node daemon: ports, workers, membership, and (when elected) the coordinator.

One asyncio loop. Blocking work (workers' sockets, the store, the registry's
SQLite) runs in threads. Verbs are handled in :mod:`rgpu.server.node.verbs.pool_verbs` (what users and
agents ask) and :mod:`rgpu.server.node.verbs.node_verbs` (what a coordinator commands).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from rgpu import __version__
from rgpu.checkpoint.blobs import places
from rgpu.checkpoint.device import DeviceFacts
from rgpu.checkpoint.store import retention
from rgpu.link.control import AsyncControlClient, ControlServer
from rgpu.link.keys import Endpoint, PoolFiles
from rgpu.link.logging import configure_logging
from rgpu.migrate.leader.silence import AGENT_GRACE
from rgpu.migrate.records.schema import NodeRecord, SessionRecord
from rgpu.server.module_cache import DEFAULT_SIZE
from rgpu.server.node.commanding import unless_gone
from rgpu.server.node.data_port import DataPort
from rgpu.server.node.devices import driver
from rgpu.server.node.devices.examining import Examining
from rgpu.server.node.endings import Endings
from rgpu.server.node.leadership import Leadership
from rgpu.server.node.metrics import Metrics
from rgpu.server.node.sessions import END_SECONDS, DeviceSlot, Node
from rgpu.server.node.state_file import hold_name, update_endpoint, write_state
from rgpu.server.node.store.images import NodeImages
from rgpu.server.node.verbs.image_verbs import ImageVerbs
from rgpu.server.node.verbs.node_verbs import NodeVerbs
from rgpu.server.node.verbs.operator_verbs import OperatorVerbs
from rgpu.server.node.verbs.pool_verbs import PoolVerbs
from rgpu.server.node.verbs.registry_repair import Adopting
from rgpu.server.node.workers import handles as workers
from rgpu.server.node.workers.compute import ComputeShares
from rgpu.server.node.workers.warm_workers import WarmWorkers
from rgpu.session.devices import parts
from rgpu.session.errors import DeviceError, NotFound, PoolUnavailable, RgpuError, UsageError

log = structlog.get_logger(__name__)

#: What a worker says of a move under way, and who asked for it may know.
PROGRESS = frozenset({"phase", "round", "pages_sent", "pages_total", "pages_left", "bytes_sent", "mode", "why",
                      "expected", "behind_ms", "waiting_bytes"})


@dataclass(frozen=True)
class Options:
    """What `rgpu server` was told. Sizes in bytes, lease in seconds."""

    files: PoolFiles
    host: str
    devices: tuple[str, ...]
    device_memory: int
    listen: str
    control_port: int
    data_port: int
    lease: float
    coordinator: bool
    log_level: str
    module_cache_size: int = DEFAULT_SIZE  #: bytes of images kept on disk; 0: none
    registry: str = ""  #: etcd://…; "": the embedded one, in the pool's directory
    store: str = ""  #: where images are; the pool's directory if empty
    store_credentials: Path | None = None
    keep_images: int = 3  #: newest images of each session that stay; 0: all
    checkpoint_bandwidth: int = 0  #: bytes/s for all checkpoints together; 0: no limit
    enforce_compute: str = "shared"  #: when sessions are held to their shares (:mod:`rgpu.server.node.workers.compute`)
    spares: int = 0  #: workers that stand ready for each device
    advertise_data: str = ""  #: HOST:PORT under which the data port is reached, if not its own
    client_grace: float = AGENT_GRACE  #: s that a client's host may be silent, where its session does not say
    metrics: str = ""  #: HOST:PORT where Prometheus may scrape; empty: nowhere


def device_slot(spec: str, host: str, cpu_memory: int) -> DeviceSlot:
    """Look at a device. Raises :class:`UsageError`, :class:`DeviceError` with what to do."""
    kind, _, ordinal = spec.partition(":")
    if kind not in ("cpu", "cuda") or (ordinal and not ordinal.isdigit()):
        raise UsageError(f"unknown device {spec!r}: use cpu, cpu:N or cuda:N")
    number = int(ordinal or 0)
    facts: DeviceFacts
    if kind == "cpu":
        from rgpu.server.device.cpu.facts import make_facts

        facts = make_facts(number, cpu_memory, host)
        return DeviceSlot(f"cpu:{number}", facts, cpu_memory)
    try:
        from rgpu.server.device.cuda.facts import facts as cuda_facts

        facts = cuda_facts(number)
    except (ImportError, RuntimeError, DeviceError) as error:  # RuntimeError: the bindings found no libcuda
        raise DeviceError(driver.explain(error, f"cuda:{number}"), getattr(error, "result", 999)) from error
    # Contexts and modules need room that no session's quota counts.
    return DeviceSlot(f"cuda:{number}", facts, facts.total_memory - (2 << 30))


class Daemon:
    """One node of the pool."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.files = options.files
        self.host = options.host
        self.directory = self.files.node_directory(options.host)
        self.keys = self.files.add_node(options.host)
        self._name = hold_name(self.directory, options.host)  # kept open: the lock is the proof
        slots = [device_slot(spec, options.host, options.device_memory) for spec in options.devices]
        place = places.parse(options.store or str(self.files.root / "images"))
        self.images = NodeImages(
            places.connect(place, places.credentials(options.store_credentials, os.environ)), self.files.secret(),
            self._record, self._records, retention.Policy(options.keep_images or None))
        self.node = Node(host=self.host, directory=self.directory, images=self.images,
                         pool_secret=self.files.secret(), slots={slot.spec: slot for slot in slots},
                         on_event=self.worker_event, log_level=options.log_level, deadline=self.deadline_fd,
                         module_cache_size=options.module_cache_size,
                         in_time=self.in_time, watch_move=self.watch_move,
                         checkpoint_bandwidth=options.checkpoint_bandwidth)
        self.warm = self.node.warm = WarmWorkers(
            self.directory, options.spares, spawn=workers.spawn, room=self.node.free,
            options=workers.common_options(self.directory, options.log_level, options.module_cache_size))
        self.authorized = self.files.authorized
        self.control = ControlServer(self.keys, self.authorized,
                                     f"tcp://{options.listen}:{options.control_port or '*'}")
        self.metrics = Metrics(self)
        self.control.observe = lambda verb, outcome: self.metrics.count("rgpu_requests_total", verb, outcome)
        self.leadership = Leadership(self)
        self.adopting = Adopting(self)
        self.node_verbs = NodeVerbs(self)
        self.operator_verbs = OperatorVerbs(self)
        self.pool_verbs = PoolVerbs(self)
        self.image_verbs = ImageVerbs(self)
        self.compute = ComputeShares(options.enforce_compute, lambda: list(self.node.running.values()), self._record)
        self.endings = Endings(self)
        self.examining = Examining(self.node.slots, self.leadership.tell_devices, self.spawn)
        self.node.suspect = lambda device, why: self.spawn(self.examining.suspect(device, why))
        self.stopping = asyncio.Event()
        self._peers: dict[Endpoint, AsyncControlClient] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._answers = False
        self._faults: dict[int, str] = {}  #: pid of a worker: what of its device is to be reported with its end

    async def _record(self, session: str) -> SessionRecord:
        return (await self.leadership.session(session)).record

    async def _records(self) -> list[SessionRecord]:
        return await self.leadership.sessions()

    # -- life -----------------------------------------------------------------
    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stopping.set)
        port = DataPort(self.options.listen, self.options.data_port, self.node.pool_secret, self.node.find, loop)
        self.node.data_address = advertised(self.options.advertise_data) or port.address
        try:
            await self._adopt()
            await self.leadership.open()
            self.pool_verbs.register(self.control)
            self.image_verbs.register(self.control)
            if self.leadership.mistrust():
                await self.leadership.wait_believed()
            await self.leadership.join()
            await self.answer()
            port.start()
            if self.options.metrics:
                self.metrics.serve(self.options.metrics, loop)
            await self.leadership.announce(self.control.address, self.node.data_address)
            self._write_state(ready=True)
            log.info("node is ready", host=self.host, control=self.control.address, data=address(port.address),
                     devices=list(self.node.slots), version=__version__)
            self.leadership.start()
            self.spawn(self._tell_agents(list(self.node.running.values())))
            self.warm.start(list(self.node.slots))
            self.spawn(self.compute.run())
            self.endings.left_behind()
            self.spawn(self.endings.run())
            self.examining.watch()
            await self.stopping.wait()
            log.info("node stops", host=self.host)
        finally:
            await self._stop(port)

    async def answer(self) -> None:
        """Open the control port: at the start's end, or before, where `rgpu pool adopt` has to be answered first."""
        if not self._answers:
            self._answers = True
            await self.control.start()
            update_endpoint(self.files, Endpoint(self.control.address, self.keys.public, self.host))

    def _write_state(self, ready: bool) -> None:
        write_state(self.files, self.host, {
            "ready": ready, "control": self.control.address, "data": address(self.node.data_address),
            "devices": list(self.node.slots), "metrics": self.metrics.port})

    async def _adopt(self) -> None:
        """Take over the workers of an earlier daemon of this node; the registry decides about each later."""
        for handle in await workers.adopt(self.directory, self.worker_event):
            view = handle.view
            handle.device, handle.quota = view.get("device", ""), int(view.get("quota", 0))
            if view["state"] in ("running", "paused"):
                self.node.running[handle.session] = handle
                self.node.epochs[handle.session] = int(view["epoch"])
                log.info("adopted a worker", session=handle.session, epoch=view["epoch"], pid=handle.pid)
            else:
                handle.kill()

    async def _tell_agents(self, adopted: list[workers.WorkerHandle]) -> None:
        """Have the adopted workers tell their agents where this node answers now: it may be at another port.

        An agent that is not attached now learns it when it attaches: it has to ask the pool first.
        """
        values = {"address": self.control.address, "public": self.keys.public}
        await asyncio.gather(*(handle.request("notice", kind="control", values=values) for handle in adopted),
                             return_exceptions=True)

    async def _stop(self, port: DataPort) -> None:
        port.close()
        self.examining.close()
        self.warm.close()
        await asyncio.to_thread(self.metrics.close)
        for task in list(self._tasks):
            task.cancel()
        with contextlib.suppress(RgpuError, asyncio.TimeoutError):
            await asyncio.wait_for(self.leadership.leave(), 5)
        for session in list(self.node.running) + list(self.node.incoming):
            with contextlib.suppress(RgpuError):
                await self.node.session_end(session=session, reason="the node stops")
        await self.control.stop()
        for peer in self._peers.values():
            await peer.close()
        self._write_state(ready=False)

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        """A task that is cancelled with the daemon; its failure is logged."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)

        def done(finished: asyncio.Task[Any]) -> None:
            self._tasks.discard(finished)
            if not finished.cancelled() and finished.exception() is not None:
                log.error("a task failed", error=repr(finished.exception()))

        task.add_done_callback(done)
        return task

    def deadline_fd(self) -> int:
        """The page that says until when this node may begin anything (OWNERSHIP 4)."""
        return self.leadership.keeper.page.fd

    def watch_move(self, session: str, move: str) -> None:
        self.leadership.watch_move(session, move)

    def in_time(self) -> bool:
        return self.leadership.joined and self.leadership.membership.in_time()

    # -- workers ----------------------------------------------------------------
    async def worker_event(self, session: str, event: str, values: dict[str, Any]) -> None:
        """What a worker reports."""
        if event == "died":
            was, of = self.node.died(session, int(values["pid"])), self._faults.pop(int(values["pid"]), "")
            if was:
                self.metrics.count("rgpu_worker_deaths_total")
                log.warning("a worker died", session=session, pid=values["pid"], was=was,
                            position=values.get("position"))
                if was == "running":
                    self.report_death(session, self.node.epochs.get(session, 0),
                                      f"its worker (pid {values['pid']}) on {self.host} died{of}",
                                      {name: values.get(name) for name in ("position", "begun", "complete")})
        elif event == "fault":
            await self._hardware_failed(session, int(values["pid"]), str(values["reason"]))
        elif event == "progress":
            tell = self.node.listeners.get(session)
            if tell is not None:
                tell({key: value for key, value in values.items() if key in PROGRESS})
        elif event in ("withdraw", "read_record"):  # of a move's source, whose promised downtime has run out
            self.spawn(self.leadership.withdraw(session, str(values["move"]), str(values.get("reason", "")))
                       if event == "withdraw" else self.leadership.read_for(session, str(values["move"])))
        elif event == "bye":
            reason = str(values.get("reason") or "the program ended")
            self.endings.ended(session, reason)

    async def _hardware_failed(self, session: str, pid: int, why: str) -> None:
        """A worker has nothing more to say: it is ended, and its device examined before anybody goes there again."""
        handle = self.node.handle(session)
        if handle is None or handle.pid != pid:
            return  # it is on its way out
        devices = parts(handle.device)
        for device in devices:
            self.metrics.count("rgpu_hardware_faults_total", device)
        self._faults[pid] = f" of {why} of {handle.device}"
        handle.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(handle.closed.wait(), END_SECONDS)
        await asyncio.gather(*(self.examining.suspect(device, f"{why} in session {session}") for device in devices))
        handle.give_up()  # a driver that hangs may hold the process for good, not the session

    def report_death(self, session: str, epoch: int, reason: str, place: dict[str, Any] | None = None) -> None:
        """A session that this node owns at ``epoch`` has no worker any more: the leader decides what follows.

        ``place``: how far its work came: {position, begun, complete}, as far as it is known.
        """
        self.spawn(self._report_death(session, {"session": session, "host": self.host, "epoch": epoch,
                                                "reason": reason, **(place or {})}))

    async def _report_death(self, session: str, args: dict[str, Any]) -> None:
        """Tell the leader until one has taken it: the session waits for that."""
        while not self.stopping.is_set():
            try:
                await self.pool_verbs.ask_leader("worker.died", args)
                return
            except RgpuError as error:
                if error.code in ("not_found", "fenced", "refused") and error.detail.get("reason") != "not leading":
                    log.info("nothing to recover", session=session, reason=error.message)
                    return
                log.warning("the leader was not told of a dead worker yet", session=session, reason=error.message)
                await asyncio.sleep(0.5)

    # -- other nodes ----------------------------------------------------------------
    def peer(self, endpoint: Endpoint) -> AsyncControlClient:
        """A client to another node's control port, kept."""
        found = self._peers.get(endpoint)
        if found is None:
            found = self._peers[endpoint] = AsyncControlClient(self.keys, endpoint)
        return found

    async def _living(self, host: str) -> NodeRecord:
        """Raises :class:`NotFound`, :class:`PoolUnavailable`."""
        node = (await self.leadership.nodes()).get(host)
        if node is None:
            raise NotFound(f"no node is called {host}, or it is down", host=host)
        if not node.control:
            raise PoolUnavailable(f"{host} is still starting")
        return node

    async def endpoint_of(self, host: str) -> Endpoint:
        """Raises :class:`NotFound`, :class:`PoolUnavailable`."""
        node = await self._living(host)
        return Endpoint(node.control, node.public_key, host)

    async def command(self, host: str, verb: str, args: dict[str, Any], *, leader: int, epoch: int, command_id: str,
                      timeout: float = 30.0, on_progress: Any = None) -> dict[str, Any]:
        """Command a node (:class:`rgpu.migrate.leader.coordinator.NodeCommands`): this one directly, others over
        control."""
        if host == self.host:
            return await self.node_verbs.perform(verb, args, leader=leader, command_id=command_id,
                                                 on_progress=on_progress)
        node = await self._living(host)
        client = self.peer(Endpoint(node.control, node.public_key, host))
        call = client.call("node.command", {"verb": verb, "args": args}, timeout=timeout, leader=leader,
                           epoch=epoch, command=command_id, on_progress=on_progress)
        result = await unless_gone(call, lambda: self.leadership.incarnation_of(host), node.incarnation,
                                   self.options.lease, f"{verb} on {host}")
        return dict(result or {})


def advertised(text: str) -> tuple[str, int] | None:
    """``HOST:PORT`` as a pair; None for an empty text. Raises :class:`UsageError`."""
    if not text:
        return None
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"{text!r} is no HOST:PORT")
    return host, int(port)


def address(pair: tuple[str, int]) -> str:
    """``host:port``."""
    return f"{pair[0]}:{pair[1]}"


def run(options: Options) -> None:
    """The daemon's process, until SIGTERM."""
    configure_logging(level=options.log_level, host=options.host)

    async def main() -> None:
        await Daemon(options).run()

    asyncio.run(main())
