"""The leader's steps of one checkpoint: command to the node, naming in the record, notice to the agent."""

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

#: Cost of a checkpoint as reported by its node: times in ms, sizes in bytes.
CHECKPOINT_COST = ("pause_ms", "drain_ms", "total_ms", "cut_bytes", "paused_bytes", "raw_bytes", "unchanged_pages")


class Writing:
    """Steps of one checkpoint; see the module docstring."""

    def __init__(self, term: Term, commands: FencedCommands) -> None:
        self.term, self.commands = term, commands

    async def image(self, record: SessionRecord, limited: bool, cut: str = "") -> tuple[CheckpointName, dict[str, Any]]:
        """Have the node write a checkpoint: it is durable, but not named yet. ``cut``: id of the cut it belongs to.

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
        """Return the decision that names it. ``record``: of the session as written. Raises :class:`Fenced`, Refused."""
        return ownership.publish_checkpoint(
            held, owner=str(record.owner), epoch=record.epoch, checkpoint=checkpoint, leader=self.term.leader,
            now=self.term.clock.wall(),
            reason=f"checkpoint {checkpoint.name} at position {checkpoint.position}{reason}")

    def publishing(self, checkpoint: CheckpointName, session: str) -> None:
        """Record, where a test requests it, that the checkpoint is about to be named."""
        effects.publishing(self.term.leader.host, session, checkpoint.epoch, checkpoint.position, checkpoint.name)

    async def notice(self, published: SessionRecord, checkpoint: CheckpointName) -> None:
        """Notify the agent that the record names the checkpoint, so that its journal may be cut."""
        await self.commands.suggest(published.owner, "session.notice", {
            "session": published.name, "epoch": checkpoint.epoch, "kind": "cut",
            "values": {"epoch": checkpoint.epoch, "position": published.journal_from, "image": checkpoint.name}},
                                    epoch=checkpoint.epoch)


def answer(session: str, checkpoint: CheckpointName, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer for the caller of the verb."""
    return {"session": session, "image": checkpoint.name, "position": checkpoint.position, "epoch": checkpoint.epoch,
            "pages": int(result.get("pages", 0)), "bytes": checkpoint.bytes,
            **{key: result[key] for key in CHECKPOINT_COST if key in result}}


def checkpoint_name(session: str, epoch: int, position: int, when: float) -> str:
    """Return a unique name: a session has one owner for each epoch, which takes its checkpoints in order."""
    return f"{session.replace('/', '@')}-e{epoch}-p{position}-{int(when * 1000):x}"
