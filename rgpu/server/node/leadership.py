"""The daemon's dealings with the registry: membership, election, and what its records mean here.

While this node leads, :class:`rgpu.migrate.leader.coordinator.Coordinator` runs here;
otherwise requests for the leader are passed on to the node that leads.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import structlog

from rgpu import __version__
from rgpu.link.faults import fault
from rgpu.link.keys import Endpoint
from rgpu.migrate.leader.coordinator import Coordinator
from rgpu.migrate.membership.election import Election, current_leader
from rgpu.migrate.membership.leases import LeaseKeeper
from rgpu.migrate.membership.registration import Membership, new_incarnation
from rgpu.migrate.records import ownership
from rgpu.migrate.records.ownership import Held, Leader
from rgpu.migrate.records.reconcile import Holding, settle
from rgpu.migrate.records.schema import (
    MAX_TEXT,
    NODES,
    SESSIONS,
    DeviceRecord,
    NodeRecord,
    SessionRecord,
    decode,
    node_key,
    session_key,
)
from rgpu.migrate.registry.base import Registry, txn_certain
from rgpu.migrate.registry.open import open_registry
from rgpu.server.node.devices import driver
from rgpu.server.node.keyring import Keyring
from rgpu.session.errors import Fenced, NotFound, PoolUnavailable, RgpuError, UnknownOutcome
from rgpu.session.facts import DeviceInfo

if TYPE_CHECKING:
    from rgpu.server.node.daemon import Daemon

log = structlog.get_logger(__name__)

WITHDRAW_TRIES = 5  #: of a source's abort, while the record changes
SETTLE_AGAIN = 0.5  #: seconds between two looks at a record that decides nothing yet


class Leadership:
    """See the module docstring. ``coordinator`` is set while this node leads."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.coordinator: Coordinator | None = None
        self.incarnation = new_incarnation()
        self.registry: Registry
        self.keeper: LeaseKeeper
        self.membership: Membership
        self.joined = False
        self.endpoints: dict[str, Endpoint] = {}  #: where nodes were last known to answer, by host
        self._settling: set[tuple[str, str]] = set()  #: (session, move) that are looked at again later
        self._read: dict[str, Held] = {}  #: of sessions whose move is open, as their record was read last
        self._settle_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    # -- joining and leaving ------------------------------------------------------
    @property
    def address(self) -> str:
        """The registry's."""
        return self.daemon.options.registry or self.daemon.files.registry_address()

    async def open(self) -> None:
        """Open the registry, also one that is not believed: then only `rgpu pool adopt` can be answered."""
        self.registry = await self._open(self.address)

    def mistrust(self) -> str:
        """Why nothing is decided by the registry; empty while it is believed."""
        return str(getattr(self.registry, "mistrust", ""))

    async def wait_believed(self) -> None:
        """Until `rgpu pool adopt` has mended the registry. The keys on record let the others ask this node for it."""
        log.error("this node waits for `rgpu pool adopt`", reason=self.mistrust())
        await self.daemon.answer()
        while self.mistrust() and not self.daemon.stopping.is_set():
            with contextlib.suppress(RgpuError):
                fresh = await open_registry(self.address)
                try:
                    await Keyring(self.daemon.authorized, fresh).read()
                finally:
                    await fresh.close()
            await asyncio.sleep(SETTLE_AGAIN)

    async def join(self) -> None:
        """Take back what adopted workers say they hold."""
        address = self.address
        # A daemon frozen for longer than its lease is dead to the pool: the keeper must not renew for it.
        self.keeper = LeaseKeeper(address, patience=2 * self.daemon.options.lease)
        self.keyring = Keyring(self.daemon.authorized, self.registry)
        await self.keyring.start()
        # A leader that was deposed while this daemon was down must not be obeyed (OWNERSHIP 6).
        self.daemon.node_verbs.highest_leader = await self.leader_revision()
        for handle in self.daemon.node.running.values():
            await handle.give_deadline(self.keeper.page.fd)
        for session in list(self.daemon.node.running):
            await self._take_back(session)

    async def _open(self, address: str) -> Registry:
        """Wait for a registry that does not answer: workers of this host may be running meanwhile (OWNERSHIP 3)."""
        while True:
            try:
                return await open_registry(address, seen=self.daemon.directory / "registry.json", doubtful=True)
            except PoolUnavailable as error:
                if self.daemon.stopping.is_set() or address.startswith("embedded:"):
                    raise
                log.warning("waiting for the registry", reason=error.message)
                await asyncio.sleep(SETTLE_AGAIN)

    async def announce(self, control: str, data: tuple[str, int]) -> None:
        """Register this node under its lease."""
        await asyncio.to_thread(self.keeper.wait_started)
        ttl = self.daemon.options.lease
        record = self._record(control, data)
        self.membership = Membership(self.registry, self.keeper, record, ttl, take_over=True,
                                     on_return=self._returned)
        await self.membership.start()
        self.joined = True
        self.election = Election(self.registry, self.keeper, self.daemon.host, self.incarnation, ttl, self._lead)

    def _returned(self) -> None:
        self.daemon.spawn(self.settle_all())

    def start(self) -> None:
        if self.daemon.options.coordinator:
            self.daemon.spawn(self.election.run())
        self.daemon.spawn(self.keyring.run())
        self.daemon.spawn(self._refresh_devices())

    async def leave(self) -> None:
        """Out of the pool at once: sessions are ended first, then the leases are revoked."""
        if hasattr(self, "membership"):
            await self.membership.stop()
        if hasattr(self, "keeper"):
            self.keeper.close()
        if hasattr(self, "registry"):
            await self.registry.close()

    def _record(self, control: str, data: tuple[str, int]) -> NodeRecord:
        return NodeRecord(
            host=self.daemon.host, incarnation=self.incarnation, control=control, data=f"{data[0]}:{data[1]}",
            public_key=self.daemon.keys.public, devices=self._devices(), state="ready", version=__version__,
            started=time.time(), store=self._store())

    def _store(self) -> str:
        """Where images lie, in words that only nodes which see the same ones share."""
        named = self.daemon.options.store
        return named or f"{socket.gethostname()}:{(self.daemon.files.root / 'images').resolve()}"

    def _devices(self) -> list[DeviceRecord]:
        devices = []
        for spec, slot in self.daemon.node.slots.items():
            f = slot.facts
            info = DeviceInfo(name=f.name, uuid=f.uuid, total_memory=f.total_memory, pci=f.pci, attributes=f.attributes)
            devices.append(DeviceRecord(
                device=spec, name=f.name, uuid=f.uuid, memory=slot.memory, free_memory=self.daemon.node.free(spec),
                compute_capability=f.compute_capability, driver_version=f.driver_version, healthy=slot.healthy,
                reason=slot.health.reason[:MAX_TEXT],
                facts={**info.as_dict(), "driver_version": f.driver_version,
                       "driver_release": driver.release() if spec.startswith("cuda") else ""}))
        return devices

    async def tell_devices(self) -> None:
        """The pool is told now that a device is not what it was. What it does not hear is told with the next look."""
        with contextlib.suppress(RgpuError):
            await self.membership.update(devices=self._devices())

    async def _refresh_devices(self) -> None:
        """Free memory in the node's record: for people; placement counts promises."""
        while True:
            await asyncio.sleep(2.0)
            await self.tell_devices()

    async def _lead(self, leader: Leader) -> None:
        self.coordinator = Coordinator(self.registry, self.daemon, leader, node_ttl=self.daemon.options.lease,
                                       registered_for=self.membership.registered_for,
                                       agent_grace=self.daemon.options.client_grace,
                                       observe=self.daemon.metrics.leader)
        try:
            await self.coordinator.run()
        finally:
            self.coordinator = None

    def leading(self) -> Coordinator:
        """The coordinator. Raises :class:`Fenced` while another node leads."""
        if self.coordinator is None:
            raise Fenced(f"{self.daemon.host} does not lead", reason="not leading")
        return self.coordinator

    # -- reading --------------------------------------------------------------------
    async def nodes(self) -> dict[str, NodeRecord]:
        """Nodes whose lease holds, by host."""
        listing = await self.registry.list(NODES)
        records = [decode(entry.value, NodeRecord, entry.key) for entry in listing.entries]
        self.endpoints.update((r.host, Endpoint(r.control, r.public_key, r.host)) for r in records if r.control)
        return {record.host: record for record in records}

    async def incarnation_of(self, host: str) -> int | None:
        """Of the node's record as it is now; None where there is none."""
        entry = await self.registry.get(node_key(host))
        return None if entry is None else decode(entry.value, NodeRecord, entry.key).incarnation

    async def sessions(self) -> list[SessionRecord]:
        listing = await self.registry.list(SESSIONS)
        return [decode(entry.value, SessionRecord, entry.key) for entry in listing.entries]

    async def session(self, name: str) -> Held:
        """The record as it is now. Raises :class:`NotFound`."""
        entry = await self.registry.get(session_key(name))
        if entry is None:
            raise NotFound(f"no session is called {name}; `rgpu ps` lists them", session=name)
        record = decode(entry.value, SessionRecord, entry.key)
        self.daemon.adopting.remember(record)
        return Held(record, entry.mod_revision)

    async def leader_revision(self) -> int:
        """The create revision of who leads, 0 while nobody does."""
        found = await current_leader(self.registry)
        return found[1].revision if found else 0

    async def leader_endpoint(self) -> tuple[Endpoint, int] | None:
        """Where the leader answers, and its revision; None when this node leads.

        Raises :class:`PoolUnavailable` while nobody does.
        """
        deadline = time.monotonic() + 10
        while self.coordinator is None:
            found = await current_leader(self.registry)
            if found is not None and found[0].host != self.daemon.host:
                node = (await self.nodes()).get(found[0].host)
                if node is not None:
                    return Endpoint(node.control, node.public_key, node.host), found[1].revision
            if time.monotonic() > deadline:
                raise PoolUnavailable("the pool has no coordinator at the moment: try again")
            await asyncio.sleep(0.05)
        return None

    # -- obeying ----------------------------------------------------------------------
    async def settle(self, session: str, move: str) -> dict[str, Any]:
        """Read the record and obey it; one that decides nothing yet is looked at again."""
        async with self._settle_locks[session]:
            held = self.daemon.node.holds(session, move)
            entry = await self.registry.get(session_key(session))
            record = decode(entry.value, SessionRecord, entry.key) if entry else None
            if record is not None:
                self.daemon.adopting.remember(record)
            if held is None:
                return self._nothing_held(session, record)
            kind, epoch, held_for = held
            if record is not None and record.epoch < epoch and kind != "incoming":
                await self._doubt(session, epoch, record.epoch)
            found = settle(record, Holding(self.daemon.host, self.incarnation, kind, epoch,  # type: ignore[arg-type]
                                           held_for))
            if kind == "paused" and found.action == "stay paused" and entry is not None and record is not None:
                self._read[session] = Held(record, entry.mod_revision)
            else:
                self._read.pop(session, None)
            if found.action != "stay paused":
                open_move = record.open_move if record else None
                await self.daemon.node.obey(session, held_for, found.action, found.epoch,
                                            open_move.id if open_move else "")
            elif kind in ("paused", "incoming"):
                self._settle_later(session, held_for)
            return {"done": found.action, "reason": found.reason}

    async def _doubt(self, session: str, epoch: int, known: int) -> bool:
        """What is held here is above what the registry says; False for a registry that is never doubted."""
        reason = f"{self.daemon.host} holds {session} at epoch {epoch}, and the registry says {known}"
        return await self.daemon.adopting.doubt(reason)

    def _nothing_held(self, session: str, record: SessionRecord | None) -> dict[str, Any]:
        """The record may promise what is not here: the worker died after it was verified, before it was activated."""
        if session in self.daemon.node.running:  # its end is told with its reason, once its device was examined
            return {"done": "its worker is here, or has just ended"}
        if record is not None and record.state == "running" \
                and (record.owner, record.incarnation) == (self.daemon.host, self.incarnation):
            log.warning("a session of ours has no worker", session=session, epoch=record.epoch)
            self.daemon.report_death(session, record.epoch, f"its worker on {self.daemon.host} died in a move")
        return {"done": "nothing is held here"}

    async def withdraw(self, session: str, move: str, reason: str) -> None:
        """A worker here waited in vain for the commit of its move: compete for the record by abort (OWNERSHIP 2).

        The record is compared as it was read last, so this is one round trip where nothing has changed since. What
        came of it is told to the worker, which asks again if it hears nothing.
        """
        async with self._settle_locks[session]:
            outcome, why = await self._abort(session, move, reason)
            log.info("a source withdraws", session=session, move=move, outcome=outcome, reason=why)
            if outcome == "won":
                self.daemon.node.paused.pop(session, None)
            await self._answer(session, "withdrawn", move=move, outcome=outcome, reason=why)

    async def _abort(self, session: str, move: str, reason: str) -> tuple[str, str]:
        """(won, lost or unknown; why). An unknown outcome is never guessed."""
        fault("daemon.withdraw")
        held = self._read.pop(session, None)
        try:
            for _ in range(WITHDRAW_TRIES):
                held = held or await self.session(session)
                decision = ownership.abort(held, epoch=self.daemon.node.epochs.get(session, 0), move=move,
                                           now=time.time(), reason=reason, source=self.daemon.host)
                result = await txn_certain(self.registry, decision.compares, decision.operations)
                if result.succeeded:
                    return ("unknown", "a test lost the answer") if fault("daemon.withdraw.done") == "lost" \
                        else ("won", reason)
                held = None  # it was another record
        except (UnknownOutcome, PoolUnavailable) as error:
            return "unknown", error.message
        except RgpuError as error:  # committed, aborted or over already
            return "lost", error.message
        return "lost", "the record changes too fast"

    async def read_for(self, session: str, move: str) -> None:
        """Settle what a worker here asks about; it is told also when the record decides nothing."""
        done = await self.settle(session, move)
        if done["done"] == "stay paused":
            await self._answer(session, "undecided", move=move, reason=str(done.get("reason", "")))

    async def _answer(self, session: str, what: str, **values: Any) -> None:
        handle = self.daemon.node.running.get(session)
        if handle is not None:
            with contextlib.suppress(RgpuError):
                await handle.request(what, **values)

    def _settle_later(self, session: str, move: str) -> None:
        if (session, move) not in self._settling:
            self._settling.add((session, move))
            self.daemon.spawn(self._settle_again(session, move))

    async def _settle_again(self, session: str, move: str) -> None:
        await asyncio.sleep(SETTLE_AGAIN)
        self._settling.discard((session, move))
        try:
            await self.settle(session, move)
        except RgpuError as error:
            log.info("cannot settle yet", session=session, reason=error.message)
            self._settle_later(session, move)

    def watch_move(self, session: str, move: str) -> None:
        """Look at the record until it decides: the coordinator that began the move may be gone."""
        self._settle_later(session, move)

    async def settle_all(self) -> None:
        """After the registry was out of reach: what do the records say about what is held here?"""
        for session in list(self.daemon.node.running) + list(self.daemon.node.incoming):
            with contextlib.suppress(RgpuError):
                incoming = self.daemon.node.incoming.get(session)
                await self.settle(session, incoming.move if incoming else "")

    async def _take_back(self, session: str) -> None:
        """An adopted worker: is it still ours? Then the record gets our new incarnation."""
        while True:
            try:
                await self._take_back_now(session)
                return
            except (PoolUnavailable, UnknownOutcome) as error:  # no answer is no reason to forget a session
                if self.daemon.stopping.is_set():
                    raise
                log.warning("waiting for the registry's word on an adopted worker", session=session,
                            reason=error.message)
                if self.mistrust():
                    await self.wait_believed()
                await asyncio.sleep(SETTLE_AGAIN)

    async def _take_back_now(self, session: str) -> None:
        node = self.daemon.node
        try:
            held = await self.session(session)
            epoch = node.epochs[session]
            if held.record.epoch < epoch and await self._doubt(session, epoch, held.record.epoch):
                raise PoolUnavailable(f"the registry does not know epoch {epoch} of {session}")
            decision = ownership.adopt(held, epoch=epoch, node=self._record("", ("", 0)), now=time.time(),
                                       reason=f"the daemon of {self.daemon.host} was restarted and found its worker")
            result = await txn_certain(self.registry, decision.compares, decision.operations)
            if result.succeeded:
                if node.running[session].view.get("state") == "paused":
                    node.paused[session] = ""
                    self._settle_later(session, held.record.move.id if held.record.move else "")
                return
            reason = "the record changed meanwhile"
        except (PoolUnavailable, UnknownOutcome):
            raise
        except RgpuError as error:
            reason = error.message
        log.warning("an adopted worker is not ours any more", session=session, reason=reason)
        await node.obey(session, "", "forget", 0)
