"""One checkpoint as the leader has it: asked of a node, named in the record, told to the agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rgpu.link import effects
from rgpu.migrate.leader.nodes import CHECKPOINT_SECONDS
from rgpu.migrate.leader.term.commands import FencedCommands
from rgpu.migrate.leader.term.decisions import Term
from rgpu.migrate.records import ownership
from rgpu.migrate.records.ownership import Decision, Held
from rgpu.migrate.records.schema import CheckpointName, SessionRecord
from rgpu.session.errors import Refused

#: What a node says a checkpoint cost: times in ms, sizes in bytes.
CHECKPOINT_COST = ("pause_ms", "drain_ms", "total_ms", "cut_bytes", "paused_bytes", "raw_bytes", "unchanged_pages")


class Writing:
    """See the module docstring."""

    def __init__(self, term: Term, commands: FencedCommands) -> None:
        self.term, self.commands = term, commands

    async def image(self, record: SessionRecord, limited: bool, cut: str = "") -> tuple[CheckpointName, dict[str, Any]]:
        """Have its node write one: it is durable, and counts for nothing yet. ``cut``: that its moment belongs to.

        Raises :class:`Refused` for a session that does not run, and what the node raises.
        """
        name = record.name
        if record.state != "running":
            raise Refused(f"{name} is {record.state}, not running: {record.reason}", session=name)
        now = self.term.clock.wall()
        wanted = checkpoint_name(name, record.epoch, record.checkpoint.position if record.checkpoint else 0, now)
        result = await self.commands.tell(str(record.owner), "session.image", {
            "session": name, "image": wanted, "limited": limited, **({"cut": cut} if cut else {})},
            epoch=record.epoch, timeout=CHECKPOINT_SECONDS, tries=2)
        return CheckpointName(name=str(result["image"]), position=int(result["position"]), epoch=record.epoch,
                              created=now, bytes=int(result.get("bytes", 0)), cut=cut), result

    def decide(self, held: Held, record: SessionRecord, checkpoint: CheckpointName, reason: str = "") -> Decision:
        """Return the decision that it counts. ``record``: whose node wrote it. Raises :class:`Fenced`, Refused."""
        return ownership.publish_checkpoint(
            held, owner=str(record.owner), epoch=record.epoch, checkpoint=checkpoint, leader=self.term.leader,
            now=self.term.clock.wall(),
            reason=f"checkpoint {checkpoint.name} at position {checkpoint.position}{reason}")

    def publishing(self, checkpoint: CheckpointName, session: str) -> None:
        """Write down, where a test asks for it, that it is about to count."""
        effects.publishing(self.term.leader.host, session, checkpoint.epoch, checkpoint.position, checkpoint.name)

    async def notice(self, published: SessionRecord, checkpoint: CheckpointName) -> None:
        """Tell the agent that the record names it: its journal may be cut."""
        await self.commands.suggest(published.owner, "session.notice", {
            "session": published.name, "epoch": checkpoint.epoch, "kind": "cut",
            "values": {"epoch": checkpoint.epoch, "position": published.journal_from, "image": checkpoint.name}},
                                    epoch=checkpoint.epoch)


def answer(session: str, checkpoint: CheckpointName, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the caller of the verb is told."""
    return {"session": session, "image": checkpoint.name, "position": checkpoint.position, "epoch": checkpoint.epoch,
            "pages": int(result.get("pages", 0)), "bytes": checkpoint.bytes,
            **{key: result[key] for key in CHECKPOINT_COST if key in result}}


def checkpoint_name(session: str, epoch: int, position: int, when: float) -> str:
    """A name that no other checkpoint has: a session has one owner for each epoch, which takes them in order."""
    return f"{session.replace('/', '@')}-e{epoch}-p{position}-{int(when * 1000):x}"
