"""Where the variables of loaded modules stand, as the program was told: said again to a worker that replays the loads.

A worker that is rebuilt from a checkpoint replays loads that came behind it, on a device that holds less than the
first worker's did; it can put variables where they stood if it is told where that was (docs/developers/modules.md).
"""

from __future__ import annotations

from typing import Any

from rgpu.session.errors import Corrupt
from rgpu.session.objects.load_answers import LOAD, load_answer

MOST = 4096  #: variables that go with ATTACH: those of the newest loads


class Placements:
    """The places of one session; used by the loop's thread."""

    def __init__(self) -> None:
        self._places: dict[int, list[tuple[str, int, int]]] = {}  #: seq of the load → (name, address, size)

    @staticmethod
    def wants(call_id: int) -> bool:
        """Whether answers of such calls tell of places."""
        return call_id == LOAD

    def told(self, seq: int, result: int, reply: Any) -> None:
        """The program was given the answer of a load. ``reply``: its encoded reply arguments."""
        if result:
            return
        try:
            found = load_answer(reply).globals
        except Corrupt:  # it is the program's to say so
            return
        if found:
            self._places[seq] = [(one.name, one.address, one.size) for one in found]

    def forget(self, position: int) -> None:
        """Loads up to there stand in a checkpoint, and their places with them."""
        self._places = {seq: places for seq, places in self._places.items() if seq > position}

    def as_rows(self) -> list[tuple[int, list[tuple[str, int, int]]]]:
        """What goes with ATTACH: (seq of the load, (name, address, size) of each variable), newest loads first."""
        rows, count = [], 0
        for seq in sorted(self._places, reverse=True):
            count += len(self._places[seq])
            if count > MOST:
                break
            rows.append((seq, self._places[seq]))
        return rows
