"""What ``rgpu run`` asks for with ``--ranks``, ``--spread``, ``--gang``: `options.gang` of session.create."""

from __future__ import annotations

from typing import Any

from rgpu.api.settings import parse_age
from rgpu.session.devices import MAX_RANKS
from rgpu.session.errors import UsageError

DEADLINE = 600.0  #: seconds


def read(name: str, gpus: str | None, ranks: int | None, spread: bool, gang: str | None, of: int | None,
         deadline: str | None, lazy: bool) -> tuple[dict[str, Any], str | None]:
    """The gang that is asked for, and the GPUs of each of its ranks. Raises :class:`UsageError`."""
    if lazy:
        raise UsageError("--lazy places a session with its program's first call; the ranks of a gang are placed "
                         "together, before the program starts")
    if spread:
        if ranks is not None or gang is not None or of is not None:
            raise UsageError("--spread is one list of devices for the processes of this run: without --ranks, --gang "
                             "and --of")
        if gpus is None or not gpus.isdigit() or not 0 < int(gpus) <= MAX_RANKS:
            raise UsageError(f"--spread wants --gpus N, how many whole devices of all hosts together: 1 to {MAX_RANKS}")
        ranks, gpus = int(gpus), "1"
    if ranks is None:
        raise UsageError("--gang, --of and --gang-deadline are for a run that says how many processes of it use GPUs: "
                         "--ranks N")
    if of is not None and gang is None:
        raise UsageError("--of counts the ranks of several runs, which find each other by --gang NAME")
    if of is not None and ranks > of:
        raise UsageError(f"--ranks {ranks} are more than the gang has in all: --of {of}")
    return {"name": gang or name, "ranks": ranks, "of": of or ranks, "spread": spread,
            "deadline": parse_age(deadline) if deadline is not None else DEADLINE}, gpus
