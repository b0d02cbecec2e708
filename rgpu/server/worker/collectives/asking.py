"""The asking end of rank links: one connection for each session that this one shares communicators with.

The daemon makes connections (a worker reaches no network): the worker names the session that it needs, and the daemon
hands a connection over, or reports that the session is over. Unanswered questions are sent again over each new
connection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import structlog

from rgpu.link.data.frames import SealedConnection
from rgpu.link.messages.ranks import (
    ASK,
    ASK_ID_LAYOUT,
    BORROW,
    CONTRIBUTIONS,
    FLOOR,
    GO_BACK,
    HOLDS,
    KEPT,
    KEPT_HEAD_LAYOUT,
    LANED,
    LANES,
    LENGTH,
    LENGTH_LAYOUT,
    NEVER,
    OFFER,
    PLACED,
    REFILL,
    Ask,
    Borrow,
    Floor,
    GoBack,
    Never,
    Refill,
)
from rgpu.migrate.transfer.pieces import Pieces
from rgpu.server.collectives.contributions import Contribution, Key, Log, Unique, decode, placed
from rgpu.server.collectives.exchange import Shared
from rgpu.server.collectives.numbers import Array
from rgpu.server.worker.collectives.lanes import Arriving, AskerLanes
from rgpu.server.worker.collectives.questions import Question, Questions
from rgpu.server.worker.collectives.segments import PeerSegments
from rgpu.session.errors import Corrupt, Fenced, LinkError, RgpuError

log = structlog.get_logger(__name__)

FIRST_DIAL, LAST_DIAL = 0.05, 1.0  #: s between two requests for a connection
#: s after which a session that cannot be reached counts as lost: its own recovery has ended by then
PATIENCE = 600.0
TICK = 0.05
#: s without an answer after which the daemon is asked whether the linked worker still owns the session: a worker that
#: was cut off cannot find out that it lost it
DOUBT = 5.0
MOST_BACK = 3  #: times that this worker sends one session back to its checkpoint

_encode = msgspec.msgpack.Encoder().encode


class Asking:
    """See the module docstring. ``dial(session, epoch)``: asks the daemon for a connection to that session's worker,
    unless its owner is still that of ``epoch``.

    ``replaying()``: whether this worker only repeats calls of the session's owner: then no session has to confirm that
    it has the contributions of ranks here, since the owner has ensured it. ``widen(session, epoch, count)``: requests
    so many further connections to the same worker for :meth:`widened`. ``room``: memory for contributions, as
    :meth:`Exchange.room` gives it.
    """

    def __init__(self, session: str, contributions: Log, dial: Callable[[str, int], None],
                 replaying: Callable[[], bool], widen: Callable[[str, int, int], None] | None = None,
                 room: Callable[[int], Array | None] = lambda size: None) -> None:
        self._session, self._log, self._dial, self._replaying = session, contributions, dial, replaying
        self._widen, self._room = widen, room
        self._lanes: dict[SealedConnection, AskerLanes] = {}
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)
        self._questions = Questions(session, self._holds, self._lost, self._send_back)
        self._sent_back: dict[str, set[int]] = {}  #: by session: the epochs at which it was asked to go back
        self._shared: dict[Unique, Shared] = {}
        self._links: dict[str, SealedConnection] = {}
        self._epochs: dict[str, int] = {}
        self._next: dict[str, tuple[float, float]] = {}  #: when a link is requested again, and the wait after that
        self._floors: dict[Unique, int] = {}
        self._refills: dict[Unique, str] = {}  #: communicators that the log may lack parts of: the session to ask
        self._refilling: list[Unique] = []  #: by the id of the REFILL
        self._linked: dict[str, int] = {}  #: by session: the epoch of the newest link to it
        self._probed: set[str] = set()  #: sessions without a link that one is requested to, without a question
        self._thread: threading.Thread | None = None

    # -- what the device asks --------------------------------------------------------
    def opened(self, unique: Unique, shared: Shared) -> None:
        """Note the ranks of a communicator."""
        with self._lock:
            self._shared[unique] = shared
            others = [session for session in shared.members if session != self._session]
            after = [session for session in others if session > self._session]
            self._refills[unique] = min(after or others)
            self._begin()

    def ask(self, unique: Unique, key: Key, want: Sequence[int], own: Sequence[int]) -> None:
        """See :meth:`Exchange.ask`."""
        with self._lock:
            members = self._shared[unique].members
            here = self._log.get(unique, key)
            takers = {members[key[1]]} if key[0] >= 0 else set(members)
            takers = takers - {self._session} if own else set()
            if self._replaying():
                for session in takers:
                    self._shared[unique].held(key, session, own)
                takers = set()
            made = self._questions.ask(unique, key, members, [rank for rank in want if rank not in here], own, takers,
                                       time.monotonic())
            self._send(made)
            self._begin()

    def settle(self, unique: Unique, key: Key) -> None:
        """See :meth:`Exchange.settle`."""
        with self._lock:
            self._questions.settle(unique, key)

    def floor(self, unique: Unique, number: int) -> None:
        """Send the other sessions that this one requests no collective below ``number`` again."""
        with self._lock:
            self._floors[unique] = number
            for session in set(self._shared[unique].members) & set(self._links):
                self._tell(session, FLOOR, _encode(Floor(unique, number)))

    # -- what the daemon sends ---------------------------------------------------------
    def link(self, session: str, connection: SealedConnection, lent: PeerSegments | None = None) -> None:
        """Use a connection to the session's worker. ``lent``: memory of that worker, mapped here.

        Raises :class:`Fenced` for a worker of an older epoch.
        """
        with self._lock:
            if connection.epoch < self._epochs.get(session, 0):
                connection.close()
                if lent is not None:
                    lent.close()
                raise Fenced(f"{session} was seen at epoch {self._epochs[session]}: a worker of epoch "
                             f"{connection.epoch} counts no more")
            self._epochs[session] = connection.epoch
            old = self._links.pop(session, None)
            self._links[session] = connection
            self._lanes[connection] = AskerLanes()
            self._probed.discard(session)
            self._next.pop(session, None)
            if lent is not None:
                self._tell(session, BORROW, _encode(Borrow(lent.number, lent.direct is not None)))
            for unique, number in self._floors.items():
                if session in self._shared[unique].members:
                    self._tell(session, FLOOR, _encode(Floor(unique, number)))
            for unique in [unique for unique, asked in self._refills.items() if asked == session]:
                self._refilling.append(unique)
                self._tell(session, REFILL, _encode(Refill(len(self._refilling) - 1, unique)))
                del self._refills[unique]
            if self._linked.get(session, connection.epoch) < connection.epoch:
                self._renew(session)
            self._linked[session] = connection.epoch
            self._send(self._questions.of(session))
        if old is not None:
            old.close()
        threading.Thread(target=self._read, args=(session, connection, lent), name=f"ranks-{session}",
                         daemon=True).start()

    def widened(self, session: str, connections: Sequence[SealedConnection]) -> None:
        """Use further connections to a session's worker as lanes. Raises :class:`Fenced`, :class:`LinkError`."""
        with self._lock:
            link = self._links.get(session)
            lanes = self._lanes.get(link) if link is not None else None
        if link is None or lanes is None or any(one.epoch != link.epoch for one in connections):
            for one in connections:
                one.close()
            raise Fenced(f"no link to {session} has these lanes")
        lanes.opened(connections)
        link.send(LANES, bytes([len(connections)]))
        log.info("long contributions come over lanes", peer=session, lanes=len(connections))

    def newer(self, session: str, epoch: int) -> None:
        """Note that a session is served at that epoch: a link to an older worker of it ends."""
        with self._lock:
            self._epochs[session] = max(self._epochs.get(session, 0), epoch)
            old = self._links.get(session)
        if old is not None and old.epoch < epoch:
            old.close()

    def epoch_of(self, session: str) -> int:
        """Return the highest epoch at which a session was seen."""
        return self._epochs.get(session, 0)

    def probe(self, session: str) -> None:
        """Find out whether a session's worker is still the linked one, or what has become of it."""
        with self._lock:
            if (link := self._links.get(session)) is None:
                self._probed.add(session)
                self._begin()
                return
        self._dial(session, link.epoch)

    def is_gone(self, session: str) -> bool:
        """Tell whether a session is over."""
        return session in self._questions.gone

    def owned(self) -> None:
        """Note that this worker owns its session from now on: links made before, as a non-owner, are closed."""
        with self._lock:
            links = list(self._links.values())
        for link in links:
            link.close()

    def gone(self, session: str, why: str) -> None:
        """Note that a session is over: its contributions are requested of others, and what they lack is lost."""
        with self._lock:
            if session not in self._questions.gone:
                log.info("a session with ranks of a communicator is over", peer=session, reason=why)
            self._refills = {unique: asked for unique, asked in self._refills.items() if asked != session}
            self._send(self._questions.is_gone(session, why))

    def describe(self) -> dict[str, Any]:
        """Return {linked, unreached, gone}: sessions linked, sessions to be asked without a link, sessions over."""
        with self._lock:
            return {"linked": sorted(self._links), "gone": dict(self._questions.gone),
                    "unreached": sorted({q.session for q in self._questions.open.values()} - set(self._links))}

    # -- links ------------------------------------------------------------------------
    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ranks-dial", daemon=True)
            self._thread.start()
        self._work.notify_all()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._unreached():
                    if not self._questions.open:
                        self._work.wait()
                    elif self._questions.late(self._links, time.monotonic() - DOUBT):
                        break
                    else:
                        self._work.wait(DOUBT / 2)
                now, wanted = time.monotonic(), []
                for session in self._unreached():
                    due, wait = self._next.get(session, (0.0, FIRST_DIAL))
                    if now >= due:
                        wanted.append((session, 0))
                        self._next[session] = now + wait, min(2 * wait, LAST_DIAL)
                for session in {one.session for one in self._questions.late(self._links, now - DOUBT)}:
                    if now >= self._next.get(session, (0.0, DOUBT))[0]:
                        wanted.append((session, self._links[session].epoch))
                        self._next[session] = now + DOUBT, FIRST_DIAL
                for question in self._questions.late(self._unreached(), now - PATIENCE):
                    self._send(self._questions.is_gone(question.session,
                                                       f"its worker was not reached for {PATIENCE:.0f} s"))
            for session, epoch in wanted:
                self._dial(session, epoch)
            time.sleep(TICK)

    def _unreached(self) -> set[str]:
        asked = {question.session for question in self._questions.open.values()} | set(self._refills.values())
        return (asked | (self._probed - set(self._questions.gone))) - set(self._links)

    def _send(self, questions: Sequence[Question]) -> None:
        for one in questions:
            if one.session in self._links and one.id in self._questions.open:
                self._tell(one.session, ASK, _encode(Ask(one.id, one.unique, one.key, list(one.want), list(one.own),
                                                         one.now, self._widen is not None)))

    def _tell(self, session: str, kind: int, body: bytes) -> None:
        try:
            self._links[session].send(kind, body)
        except LinkError:  # its reader notices as well, and another connection is requested
            pass

    def _read(self, session: str, connection: SealedConnection, lent: PeerSegments | None) -> None:
        pieces: dict[int, Pieces | Arriving] = {}
        why, lanes = "it ended", self._lanes[connection]
        try:
            while True:
                kind, body = connection.recv()
                if kind == OFFER:
                    self._offered(session, connection, lanes, body)
                    continue
                if kind == LANED:
                    kind, body = lanes.message(body)
                self._take(kind, body, pieces, lent)
                if lent is not None:
                    lent.settle()
        except (RgpuError, ValueError) as error:  # of msgspec too, and of what is no UTF-8
            why = str(error)
        finally:
            connection.close()
            lanes.close()
            if lent is not None:
                lent.close()
            with self._lock:
                del self._lanes[connection]
                if self._links.get(session) is connection:
                    del self._links[session]
                    self._begin()
            log.info("a rank link has ended", peer=session, reason=why)

    def _offered(self, session: str, connection: SealedConnection, lanes: AskerLanes, body: memoryview) -> None:
        """Have lanes opened that were offered. Raises :class:`Corrupt`."""
        count = lanes.offered(body)
        if count and self._widen is not None:
            self._widen(session, connection.epoch, count)

    def _take(self, kind: int, body: memoryview, pieces: dict[int, Pieces | Arriving],
              lent: PeerSegments | None = None) -> None:
        """Handle a message. Raises :class:`Corrupt`, :class:`LinkError`."""
        if kind == NEVER:
            said = msgspec.msgpack.decode(body, type=Never)
            with self._lock:
                question = self._questions.open.get(said.id)
                if question is not None:  # another rank of this session may have received it meanwhile
                    self._questions.came(said.id, self._log.get(question.unique, question.key))
                self._send(self._questions.never(said.id, said.why, said.again))
            return
        if kind == KEPT and len(body) > KEPT_HEAD_LAYOUT.size:
            self._take_kept(body, pieces)
            return
        if kind not in (CONTRIBUTIONS, HOLDS, PLACED, LENGTH) or len(body) < ASK_ID_LAYOUT.size:
            raise Corrupt(f"a message of type {kind} with {len(body)} bytes on a rank link", reason="message")
        (number,) = ASK_ID_LAYOUT.unpack_from(body)
        if kind == HOLDS:
            with self._lock:
                self._questions.holds(number)
            return
        with self._lock:
            question = self._questions.open.get(number)
        if kind == PLACED:
            self._take_placed(question, body[ASK_ID_LAYOUT.size:], lent)
            return
        if question is None:  # it is complete, or was never asked
            pieces.pop(number, None)
            return
        if kind == LENGTH:
            if len(body) != LENGTH_LAYOUT.size:
                raise Corrupt(f"LENGTH with {len(body)} bytes on a rank link", reason="message")
            _, size, data = LENGTH_LAYOUT.unpack(body)
            pieces[number] = Arriving(size, data, self._room)
            return
        whole = pieces.setdefault(number, Pieces("contributions")).take(body[ASK_ID_LAYOUT.size:])
        if whole is None:
            return
        del pieces[number]
        self._came(question, decode(whole))

    def _take_placed(self, question: Question | None, rows: memoryview, lent: PeerSegments | None) -> None:
        """Take contributions in lent memory. Raises :class:`Corrupt`, :class:`LinkError`."""
        if lent is None:
            raise Corrupt("PLACED came over a rank link without memory", reason="message")
        came = placed(rows, lent.view)  # also where the question is closed: so the memory is given back
        if question is not None:
            self._came(question, came)

    def _came(self, question: Question, came: dict[int, Contribution]) -> None:
        """Keep contributions that answer a question. Raises :class:`Corrupt`."""
        if not set(came) <= set(question.want):
            raise Corrupt(f"contributions of ranks {sorted(came)} came instead of {question.want}", reason="rank")
        # The log before the question: another rank of this session would ask again in between.
        self._log.put(question.unique, question.key, came)
        with self._lock:
            self._questions.came(question.id, came)

    def _take_kept(self, body: memoryview, pieces: dict[int, Pieces | Arriving]) -> None:
        """Keep contributions that answer a REFILL. Raises :class:`Corrupt`."""
        number, sender, receiver, which = KEPT_HEAD_LAYOUT.unpack_from(body)
        whole = pieces.setdefault(-1, Pieces("kept contributions")).take(body[KEPT_HEAD_LAYOUT.size:])
        with self._lock:
            if number >= len(self._refilling):
                raise Corrupt(f"KEPT answers REFILL {number}, which was not asked", reason="id")
            unique = self._refilling[number]
        if whole is not None:
            self._log.put(unique, (sender, receiver, which), decode(whole))

    def _renew(self, session: str) -> None:
        """Ask a session's new worker to confirm the contributions that the worker before it had confirmed."""
        if self._replaying():
            return
        for unique, shared in self._shared.items():
            for key, own in (shared.renewed(session) if session in shared.members else ()):
                self._questions.ask(unique, key, shared.members, (), own, {session}, time.monotonic())

    # -- what questions decide ------------------------------------------------------------
    def _holds(self, question: Question) -> None:
        self._shared[question.unique].held(question.key, question.session, question.own)

    def _lost(self, question: Question, why: str) -> None:
        ranks = question.want or question.own if question.key[0] < 0 else question.key[:2]
        names = ", ".join(f"{rank} ({question.members[rank]})" for rank in ranks)
        self._shared[question.unique].lost(question.key, f"rank {names} brings nothing to it: {why}")

    def _send_back(self, question: Question, session: str) -> bool:
        """Have the session begin again at its checkpoint, once at each epoch. Return whether it will.

        Not for a move's destination, which owns nothing yet.
        """
        link, epochs = self._links.get(session), self._sent_back.setdefault(session, set())
        if self._replaying() or (len(epochs) >= MOST_BACK and (link is None or link.epoch not in epochs)):
            return False
        if link is not None and link.epoch not in epochs:
            epochs.add(link.epoch)
            log.warning("a session is asked to begin again at its checkpoint", peer=session, epoch=link.epoch,
                        collective=question.key[2], reason=question.why)
            self._tell(session, GO_BACK, _encode(GoBack(question.unique, question.key, question.why)))
        return True
