"""The world that the three tables of a move are explored in: every interleaving of what may happen.

It holds the tables that ship, the real :func:`reconcile`, and an abstract registry
record. What a command finds is an event, so a table that forgets a command
waits for ever, and one that gives a wrong one meets an event that it has no row
for. The leader's messages stay for ever: each may be delivered at any time, any
number of times, or never; the link between the workers keeps its order and may
break. Writes to the registry may succeed with their answer lost. A second
leader may take over at any time while the first one goes on believing. Each
worker may die, the program may fail, whoever asked may cancel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from rgpu.migrate.move.coordinator import COORDINATOR, CoordinatorRole
from rgpu.migrate.move.destination import DESTINATION, DestinationRole
from rgpu.migrate.move.forecast import Measured
from rgpu.migrate.move.machine import Machine
from rgpu.migrate.move.options import MoveOptions
from rgpu.migrate.move.sampling import Sampled
from rgpu.migrate.move.source import SOURCE, SourceRole, role_for
from rgpu.migrate.records.reconcile import Holding, reconcile
from rgpu.migrate.records.schema import MoveRecord, SessionRecord

#: What is explored: a test may put another table in its place.
TABLES: dict[str, Machine] = {"source": SOURCE, "destination": DESTINATION, "coordinator": COORDINATOR}

LATE, IN_TIME = 1e9, -1.0  #: the model's deadlines are at 0
FEW, MANY = 1, 10**6  #: pages
SLOW = 1e6  #: bytes/s
CLOCK = "the source's clock"
CUT = 5  #: the position of what is sent first
ENOUGH = Measured(pages=10, differing=1, changed=((0.1, 1),), speed=1e9, free_pages=100)
WORTH_A_REPLAY = Measured(pages=MANY, differing=10**5, changed=((0.1, 10**5),), speed=1e9, free_pages=MANY)
HOPELESS = Measured(pages=MANY, differing=MANY, changed=((0.1, MANY),), speed=1e9, free_pages=0)
GOOD, BAD = Sampled(512, 0, MANY), Sampled(512, 512, 10**9)

#: In these states, and in no others, the source holds these things when its commands are done.
HOLDS = {"tap": {"pausing_for_cut", "cutting", "streaming", "replaying", "pausing_for_replay"},
         "samples": {"streaming", "replaying"}, "throttle": {"replaying"}, "cut": {"streaming"}}
#: What the source has its daemon do at once when it comes into a state.
ASKED = {"withdrawing": "write_abort", "asking": "read_record"}
#: What a leader writes in a state: that is what `rgpu migrate status` shows.
WRITES = {"beginning": "write_begin", "readying": "write_ready", "committing": "write_commit",
          "aborting": "write_abort"}
#: What is sent down the link by a command of the source, and the answer that it waits for.
ASKS = {"send_objects": (("objects",), "made", "objects_made"), "send_rest": (("state all",), "verified", "verified"),
        "send_cut": (("state cut",), "verified", "cut_verified"), "compare": (("last",), "want", "compared"),
        "repair": (("rest",), "verified", "verified")}


class Broken(Exception):
    """An invariant does not hold."""


def need(holds: bool, says: str) -> None:
    if not holds:
        raise Broken(says)


@dataclass(frozen=True, slots=True)
class Registry:
    """The session's record. ``owner``: a (source), b (destination), c (recovered elsewhere)."""

    owner: str = "a"
    epoch: int = 1
    move: str = "none"  #: none, preparing, ready, committed, aborted
    leader: int = 0

    def record(self) -> SessionRecord:
        return _record(self.owner, self.epoch, self.move)


@cache
def _record(owner: str, epoch: int, state: str) -> SessionRecord:
    moving = state in ("preparing", "ready")
    move = None if state == "none" else MoveRecord(
        id="m", source="a", destination="b", destination_incarnation=7, device="cpu:0", state=state)
    return SessionRecord(name="s", state="moving" if moving else "running", owner=owner, incarnation=7, epoch=epoch,
                         quota=1, agent="", device="cpu:0", move=move)


@cache
def reading(registry: Registry, host: str, holds: str, epoch: int) -> str:
    return reconcile(registry.record(), Holding(host, 7, holds, epoch, "m")).action  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Leader:
    """``todo``: commands not yet done."""

    role: CoordinatorRole = CoordinatorRole()
    todo: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """The worker that has the session. ``asked``: of its daemon: abort, read, or nothing."""

    role: SourceRole = role_for(MoveOptions())
    todo: tuple[str, ...] = ()
    sent: bool = False  #: the first command of ``todo`` has sent what it sends
    pauses: int = 0
    has: frozenset[str] = frozenset()
    reported: str = ""
    asked: str = ""
    called_off: bool = False
    gone: bool = False  #: its process has ended, as it was told


@dataclass(frozen=True, slots=True)
class Destination:
    """``knows``: what is here: nothing, cut, all; ``calls``: the last ones were applied."""

    role: DestinationRole = DestinationRole(session="s")
    todo: tuple[str, ...] = ()
    sent: bool = False
    prepared: bool = False  #: its process was started
    knows: str = ""
    arrived: str = ""
    calls: bool = False
    replays: bool = False  #: what it applies is a replay, whose answers stay here
    told: bool = False
    serves: bool = False
    gone: bool = False


@dataclass(frozen=True, slots=True)
class World:
    registry: Registry = Registry()
    source: Source | None = Source()  #: None: dead
    destination: Destination | None = Destination()
    leaders: tuple[Leader, Leader | None] = (Leader(CoordinatorRole(), ("start",)), None)
    messages: frozenset[str] = frozenset()
    down: tuple[str, ...] = ()  #: the link between the workers: messages not read yet
    up: tuple[str, ...] = ()
    link: str = ""  #: open, ended (by the source, with all that was sent), broken; empty: not yet
    offered: bool = False  #: history: the source told somebody
    committed: bool = False
    unknown: int = 2  #: answers of the registry and of daemons that may still be lost
    deaths: int = 2
    breaks: int = 1
    recoveries: int = 1
    fair: bool = True  #: history: nothing went wrong
    uncleared: bool = False  #: history: a leader could not take the move off the record
    allowed: tuple[int, int, int] = (2, 2, 1)  #: unknown, deaths and recoveries at its beginning

    def send(self, message: str) -> World:
        return replace(self, messages=self.messages | {message})

    def broken_link(self) -> World:
        return replace(self, link="broken", down=(), up=()) if self.link else self


#: (what happens, the world after it, whether nothing goes wrong by it)
Step = tuple[str, World, bool]

def dead(side: Source | Destination | None) -> bool:
    return side is None or side.gone
