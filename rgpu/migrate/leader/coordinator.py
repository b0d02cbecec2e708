"""The elected leader: its parts for one term, and the verbs that they answer.

All state is in the registry: a new leader needs nothing else to finish or undo operations of this one. Operations on
one session are serialised; different sessions do not wait for each other. A part refers only to the parts that it is
given, never to this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rgpu.migrate.leader.capacity.admission import Admission
from rgpu.migrate.leader.capacity.draining import Draining
from rgpu.migrate.leader.capacity.make_room import Rebalancing
from rgpu.migrate.leader.capacity.parking import Parking
from rgpu.migrate.leader.checkpoints import Checkpoints, Restoring
from rgpu.migrate.leader.endings import Endings
from rgpu.migrate.leader.gangs.forming import Gangs
from rgpu.migrate.leader.gangs.rendezvous import Rendezvous
from rgpu.migrate.leader.hosts import Hosts
from rgpu.migrate.leader.housekeeping import Housekeeping
from rgpu.migrate.leader.moving.moves import Moves
from rgpu.migrate.leader.nodes import NodeCommands, Progress
from rgpu.migrate.leader.quotas import UserQuotas
from rgpu.migrate.leader.recovering.owner_loss import OwnerLoss
from rgpu.migrate.leader.recovering.recovery import Recovery
from rgpu.migrate.leader.recovering.resuming import Resuming, patience
from rgpu.migrate.leader.request_queue import RequestQueue
from rgpu.migrate.leader.requests import Order, program_of
from rgpu.migrate.leader.silence import AGENT_GRACE, Silence
from rgpu.migrate.leader.starting import Starting
from rgpu.migrate.leader.term.commands import FencedCommands
from rgpu.migrate.leader.term.decisions import Clock, Observe, Term
from rgpu.migrate.leader.term.locks import SessionLocks
from rgpu.migrate.leader.term.pace import Pace
from rgpu.migrate.leader.term.pool_records import PoolRecords
from rgpu.migrate.leader.term.tasks import TermTasks
from rgpu.migrate.leader.watching import NodeWatch, Ticks
from rgpu.migrate.membership.members import Members
from rgpu.migrate.membership.revoking import Revoking
from rgpu.migrate.membership.rotating import Rotating
from rgpu.migrate.move.options import MoveOptions
from rgpu.migrate.records.ownership import Leader
from rgpu.migrate.records.schema import PoolRecord, SessionRecord, Wants
from rgpu.migrate.registry.base import Registry
from rgpu.migrate.registry.embedded import EmbeddedRegistry


class Coordinator:
    """The leader of one term. A verb is described at the method of the part that answers it.

    ``node_ttl``: s that a new leader waits for missing nodes; less if by ``registered_for`` (seconds since this node's
    own lease was granted) their leases did not end because the registry was unreachable.
    """

    def __init__(self, registry: Registry, commands: NodeCommands, leader: Leader, clock: Clock | None = None,
                 *, node_ttl: float = 5.0, registered_for: Callable[[], float] = lambda: 0.0,
                 agent_grace: float = AGENT_GRACE, observe: Observe = lambda what, values: None) -> None:
        self.records = records = PoolRecords(registry)
        self.term = term = Term(registry, records, leader, clock, observe)
        self.commands = told = FencedCommands(commands, term, records)
        self.tasks = tasks = TermTasks(term)
        locks = SessionLocks()
        pace = Pace()
        self.queue = queue = RequestQueue(registry, term, records, pace.now)
        self.moving = moves = Moves(term, records, told, locks, freed=queue.wake)
        self.recovery = recovery = Recovery(term, records, told)
        self.owner_loss = owner_loss = OwnerLoss(term, records, locks, moves, recovery)
        self.checkpoints = checkpoints = Checkpoints(term, records, told, locks)
        self.restoring = Restoring(records, locks, recovery)
        self.endings = endings = Endings(term, records, told, locks, queue, moves)
        self.hosts = hosts = Hosts(registry, term, records)
        self.members = Members(registry, term, records)
        self.draining = Draining(term, records, tasks, hosts, moves)
        self.quotas = UserQuotas(registry, term)
        starting = Starting(term, records, told, endings)
        self.gangs = gangs = Gangs(registry, term, records, locks, queue, starting, endings, hosts, self.quotas,
                                   lambda: moves.rates)
        self.admission = Admission(term, records, told, locks, tasks, queue, recovery, endings, hosts, self.quotas,
                                   starting, gangs)
        self.silence = Silence(term, records, told, locks, checkpoints, endings, agent_grace, self.admission.kept)
        parking = Parking(term, records, told, locks, queue, checkpoints)
        self.rebalancing = Rebalancing(term, records, tasks, hosts, queue, moves, self.admission, parking,
                                       pace, by_default=not isinstance(registry, EmbeddedRegistry))
        self.resuming = Resuming(term, records, locks, tasks, moves, owner_loss, recovery, parking.forget,
                                 lambda: patience(node_ttl, registered_for()))
        self.revoking = Revoking(registry, term, records, told, tasks, queue, checkpoints, endings)
        self.rotating = Rotating(registry, term, records)
        self.rendezvous = Rendezvous(registry, term)
        self.housekeeping = Housekeeping(registry, term, records, self.members, self.rendezvous)
        self.watch = NodeWatch(registry, records, tasks, hosts, moves, owner_loss, self.resuming, self._look_again)
        self.ticks = Ticks(records, (self.resuming.tick, self.draining.tick, gangs.tick, self.revoking.tick,
                                     self.rotating.tick, self.housekeeping.tick))
        term.listeners += [self.ticks.pace.soon, self.rebalancing.pace.soon]
        self._map_verbs()

    def _map_verbs(self) -> None:
        """Map the verbs that are one method of one part."""
        self.move_abort, self.move_status, self.moves = self.moving.abort, self.moving.status, self.moving.under_way
        self.worker_died, self.unreachable = self.owner_loss.worker_died, self.owner_loss.unreachable
        self.agent_silent, self.gather = self.silence.told, self.rendezvous.gather
        self.shares = self.owner_loss.shares
        self.checkpoint, self.restore = self.checkpoints.write, self.restoring.restore
        self.end, self.program_ended, self.cordon = self.endings.end, self.endings.program_ended, self.hosts.set_state
        self.resume_unfinished, self.prune = self.resuming.resume_unfinished, self.housekeeping.prune

    async def run(self) -> None:
        """Finish unfinished operations, then watch nodes and sessions, until cancelled.

        Raises :class:`Fenced` when another leader was elected.
        """
        leader = self.term.leader
        elected = self.term.note("elect", f"{leader.host} was elected coordinator (revision {leader.revision})")
        try:
            await self.tasks.run(self.watch.run(), self.ticks.run(), self.rebalancing.run(),
                                 behind={"note of the election": elected, "resume": self.resume_unfinished()})
        finally:
            self.moving.end_term()

    async def create_session(self, name: str, *, quota: int | None, agent: str, program: dict[str, Any] | None = None,
                             recover: bool = True, host: str | None = None, device: str | None = None,
                             wants: Wants | None = None, share: int = 0) -> SessionRecord:
        """Place a new session and start its worker: see :meth:`Admission.create`."""
        return await self.admission.create(Order(name, agent, quota, share, program_of(program), recover, host, device,
                                                 wants or Wants()))

    async def migrate(self, name: str, host: str, *, options: MoveOptions | None = None, device: str | None = None,
                      on_progress: Progress | None = None, why: str = "") -> dict[str, Any]:
        """Move a session while it runs: see :meth:`Moves.migrate`."""
        return await self.moving.migrate(name, host, options=options, device=device, on_progress=on_progress, why=why)

    async def plan_move(self, name: str, host: str, *, options: MoveOptions | None = None,
                        device: str | None = None) -> dict[str, Any]:
        """Return what a move would cost: see :meth:`Moves.plan`."""
        return await self.moving.plan(name, host, options=options, device=device)

    async def pause(self, paused: bool, reason: str = "") -> PoolRecord:
        """Pause automation, or resume it; waiting sessions and requests are then tried with the next tick."""
        record = await self.hosts.set_paused(paused, reason)
        if not paused:
            self._look_again()
            self.draining.blocked.clear()
        return record

    def _look_again(self) -> None:
        """Have everything that waits tried with the next tick, regardless of earlier failures."""
        self.resuming.retry_all()
        self.ticks.pace.soon()
        self.queue.wake()
