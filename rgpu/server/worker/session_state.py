"""The state of a session at a pause, as a checkpoint and a move write it down; its pages apart."""

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
    """Raise :class:`Refused` where something of the session cannot be read: what is made of its state would lack it."""
    if pins := runtime.pins():
        raise Refused(f"a checkpoint or a move would not hold all of the session: {'; '.join(pins)}")


def take(runtime: SessionRuntime, view: MomentView | None = None,
         without: Collection[tuple[int, int]] = (), contributions: int = 0) -> SessionState:
    """The state of the quiesced session. ``view``: of this very moment, hashed already.

    ``contributions``: bytes at most of what ranks brought to collectives with other sessions. ``without``: as
    :func:`rgpu.checkpoint.manifest.cut.take` takes it. Raises what that does, and
    :class:`Refused` as :func:`check_whole`.
    """
    check_whole(runtime)  # here, too: what pins a session may have come since it was asked for
    device = runtime.device if view is None else cast(Device, view)
    return cut.take(device, session=runtime.session, epoch=runtime.epoch, position=runtime.applied,
                    hash_key=runtime.hash_key, live=runtime.objects(), answers=runtime.answers(), without=without,
                    printed=runtime.text.state(),
                    contributions=runtime.contributions.rows(contributions), given=runtime.given.state())
