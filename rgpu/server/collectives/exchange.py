"""What a device uses of the ranks in other sessions, and what it is asked for by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rgpu.server.collectives.contributions import Key, Log, Unique
from rgpu.server.collectives.direct_page import Page
from rgpu.server.collectives.numbers import Array


@dataclass(eq=False, slots=True)
class PeerMemory:
    """What another session's worker on this node lends for direct collectives. It only grows.

    ``pages``: memory of its pages, by the digest of the communicator; ``segments``: its GPU's memory, number 1 first:
    a descriptor of the driver's and bytes; ``refresh``: reads what has arrived about it.
    """

    session: str
    epoch: int
    refresh: Callable[[], None] = lambda: None
    pages: dict[bytes, Array] = field(default_factory=dict)
    segments: list[tuple[int, int]] = field(default_factory=list)


class Direct(Protocol):
    """The memory that workers of one node share for direct collectives."""

    def page(self, unique: Unique, rank: int) -> Page | None:
        """Return this session's page of a communicator, made at the first call; None: it cannot be made."""

    def ended(self, unique: Unique) -> None:
        """Note that this session's rank of a communicator is over."""

    def segment(self, fd: int, size: int) -> int:
        """Lend memory of the GPU to the others, by a descriptor of the driver's; return its number, 0: not lent."""

    def peers(self, unique: Unique, members: Sequence[str], session: str) -> dict[int, PeerMemory]:
        """Return the memory of the sessions of all other ranks, by rank; none where any is missing."""

    def over(self, peer: PeerMemory) -> bool:
        """Whether another worker serves that session now."""

    def gone(self, session: str) -> bool:
        """Whether that session is over."""

    def probe(self, session: str) -> None:
        """Find out what has become of a session that is waited for: :meth:`over` and :meth:`gone` tell then."""

    def go_back(self, why: str) -> None:
        """End this worker, so that its session begins again at its checkpoint."""


class Shared(Protocol):
    """One communicator whose ranks are in several sessions, as the device of one of them has it."""

    @property
    def members(self) -> Sequence[str]:
        """Return the session of each rank."""

    def never(self, rank: int, key: Key) -> str:
        """Return why that rank of this session will bring nothing to it any more; empty: it did, or may."""

    def again(self, key: Key) -> bool:
        """Tell whether what this session's ranks brought to it, which is not kept any more, would be brought again if
        the session began again at its newest checkpoint."""

    def taken(self, key: Key) -> bool:
        """Tell whether it is complete here, as far as is known, or its ranks are over: what others brought was had."""

    def held(self, key: Key, session: str, ranks: Sequence[int]) -> None:
        """Note that a session has what these ranks of this one brought."""

    def renewed(self, session: str) -> list[tuple[Key, list[int]]]:
        """Note that another worker serves a session: what the one before had, it has to be given again.

        Return the collectives that are not complete for want of what its ranks bring, and the ranks here of which the
        one before had what they brought.
        """

    def lost(self, key: Key, why: str) -> None:
        """Note that what other ranks brought to a collective can be had from nobody."""


class Exchange(Protocol):
    """The way to the other sessions."""

    @property
    def session(self) -> str:
        """Return the name of this session."""

    @property
    def log(self) -> Log:
        """Return what ranks brought."""

    def room(self, size: int) -> Array | None:
        """Return memory (u8, not cleared) for a contribution of ``size`` bytes that other sessions can map.

        It is the caller's while anything refers to it, then it is used again: fresh memory costs more to touch than
        to fill. None: for short ones, and where there is none.
        """

    @property
    def direct(self) -> Direct | None:
        """Return the memory for direct collectives; None: there is none."""

    def opened(self, unique: Unique, shared: Shared) -> None:
        """Note that this session has ranks of a communicator: others may ask for what these bring."""

    def changed(self, unique: Unique) -> None:
        """Note that what :meth:`Shared.never` says has changed."""

    def ask(self, unique: Unique, key: Key, want: Sequence[int], own: Sequence[int]) -> None:
        """Get what ranks of other sessions brought into the log, and hear of each that has what ``own`` ranks did."""

    def settle(self, unique: Unique, key: Key) -> None:
        """Ask no more about it: it is complete here, or given up."""
