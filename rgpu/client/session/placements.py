"""Addresses of the variables of loaded modules, as the program was given them, for a worker that replays the loads.

A worker that is rebuilt from a checkpoint replays the loads that follow it, on a device that holds less than the first
worker's did; with these addresses it can put the variables where they were (docs/developers/modules.md).
"""

from __future__ import annotations

from typing import Any

from rgpu.session.errors import Corrupt
from rgpu.session.objects.load_answers import LOAD, load_answer

MOST = 4096  #: variables whose addresses are sent with ATTACH: those of the newest loads


class Placements:
    """Addresses of the variables of one session; used by the loop's thread."""

    def __init__(self) -> None:
        self._places: dict[int, list[tuple[str, int, int]]] = {}  #: seq of the load → (name, address, size)

    @staticmethod
    def wants(call_id: int) -> bool:
        """Return whether answers of such calls contain addresses."""
        return call_id == LOAD

    def told(self, seq: int, result: int, reply: Any) -> None:
        """Note the answer of a load that the program was given. ``reply``: its encoded reply arguments."""
        if result:
            return
        try:
            found = load_answer(reply).globals
        except Corrupt:  # reported by the program's side
            return
        if found:
            self._places[seq] = [(one.name, one.address, one.size) for one in found]

    def forget(self, position: int) -> None:
        """Drop the loads up to ``position``: a checkpoint holds them and the addresses."""
        self._places = {seq: places for seq, places in self._places.items() if seq > position}

    def as_rows(self) -> list[tuple[int, list[tuple[str, int, int]]]]:
        """Return the rows for ATTACH: (seq of the load, (name, address, size) of each variable), newest loads first."""
        rows, count = [], 0
        for seq in sorted(self._places, reverse=True):
            count += len(self._places[seq])
            if count > MOST:
                break
            rows.append((seq, self._places[seq]))
        return rows
