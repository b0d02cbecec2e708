"""Options of a move: mode, promised downtime, allowed slowdown."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rgpu.session.errors import UsageError

MODES = ("auto", "copy", "replay")
PAGES = ("auto", "stream")
ABORT, FREEZE = "abort", "freeze"
AS_LONG_AS_IT_TAKES = 3600.0  #: seconds


@dataclass(frozen=True, slots=True)
class MoveOptions:
    """Options of one move. ``max_slowdown``: share from 0 to below 1, while a replay catches up.

    Raises :class:`UsageError` for values out of range.
    """

    mode: str = "auto"
    max_downtime: float = 10.0  #: seconds
    max_slowdown: float = 0.5
    on_timeout: str = ABORT  #: or freeze: the last pause may exceed ``max_downtime``
    #: Share of its pages that an earlier replay of the session got wrong; set by the leader, not by the user.
    mismatched: float = 0.0
    #: auto: a destination on the same host pulls pages out of the source's memory if it can; stream: never.
    pages: str = "auto"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(f"there is no mode {self.mode!r}; there are {', '.join(MODES)}")
        if self.on_timeout not in (ABORT, FREEZE):
            raise UsageError(f"--on-timeout is abort or freeze, not {self.on_timeout!r}")
        if self.pages not in PAGES:
            raise UsageError(f"pages do not go by {self.pages!r}; there are {', '.join(PAGES)}")
        if not 0 <= self.max_slowdown < 1:
            raise UsageError(f"a slowdown of {self.max_slowdown:.0%} cannot be: 0 % to 99 %")
        if not 0 < self.max_downtime < AS_LONG_AS_IT_TAKES:
            raise UsageError(f"a downtime of {self.max_downtime} s cannot be promised")
        if not 0 <= self.mismatched <= 1:
            raise UsageError(f"{self.mismatched} is no share of pages")

    @property
    def limit(self) -> float:
        """Seconds that the last pause may take."""
        return AS_LONG_AS_IT_TAKES if self.on_timeout == FREEZE else self.max_downtime

    @property
    def abort_on_timeout(self) -> bool:
        return self.on_timeout == ABORT

    def as_dict(self) -> dict[str, Any]:
        """Return the options as sent to the source's worker. The default of ``pages`` is left out, because workers of
        earlier versions have no such option.
        """
        found = asdict(self)
        if self.pages == "auto":
            del found["pages"]
        return found

    @staticmethod
    def from_options(options: dict[str, Any]) -> MoveOptions:
        """Read the options of a request; missing ones get their defaults. Raises :class:`UsageError`."""
        found = {name: options[name] for name in MoveOptions.__dataclass_fields__ if options.get(name) is not None}
        try:
            for name in ("max_downtime", "max_slowdown", "mismatched"):
                if name in found:
                    found[name] = float(found[name])
        except (TypeError, ValueError) as error:
            raise UsageError(f"the options of a move cannot be read: {error}") from None
        return MoveOptions(**found)
