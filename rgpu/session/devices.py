"""How a session's devices are written: ``cuda:0``, or ``cuda:0+2`` for several of one host. Pure.

The order counts: the program's device n is the nth. One word for all of them keeps records, commands and
messages the same for one device and for several.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rgpu.session.addresses import SESSION_DEVICES
from rgpu.session.errors import UsageError

#: Of one session.
MAX_GPUS = SESSION_DEVICES

#: Of one gang: its members are made in one transaction of the registry, and etcd allows 128 comparisons.
MAX_RANKS = 30

_NAME = re.compile(r"([a-z]+):([0-9]{1,4}(?:\+[0-9]{1,4})*)", re.ASCII)


def parts(name: str) -> tuple[str, ...]:
    """``cuda:0+2`` → ``("cuda:0", "cuda:2")``. What is no such name stands for itself: who looks it up says so."""
    found = _NAME.fullmatch(name)
    if found is None:
        return (name,)
    return tuple(f"{found[1]}:{number}" for number in found[2].split("+"))


def join(names: Iterable[str]) -> str:
    """The inverse of :func:`parts`. Raises :class:`UsageError` for devices of several kinds, or one named twice."""
    given = tuple(names)
    if len(given) == 1:
        return given[0]
    kinds = {name.partition(":")[0] for name in given}
    if len(kinds) != 1 or len(set(given)) != len(given):
        raise UsageError(f"no session has the devices {', '.join(given) or '(none)'}: they must be of one kind, each "
                         "once")
    return f"{kinds.pop()}:{'+'.join(name.partition(':')[2] for name in given)}"
