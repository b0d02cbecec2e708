"""What happens to which program and when: a pure function of a seed and a number.

Session NUMBER of seed SEED is always disturbed alike, whatever else is run beside it: :func:`session_plan`.
Moments are shares of the program's own steps, not seconds, so that they mean the same on a faster machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

#: Of each deck of disturbances, how many are of which kind. A deck is dealt whole before the next one is shuffled.
DECK = {"kill worker": 5, "freeze worker": 3, "kill daemon": 2, "freeze daemon": 2, "cut link": 4, "freeze link": 3,
        "move by copy": 5, "move by replay": 5, "checkpoint": 4, "full store": 1, "leader dies in a move": 3}
#: The coordinator's commands of a move, in their order; it may die before each and after each.
STEPS = tuple(f"{command}{after}" for command in (
    "write_begin", "command_receive", "command_send", "write_ready", "write_commit", "reconcile", "write_clear")
    for after in ("", ".done"))
#: Disturbances after which work has to be done again or elsewhere: what follows them at once comes during it.
LASTING = ("kill worker", "move by copy", "move by replay", "leader dies in a move", "checkpoint", "full store")
FREEZE = (0.5, 3.0)  #: seconds that a process stands still, from and to
SOON = (0.02, 1.5)  #: seconds after which the next disturbance comes during the recovery or move of the one before
FIRST, LAST = 0.06, 0.93  #: shares of the program's steps between which disturbances begin


@dataclass(frozen=True)
class InjectedFault:
    """One disturbance. ``at``: share of the program's steps at which it comes; ``after``: instead, so many seconds
    after the one before (0.0: at the same time); ``seconds``: how long it lasts, where it does;
    ``whom``: the daemon of the session's own host or another; ``elsewhere``: it comes back on other ports;
    ``step``: of the coordinator's role in a move."""

    what: str
    at: float
    after: float | None = None
    seconds: float = 0.0
    whom: str = "own"
    step: str = ""
    elsewhere: bool = False

    def __str__(self) -> str:
        when = f"at {self.at:.0%}"
        if self.after is not None:
            when = f"{self.after:.2f} s later" if self.after else "with it"
        lasts = f" for {self.seconds:.1f} s" if self.seconds else ""
        whose = f" of the {self.whom} host" if "daemon" in self.what else ""
        step = f" ({self.step})" if self.step else ""
        ports = ", back on other ports," if self.elsewhere else ""
        return f"{self.what}{whose}{step}{ports}{lasts} {when}"


@dataclass(frozen=True)
class Plan:
    """What is done to session ``number``, a program of ``kind``."""

    seed: int
    number: int
    kind: str
    faults: tuple[InjectedFault, ...]


def session_plan(seed: int, number: int, kinds: Sequence[str], faults: int, can: Sequence[str] = tuple(DECK)) -> Plan:
    """The plan of one session. ``kinds``: of programs, dealt round by round; ``can``: what can be done here."""
    wanted = _dealt(seed, "blows", [what for what in DECK if what in can for _ in range(DECK[what])],
                    number * faults, faults)
    kind = _dealt(seed, "kinds", list(kinds), number, 1)[0]
    chance = random.Random(f"{seed}/{number}")
    ports = random.Random(f"{seed}/{number}/ports")
    return Plan(seed, number, kind, tuple(
        replace(fault, elsewhere=ports.random() < 0.5) if fault.what == "kill daemon" else fault
        for fault in _moments(chance, wanted)))


def _dealt(seed: int, name: str, deck: list[str], first: int, count: int) -> list[str]:
    """Cards ``first`` to ``first + count`` of endless shuffled decks."""
    found: list[str] = []
    for turn in range(first // len(deck), (first + count - 1) // len(deck) + 1):
        found += random.Random(f"{seed}/{name}/{turn}").sample(deck, len(deck))
    begin = first % len(deck)
    return found[begin:begin + count]


def _moments(chance: random.Random, wanted: Sequence[str]) -> Iterator[InjectedFault]:
    """Spread over the program's run; a third of them during what the one before began, some together with it.

    Of those that come together no more than two kill the worker: a worker that is lost a third time where the program
    did not go on is given up by rule (docs/developers/ownership.md, "Losses"), which is not what is looked for.
    """
    chains = list(_chains(chance, wanted))
    width = (LAST - FIRST) / max(1, len(chains))
    for place, chain in enumerate(chains):
        at = FIRST + width * (place + chance.random() * 0.8)
        for index, (what, after) in enumerate(chain):
            lasts = what.startswith("freeze") or what == "full store"
            yield InjectedFault(what, round(at, 4), after if index else None,
                                seconds=round(chance.uniform(*FREEZE), 2) if lasts else 0.0,
                                whom=chance.choice(("own", "own", "other")) if "daemon" in what else "own",
                                step=(f"{chance.choice(STEPS)}, {chance.choice(('copy', 'replay'))}"
                                      if "leader" in what else ""))


def _chains(chance: random.Random, wanted: Sequence[str]) -> Iterator[list[tuple[str, float]]]:
    chain: list[tuple[str, float]] = []
    for what in wanted:
        kills = sum(one == "kill worker" for one, _ in [*chain, (what, 0.0)])
        roll, after = chance.random(), round(chance.uniform(*SOON), 2)
        together = roll < 0.12
        during = roll < 0.45 and chain and chain[-1][0] in LASTING
        if chain and len(chain) < 3 and kills <= 2 and (together or during):
            chain.append((what, 0.0 if together else after))
            continue
        if chain:
            yield chain
        chain = [(what, 0.0)]
    if chain:
        yield chain
