"""The state of a paused session, without its pages, as a checkpoint and a move write it."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

from rgpu.checkpoint.device import Device
from rgpu.checkpoint.manifest import cut
from rgpu.checkpoint.manifest.state import SessionState
from rgpu.checkpoint.pages.frozen import MomentView
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.session.errors import Refused


def check_whole(runtime: SessionRuntime) -> None:
    """Raise :class:`Refused` where part of the session cannot be read: a checkpoint or copy would lack that part."""
    if pins := runtime.pins():
        raise Refused(f"a checkpoint or a move would not hold all of the session: {'; '.join(pins)}")


def take(runtime: SessionRuntime, view: MomentView | None = None,
         without: Collection[tuple[int, int]] = (), contributions: int = 0) -> SessionState:
    """Return the state of the quiesced session. ``view``: a view of the device at this moment, hashed already.

    ``contributions``: the most bytes that are taken of the ranks' contributions to collectives with other sessions.
    ``without``: as :func:`rgpu.checkpoint.manifest.cut.take` takes it. Raises what that does, and
    :class:`Refused` as :func:`check_whole`.
    """
    check_whole(runtime)  # again: something may have pinned the session since the first check
    device = runtime.device if view is None else cast(Device, view)
    return cut.take(device, session=runtime.session, epoch=runtime.epoch, position=runtime.applied,
                    hash_key=runtime.hash_key, live=runtime.objects(), answers=runtime.answers(), without=without,
                    printed=runtime.text.state(),
                    contributions=runtime.contributions.rows(contributions), given=runtime.given.state())
