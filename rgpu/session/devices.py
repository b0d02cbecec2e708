"""Notation of a session's devices: ``cuda:0``, or ``cuda:0+2`` for several of one host. Pure.

The order counts: the program's device n is the nth. With one word for all of them, records, commands and
messages are the same for one device and for several.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rgpu.session.addresses import SESSION_DEVICES
from rgpu.session.errors import UsageError

#: Devices of one session.
MAX_GPUS = SESSION_DEVICES

#: Ranks of one gang: its members are made in one transaction of the registry, and etcd allows 128 comparisons.
MAX_RANKS = 30

#: Devices in the list of one run, of several hosts; its members are :data:`MAX_RANKS` at most.
MAX_LIST = 64

_NAME = re.compile(r"([a-z]+):([0-9]{1,4}(?:\+[0-9]{1,4})*)", re.ASCII)


def parts(name: str) -> tuple[str, ...]:
    """Split ``cuda:0+2`` into ``("cuda:0", "cuda:2")``. Any other name is returned as it is; its lookup fails later."""
    found = _NAME.fullmatch(name)
    if found is None:
        return (name,)
    return tuple(f"{found[1]}:{number}" for number in found[2].split("+"))


def join(names: Iterable[str]) -> str:
    """Invert :func:`parts`. Raises :class:`UsageError` for devices of several kinds, or one named twice."""
    given = tuple(names)
    if len(given) == 1:
        return given[0]
    kinds = {name.partition(":")[0] for name in given}
    if len(kinds) != 1 or len(set(given)) != len(given):
        raise UsageError(f"no session has the devices {', '.join(given) or '(none)'}: they must be of one kind, each "
                         "once")
    return f"{kinds.pop()}:{'+'.join(name.partition(':')[2] for name in given)}"
