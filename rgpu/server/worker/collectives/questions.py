"""A worker's open questions to other sessions about collectives, without links or threads.

It decides which session is asked next, and when a question is given up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from rgpu.server.collectives.contributions import Key, Unique


@dataclass(eq=False, slots=True)
class Question:
    """One question to one session, until it is answered."""

    id: int
    session: str
    unique: Unique
    key: Key
    members: Sequence[str]
    want: tuple[int, ...]  #: ranks whose contributions are requested, and were not received yet
    own: tuple[int, ...]  #: ranks here whose contributions that session has to confirm
    since: float  #: monotonic s
    now: bool = False  #: to be answered at once from what is kept: the session is asked in place of another
    tried: set[str] = field(default_factory=set)
    why: str = ""  #: why the session of those ranks does not answer
    source: str = ""  #: that session, where it can produce again what no session keeps

    @property
    def over(self) -> bool:
        """Whether there is nothing left to be answered."""
        return not self.want and not self.own


class Questions:
    """All open questions. Not locked.

    ``holds(question)``: its session has the contributions of ranks here; ``lost(question, why)``: no session has the
    wanted contributions; ``go_back(question, session)``: returns whether the session, which can, will produce them
    again.
    """

    def __init__(self, session: str, holds: Callable[[Question], None], lost: Callable[[Question, str], None],
                 go_back: Callable[[Question, str], bool]) -> None:
        self._session, self._holds, self._lost, self._go_back = session, holds, lost, go_back
        self._ids = 0
        self.open: dict[int, Question] = {}
        self.gone: dict[str, str] = {}  #: sessions that are over, and why

    def ask(self, unique: Unique, key: Key, members: Sequence[str], want: Collection[int], own: Collection[int],
            takers: Collection[str], now: float) -> list[Question]:
        """Open the questions about one collective: one to each session, for its ranks' contributions. Return them.

        ``takers``: sessions that have to confirm the contributions of ``own`` ranks.
        """
        made = []
        asked = {rank for one in self.open.values() if (one.unique, one.key) == (unique, key) for rank in one.want}
        want = [rank for rank in want if rank not in asked]  # by another rank of this session
        for session in sorted({members[rank] for rank in want} | set(takers)):
            if session == self._session:
                continue
            wanted = tuple(rank for rank in sorted(want) if members[rank] == session)
            question = self._open(session, unique, key, members, wanted, tuple(own) if session in takers else (), now)
            if session not in self.gone:
                made.append(question)
                continue
            made += self.is_gone(session, self.gone[session])
        return [question for question in made if question.id in self.open]

    def came(self, id: int, ranks: Collection[int]) -> None:
        """Note that the contributions of these ranks, which a question wanted, are here."""
        if (question := self.open.get(id)) is not None:
            question.want = tuple(rank for rank in question.want if rank not in ranks)
            self._close_if_over(question)

    def holds(self, id: int) -> None:
        """Note that the session has the contributions of ranks here."""
        if (question := self.open.get(id)) is not None and question.own:
            self._holds(question)
            question.own = ()
            self._close_if_over(question)

    def never(self, id: int, why: str, again: bool = False) -> list[Question]:
        """Note that a session will not answer: another one is asked, or the collective is lost. Return new questions.

        Where the session has what it was to confirm, or is over, only the wanted contributions are missing. ``again``:
        the session can produce them again; it is requested where no session keeps them, and the question stays open.
        """
        question = self.open.pop(id, None)
        if question is None:
            return []
        if question.own and question.session not in self.gone:
            self._lost(question, why)
            return []
        if question.own:
            self._holds(question)  # the session is over: it needs nothing
        if again:
            question.source = question.session
        return self._elsewhere(question, why) if question.want else []

    def is_gone(self, session: str, why: str) -> list[Question]:
        """Note that a session is over: others are asked in its place. Return the new questions."""
        self.gone[session] = why
        return [made for question in list(self.open.values()) if question.session == session
                for made in self.never(question.id, f"session {session} is over: {why}")]

    def settle(self, unique: Unique, key: Key) -> None:
        """Drop the questions about a collective: it is complete here, or given up."""
        for question in [one for one in self.open.values() if (one.unique, one.key) == (unique, key)]:
            del self.open[question.id]

    def of(self, session: str) -> list[Question]:
        """Return what is to be asked of a session."""
        return [question for question in self.open.values() if question.session == session]

    def late(self, sessions: Collection[str], before: float) -> list[Question]:
        """Return the questions to these sessions that are open since ``before``."""
        return [question for question in self.open.values() if question.session in sessions
                and question.since < before]

    def _elsewhere(self, question: Question, why: str) -> list[Question]:
        tried, question.why = question.tried | {question.session}, question.why or why
        for other in sorted(set(question.members) - tried - {self._session} - set(self.gone)):
            made = self._open(other, question.unique, question.key, question.members, question.want, (),
                              question.since)
            made.now, made.tried, made.why, made.source = True, tried, question.why, question.source
            return [made]
        if question.source and question.source not in self.gone and self._go_back(question, question.source):
            self._open(question.source, question.unique, question.key, question.members, question.want, (),
                       question.since)
            return []
        self._lost(question, question.why)
        return []

    def _open(self, session: str, unique: Unique, key: Key, members: Sequence[str], want: tuple[int, ...],
              own: tuple[int, ...], now: float) -> Question:
        self._ids += 1
        question = self.open[self._ids] = Question(self._ids, session, unique, key, members, want, own, now)
        return question

    def _close_if_over(self, question: Question) -> None:
        if question.over:
            self.open.pop(question.id, None)
