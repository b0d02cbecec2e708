"""The time limit options of `rgpu run`."""

from __future__ import annotations

from rgpu.api.settings import parse_age
from rgpu.client.detached.time_limit import KILL_AFTER, TimeLimit
from rgpu.link.local.processes import read_signal
from rgpu.session.errors import UsageError


def read(time_limit: str | None, kill_after: str | None, signal_before: str | None) -> TimeLimit:
    """Read the options. Raises :class:`UsageError`."""
    if time_limit is None:
        if kill_after is not None or signal_before is not None:
            raise UsageError("--kill-after and --signal-before belong to --time-limit, which was not given")
        return TimeLimit()
    seconds = parse_age(time_limit)
    if not seconds:
        raise UsageError("--time-limit 0: nothing could run; leave it out for no limit")
    number, before = 0, 0.0
    if signal_before is not None:
        name, at, age = signal_before.partition("@")
        if not at:
            raise UsageError(f"--signal-before {signal_before!r}: write SIGNAL@AGE, for example USR1@5m")
        number, before = int(read_signal(name)), parse_age(age)
        if before >= seconds:
            raise UsageError(f"--signal-before {signal_before}: that is before the start, the limit is {time_limit}")
    return TimeLimit(seconds, KILL_AFTER if kill_after is None else parse_age(kill_after), number, before)
