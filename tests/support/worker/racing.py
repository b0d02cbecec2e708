"""Random programs with streams, events and host functions that race, and their journals.

The program is simulated as on a GPU that is always ahead of it: a call takes effect when it is issued, unless its
stream stops at a host function, itself or behind an event. Its journal has what the program could see: before a
function returns, all that took effect meanwhile was observed, so each effect has one place among all others, but for
those that a function's return released in several streams at once: what these race for is not compared. A replay
has to leave the simulation's memory, and to have read what it read, however long each call takes there.
"""

from __future__ import annotations

import random
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rgpu.session.addresses import DEVICE_BASE as BASE

CELLS, STREAMS, EVENTS = 5, 4, 3


@dataclass
class Item:
    """One call in a stream. ``kind``: set, copy, read, slow, function, record, wait."""

    seq: int
    kind: str
    values: tuple[int, ...] = ()


@dataclass
class Program:
    """The simulated program, and its journal."""

    chance: random.Random
    journal: Any  #: makes packed records, with growing positions: ``journal(name, payload, **arguments)``
    slow: Callable[[int, int], bytes]  #: (microseconds, stream) a record of work that takes so long
    data: bytearray = field(default_factory=bytearray)
    cells: list[int | None] = field(default_factory=lambda: [0] * CELLS)  #: None: several streams raced for it
    read: dict[int, int | None] = field(default_factory=dict)  #: call → the value that it copied from the device
    streams: list[deque[Item]] = field(default_factory=lambda: [deque() for _ in range(STREAMS)])
    open: list[int] = field(default_factory=list)  #: functions that did not return
    unseen: list[int] = field(default_factory=list)  #: calls that took effect and were not observed yet
    records: dict[int, int] = field(default_factory=dict)  #: event → the call of its last record
    reached: set[int] = field(default_factory=set)  #: records of events that took effect
    values: int = 0

    def numbers(self) -> tuple[list[int], list[int]]:
        return [18, 19, 30, 31], [20, 40, 41]

    def begin(self, opened: bytes) -> None:
        """``opened``: records that open the session, with context 16, streams 18 and 19, and event 20."""
        journal = self.journal
        self.data += opened + journal("memcpy_h2d", bytes(4 * CELLS), destination=BASE, stream=18)
        for stream in (30, 31):
            self.data += journal("stream_create", stream=stream, context=16, flags=1, priority=0)
        for event in (40, 41):
            self.data += journal("event_create", event=event, context=16, flags=2)
        self.data += journal("context_synchronize", context=16)

    def issue(self, index: int, kind: str, *values: int) -> None:
        journal, (streams, events) = self.journal, self.numbers()
        stream = streams[index]
        match kind:
            case "set":
                self.data += journal("memset", destination=BASE + 4 * values[0], pitch=4, width=1, height=1, element=4,
                                     value=values[1], stream=stream)
            case "copy":
                self.data += journal("memcpy_d2d", destination=BASE + 4 * values[0], source=BASE + 4 * values[1],
                                     size=4, stream=stream)
            case "read":
                self.data += journal("memcpy_d2h", source=BASE + 4 * values[0], size=4, stream=stream)
            case "slow":
                self.data += self.slow(values[0], stream)
            case "function":
                self.data += journal("host_function", stream=stream)
                self.open.append(journal.seq)
            case "record":
                self.data += journal("event_record", event=events[values[0]], stream=stream, flags=0)
                self.records[values[0]] = journal.seq
            case "wait":
                if values[0] not in self.records:
                    return
                self.data += journal("stream_wait_event", stream=stream, event=events[values[0]], flags=0)
                values = (self.records[values[0]],)
        self.streams[index].append(Item(journal.seq, kind, values))
        self.run()

    def run(self) -> None:
        """All that can take effect does, by position."""
        touched: dict[int, set[tuple[int, bool]]] = {}  # cell → by which streams, and whether that wrote it
        reads: list[int] = []
        while ready := [queue for queue in self.streams if queue and self.may(queue[0])]:
            queue = min(ready, key=lambda queue: queue[0].seq)
            item = queue.popleft()
            if item.kind in ("set", "copy", "read"):
                cells = [(item.values[0], item.kind != "read")]
                if item.kind == "copy":
                    cells.append((item.values[1], False))
                for cell, writes in cells:
                    touched.setdefault(cell, set()).add((id(queue), writes))
            match item.kind:
                case "set":
                    self.cells[item.values[0]] = item.values[1]
                case "copy":
                    self.cells[item.values[0]] = self.cells[item.values[1]]
                case "read":
                    self.read[item.seq] = self.cells[item.values[0]]
                    reads.append(item.seq)
                case "record":
                    self.reached.add(item.seq)
            self.unseen.append(item.seq)
        self.unknown(touched, reads)

    def unknown(self, touched: dict[int, set[tuple[int, bool]]], reads: list[int]) -> None:
        """Forget cells that several streams raced for, and all cells that may have been copied from one."""
        races = {cell for cell, by in touched.items()
                 if len({stream for stream, _ in by}) > 1 and any(writes for _, writes in by)}
        if races:
            for cell, by in touched.items():
                if any(writes for _, writes in by):
                    self.cells[cell] = None
            self.read.update(dict.fromkeys(reads))

    def may(self, item: Item) -> bool:
        if item.kind == "function":
            return item.seq not in self.open
        return item.kind != "wait" or item.values[0] in self.reached

    def see(self, share: float) -> None:
        """The program observes calls that took effect; before a function returns, all of them."""
        for call in [call for call in self.unseen if self.chance.random() < share]:
            self.data += self.journal("completed", observed=call)
            self.unseen.remove(call)

    def returns(self) -> None:
        """A function that its stream has reached returns, if there is one."""
        there = [queue[0].seq for queue in self.streams if queue and queue[0].kind == "function"]
        if not there:
            return
        call = self.chance.choice(there)
        self.see(1.0)
        self.data += self.journal("host_function_done", call=call)
        self.open.remove(call)
        self.run()

    def step(self) -> None:
        chance = self.chance
        kind = chance.choices(["set", "copy", "read", "slow", "function", "record", "wait", "returns", "see", "cold"],
                              [6, 6, 2, 4, 3, 4, 4, 4, 2, 1])[0]
        match kind:
            case "set":
                self.values += 1
                self.issue(chance.randrange(STREAMS), kind, chance.randrange(CELLS), self.values)
            case "copy":
                self.issue(chance.randrange(STREAMS), kind, *chance.sample(range(CELLS), 2))
            case "read":
                self.issue(chance.randrange(STREAMS), kind, chance.randrange(CELLS))
            case "slow":
                self.issue(chance.randrange(STREAMS), kind, chance.choice([100, 500, 3000, 30000]))
            case "function":
                if len(self.open) < 3:
                    self.issue(chance.randrange(STREAMS), kind)
            case "record" | "wait":
                self.issue(chance.randrange(STREAMS), kind, chance.randrange(EVENTS))
            case "returns":
                self.returns()
            case "see":
                self.see(chance.choice([0.3, 1.0]))
            case "cold":  # is no work: what was observed before it is complete then
                self.data += self.journal("event_create", event=100 + self.journal.seq, context=16, flags=2)
                self.data += self.journal("event_destroy", event=99 + self.journal.seq)

    def compare(self, call: int, data: bytes) -> None:
        """Check what a call copied from the device."""
        if call in self.read and (value := self.read[call]) is not None:
            assert struct.unpack("<I", data)[0] == value, f"call {call}"

    def end(self) -> None:
        while self.open:
            self.returns()
        self.data += self.journal("context_synchronize", context=16)
        for cell in range(CELLS):
            self.issue(0, "read", cell)

    def whole(self, opened: bytes, steps: int = 70) -> bytes:
        """Return the records of a program of so many steps."""
        self.begin(opened)
        for _ in range(steps):
            self.step()
        self.end()
        return bytes(self.data)
