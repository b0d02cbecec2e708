"""The coordinator's commands to nodes: the interface that sends them, and the verbs.

Every command carries the leader revision, the session's epoch and an id
(OWNERSHIP 6): a node refuses lower leader revisions (:class:`Fenced`), and
answers a repeated id with the result it recorded.

===============  ========================================  =====================================================
verb             args                                      result
===============  ========================================  =====================================================
worker.start     session, epoch, quota, device, image      position, worker_pid
                 (name or None), recover
worker.describe  session, forecast, moving                 state, epoch, position, pins: [reason, …], move: progress,
                                                           forecast: what a move would cost
move.receive     session, move, epoch (the one it would    address, ticket, secret, spare, phases_ms
                 get), quota, device, source
move.send        session, move, address, ticket, secret,   rounds, pages_total, pages_sent, bytes_sent, verified,
                 host, options (``options.py``)            position, mode, why, expected, mismatched_pages,
                                                           repaired_bytes, sampled_pages, sampled_mismatches,
                                                           brownout_ms, bytes_pulled, pages_by, pages_why,
                                                           phases_ms, page_rounds,
                                                           pause_ms (from the pause to this answer, plus that of the
                                                           snapshot)
move.reconcile   session, move                             done: the action of ``reconcile.py``
session.image    session, image, limited, cut              image, position, epoch, pages, bytes, unchanged_pages,
                                                           raw_bytes, pause_ms, drain_ms, total_ms, cut_bytes,
                                                           paused_bytes (docs/developers/image-format.md), given,
                                                           peers
session.cut      session, do, cut, attempt, target,        ready, open, stands, drained, given: name → [least, most,
                 seconds, wait, drain                      sessions] (``cuts/cut.py``)
session.notice   session, epoch, kind, values              (none)
worker.forget    session, epoch, reason                    (none): end a worker that owns nothing
session.drop     session, reason                           (none)
===============  ========================================  =====================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

Progress = Callable[[dict[str, Any]], None]

START_SECONDS = 120.0
CHECKPOINT_SECONDS = 1800.0  #: to write a checkpoint, or to begin from one
MOVE_SECONDS = 600.0
ASK_SECONDS = 10.0


class NodeCommands(Protocol):
    """Sender of commands, implemented by the daemon over the control link; tests implement it in process."""

    async def command(self, host: str, verb: str, args: dict[str, Any], *, leader: int, epoch: int, command_id: str,
                      timeout: float, on_progress: Progress | None = None) -> dict[str, Any]:
        """Have ``host`` carry out a command; return its result.

        Raises what the node raised; :class:`LinkError` or :class:`TimedOut` when it is not known
        whether it was carried out; :class:`NotFound` for a host without a node record.
        """
