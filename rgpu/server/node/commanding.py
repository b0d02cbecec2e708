"""Waiting for another node's answer, but not for one that has died.

A connection says nothing when its peer is gone for good, and a command to a
node may take half an hour. The registry knows: a daemon that was started again
has another incarnation and knows nothing of the command, and one whose record
stays away for longer than its lease is not coming back as it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rgpu.session.errors import LinkError, RgpuError

LOOK = 1.0  #: seconds between two looks at the node's record

T = TypeVar("T")


async def unless_gone(answer: Awaitable[T], incarnation: Callable[[], Awaitable[int | None]], asked: int,
                      patience: float, what: str) -> T:
    """What ``answer`` gives; :class:`LinkError` once the node that was asked cannot give it any more.

    ``incarnation``: of the node as the registry has it now, None for none; what it raises says nothing of the node.
    ``asked``: the incarnation that was asked. ``patience``: seconds that its record may be away: a daemon that lost
    its place for a moment works on. ``what``: for the error.
    """
    task = asyncio.ensure_future(answer)
    away = 0.0
    try:
        while not (await asyncio.wait([task], timeout=LOOK))[0]:
            try:
                now = await incarnation()
            except RgpuError:
                continue
            away = away + LOOK if now is None else 0.0
            if task.done():
                break
            if now not in (None, asked):
                raise LinkError(f"{what}: the node was started again meanwhile and knows nothing of it")
            if away > patience:
                raise LinkError(f"{what}: the node has gone")
        return task.result()
    finally:
        task.cancel()
