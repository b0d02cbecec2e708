"""Start of a session's worker on the host that its record names."""

from __future__ import annotations

from rgpu.link.faults import fault
from rgpu.migrate.leader.endings import Endings
from rgpu.migrate.leader.nodes import START_SECONDS
from rgpu.migrate.leader.term.commands import FencedCommands
from rgpu.migrate.leader.term.decisions import Term
from rgpu.migrate.leader.term.pool_records import PoolRecords
from rgpu.migrate.records import ownership
from rgpu.migrate.records.ownership import Held
from rgpu.migrate.records.schema import SessionRecord
from rgpu.session.errors import Fenced, Refused, RgpuError


class Starting:
    """The leader's start of workers."""

    def __init__(self, term: Term, records: PoolRecords, commands: FencedCommands, endings: Endings) -> None:
        self.term, self.records, self.commands, self.endings = term, records, commands, endings

    async def start(self, record: SessionRecord, failed: list[str]) -> Held | None:
        """Start the worker and return the running session; None: the record was ended, with the reason in ``failed``.
        """
        host = str(record.owner)
        args = {"session": record.name, "epoch": record.epoch, "quota": record.quota, "device": record.device,
                "image": None, "recover": record.recover}
        fault("create.start")
        try:
            await self.commands.tell(host, "worker.start", args, epoch=record.epoch, timeout=START_SECONDS, tries=2)
            node = await self.records.node(host)
            if node is None:
                raise Refused(f"the lease of {host} has ended")
            return await self.term.change(record.name, lambda h: ownership.started(
                h, epoch=record.epoch, node=node, leader=self.term.leader, now=self.term.clock.wall(),
                reason=f"started on {host}"))
        except RgpuError as error:
            if isinstance(error, Fenced) and not await self.term.leads():
                raise
            failed.append(f"{host}: {error.message}")
            await self.endings.end_epoch(record.name, record.epoch,
                                         f"it could not be started on {host}: {error.message}")
            return None
