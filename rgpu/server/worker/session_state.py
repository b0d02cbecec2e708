"""The state of a session at a pause, as a checkpoint and a move write it down; its pages apart."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

from rgpu.checkpoint.device import Device
from rgpu.checkpoint.manifest import cut
from rgpu.checkpoint.manifest.state import SessionState
from rgpu.checkpoint.pages.frozen import MomentView
from rgpu.server.worker.apply.runtime import SessionRuntime


def take(runtime: SessionRuntime, view: MomentView | None = None,
         without: Collection[tuple[int, int]] = (), contributions: int = 0) -> SessionState:
    """The state of the quiesced session. ``view``: of this very moment, hashed already.

    ``contributions``: bytes at most of what ranks brought to collectives with other sessions. ``without``: as
    :func:`rgpu.checkpoint.manifest.cut.take` takes it.
    """
    device = runtime.device if view is None else cast(Device, view)
    return cut.take(device, session=runtime.session, epoch=runtime.epoch, position=runtime.applied,
                    hash_key=runtime.hash_key, live=runtime.objects(), answers=runtime.answers(), without=without,
                    printed=runtime.text.state(),
                    contributions=runtime.contributions.rows(contributions))
