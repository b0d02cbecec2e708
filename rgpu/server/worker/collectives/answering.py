"""The answering end of rank links: sends this session's contributions to the sessions that take part."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import structlog

from rgpu.link.data.frames import SealedConnection
from rgpu.link.data.lanes import WORTH
from rgpu.link.local.shared import Channel
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
    LANE,
    LANED,
    LANES,
    LENGTH,
    LENGTH_LAYOUT,
    MARK_LAYOUT,
    NEVER,
    OFFER,
    PLACED,
    REFILL,
    Ask,
    Borrow,
    Floor,
    GoBack,
    Lane,
    Never,
    Refill,
)
from rgpu.migrate.transfer.pieces import PIECE, in_pieces
from rgpu.server.collectives.contributions import Contribution, Key, Log, Unique, encode
from rgpu.server.collectives.exchange import Shared
from rgpu.server.worker.agent.link_lanes import LinkLanes
from rgpu.server.worker.collectives.direct import Direct
from rgpu.server.worker.collectives.segments import Borrower, OwnSegments
from rgpu.session.errors import Corrupt, Fenced, RgpuError
from rgpu.session.objects.collectives import MOST_RANKS

log = structlog.get_logger(__name__)

MOST_PENDING = 1 << 16  #: questions of one connection that wait
MOST_OFFERED = 64  #: memory sockets that no client has named; the oldest is closed
LONG_PIECE = 2 * PIECE  #: bytes of a message over lanes, where each costs a mark and wakes several threads
LANES_FROM = 32 << 20  #: bytes sent over a link from which on lanes are offered


@dataclass(frozen=True, slots=True)
class Asker:
    """A requesting session at an epoch. ``replaying``: its worker is a move's destination; it owns nothing yet."""

    session: str
    epoch: int
    replaying: bool = False

    def __str__(self) -> str:
        return f"{self.session}@{self.epoch}{'+' if self.replaying else ''}"

    @classmethod
    def read(cls, text: str) -> Asker:
        """Parse the text that ``str`` gives. Raises :class:`Corrupt`."""
        session, _, epoch = text.removesuffix("+").rpartition("@")
        if not session or not epoch.isdigit():
            raise Corrupt(f"a ticket for ranks names {text[:80]!r}", reason="asker")
        return cls(session, int(epoch), text.endswith("+"))


class _Client:
    """One connection and its queue; a thread of its own sends, so that no other thread waits for a peer.

    ``lanes``: those that were offered to it.
    """

    def __init__(self, connection: SealedConnection, asker: Asker) -> None:
        self.connection, self.asker = connection, asker
        self.pending: dict[int, Ask] = {}
        self.memory: Borrower | None = None  #: the channel over which it was lent memory
        self.lanes: LinkLanes | None = None
        self.lane = False  #: it is another client's lane
        self.sent = 0  #: bytes of contributions
        self._out: deque[tuple[int, tuple[bytes | memoryview, ...]]] = deque()
        self._later: deque[tuple[int, tuple[bytes | memoryview, ...]]] = deque()  #: a refill: no operation waits for it
        self._filled = threading.Condition()
        self._over = False
        threading.Thread(target=self._send, name=f"ranks-to-{asker.session}", daemon=True).start()

    def tell(self, kind: int, *parts: bytes | memoryview) -> None:
        """Queue a message."""
        with self._filled:
            (self._later if kind == KEPT else self._out).append((kind, parts))
            self._filled.notify()

    def leave(self) -> None:
        """End the queue; the connection stays open."""
        with self._filled:
            self._over = True
            self._filled.notify()

    def close(self) -> None:
        """End the connection."""
        self.leave()
        self.connection.close()
        if self.lanes is not None:
            self.lanes.close()

    def _send(self) -> None:
        try:
            while True:
                with self._filled:
                    self._filled.wait_for(lambda: self._over or self._out or self._later)
                    if self._over:
                        return
                    kind, parts = (self._out or self._later).popleft()
                self._write(kind, parts)
        except RgpuError:  # its reader notices as well
            self.connection.close()

    def _write(self, kind: int, parts: tuple[bytes | memoryview, ...]) -> None:
        if self.lanes is not None and self.lanes.out and (length := 1 + sum(map(len, parts))) >= WORTH:
            number, lane = self.lanes.turn()
            lane.send(kind, *parts)
            kind, parts = LANED, (MARK_LAYOUT.pack(number, length),)
        self.connection.send(kind, *parts)


class Answering:
    """See the module docstring.

    ``go_back(why)``: ends this worker, so that its session begins again at its checkpoint, unless it is ending already.
    """

    def __init__(self, contributions: Log, go_back: Callable[[str], None] = lambda why: None,
                 segments: OwnSegments | None = None, direct: Direct | None = None) -> None:
        self._log, self._go_back, self._segments = contributions, go_back, segments or OwnSegments()
        self._direct = direct
        self._offered: dict[bytes, Channel] = {}  #: rank memory sockets that no client has named, by number
        self._lock = threading.RLock()
        self._clients: set[_Client] = set()
        self._shared: dict[Unique, Shared] = {}
        self._epochs: dict[str, int] = {}
        contributions.listen(self._look_at)

    def opened(self, unique: Unique, shared: Shared) -> None:
        """Answer for a communicator from now on."""
        with self._lock:
            self._shared[unique] = shared
        self.changed(unique)

    def changed(self, unique: Unique) -> None:
        """Answer again what waits for a communicator."""
        self._look(lambda ask: ask.unique == unique)

    def lend(self, number: bytes, channel: Channel) -> None:
        """Lend memory over this channel to the client that will name it."""
        with self._lock:
            self._offered[number] = channel
            while len(self._offered) > MOST_OFFERED:
                self._offered.pop(next(iter(self._offered))).close()

    def serve(self, connection: SealedConnection, asker: Asker) -> None:
        """Answer a connection until it ends, in a thread. Raises :class:`Fenced` for a worker whose epoch is over."""
        with self._lock:
            known = self._epochs.get(asker.session, 0)
            if not asker.replaying and asker.epoch < known:
                connection.close()
                raise Fenced(f"{asker.session} was seen at epoch {known}: its worker of epoch {asker.epoch} joins "
                             "nothing")
            if not asker.replaying:
                self._epochs[asker.session] = asker.epoch
            older = [one for one in self._clients if one.asker.session == asker.session
                     and not one.asker.replaying and one.asker.epoch < asker.epoch and not asker.replaying]
            client = _Client(connection, asker)
            self._clients.add(client)
        for one in older:
            one.close()
        threading.Thread(target=self._read, args=(client,), name=f"ranks-of-{asker.session}", daemon=True).start()

    def _read(self, client: _Client) -> None:
        try:
            kind, body = client.connection.recv()
            if kind == LANE:
                self._join(client, msgspec.msgpack.decode(body, type=Lane))
                return
            while True:
                self._take(client, kind, body)
                kind, body = client.connection.recv()
        except (RgpuError, ValueError) as error:  # of msgspec too, and of what is no UTF-8
            log.info("a rank link has ended", peer=str(client.asker), reason=str(error))
        finally:
            if not client.lane:
                client.close()
            with self._lock:
                self._clients.discard(client)
            if client.memory is not None:
                if self._direct is not None:
                    self._direct.dismiss(client.memory.channel)
                self._segments.dismiss(client.memory)

    def _join(self, client: _Client, said: Lane) -> None:
        """Make a connection the lane of another one. Raises :class:`Fenced`."""
        with self._lock:
            owner = next((one for one in self._clients if one.asker == client.asker and one.lanes is not None
                          and one.lanes.knows(said.key)), None)
        if owner is None or owner.lanes is None:
            raise Fenced("the lane is of no rank link here")
        client.leave()
        owner.lanes.admit(client.connection, said.key, said.number)
        client.lane = True

    def _take(self, client: _Client, kind: int, body: memoryview) -> None:
        """Handle a message. Raises :class:`Corrupt`."""
        if kind == FLOOR:
            told = msgspec.msgpack.decode(body, type=Floor)
            with self._lock:
                shared = self._shared.get(told.unique)
            if shared is not None and client.asker.session in shared.members and not client.asker.replaying:
                self._log.floor(told.unique, client.asker.session, told.number, shared.members)
            return
        if kind == REFILL:
            self._refill(client, msgspec.msgpack.decode(body, type=Refill))
            return
        if kind == GO_BACK:
            self._return(client, msgspec.msgpack.decode(body, type=GoBack))
            return
        if kind == LANES and client.lanes is not None:
            client.lanes.use(body)
            return
        if kind == BORROW:
            self._borrow(client, msgspec.msgpack.decode(body, type=Borrow))
            return
        if kind != ASK:
            raise Corrupt(f"a message of type {kind} on a rank link", reason="message")
        ask = msgspec.msgpack.decode(body, type=Ask)
        numbers = (*ask.want, *ask.own, ask.key[0] + 1, ask.key[1] + 1)
        if not 0 <= ask.id < 1 << 64 or any(not 0 <= number <= MOST_RANKS for number in numbers):
            raise Corrupt(f"question {ask.id} on a rank link names impossible ranks", reason="rank")
        with self._lock:
            if len(client.pending) >= MOST_PENDING:
                raise Corrupt(f"{MOST_PENDING} questions wait on one rank link", reason="questions")
            client.pending[ask.id] = ask
        self._answer(client, ask)

    def _return(self, client: _Client, asked: GoBack) -> None:
        """Begin again at the checkpoint, if the asker is an owner and the replay produces what it lacks."""
        with self._lock:
            shared = self._shared.get(asked.unique)
        if shared is None or client.asker.session not in shared.members or client.asker.replaying:
            return
        if any(not -1 <= rank < len(shared.members) for rank in asked.key[:2]):
            raise Corrupt("GO_BACK on a rank link names impossible ranks", reason="rank")
        if shared.again(asked.key):
            self._go_back(f"session {client.asker.session} begins again, and needs what was brought to collective "
                          f"{asked.key[2]}: {asked.why}"[:300])

    def _borrow(self, client: _Client, asked: Borrow) -> None:
        """Lend memory over the socket that BORROW names. Raises :class:`Corrupt`."""
        with self._lock:
            channel = self._offered.pop(asked.number, None)
        if channel is None or client.memory is not None:
            raise Corrupt("BORROW on a rank link names no socket", reason="number")
        client.memory = Borrower(channel)
        self._segments.admit(client.memory)
        if asked.direct and self._direct is not None:
            self._direct.admit(channel)

    def _send(self, client: _Client, ask: Ask, parts: list[bytes | memoryview]) -> None:
        """Send contributions in pieces; offer lanes for the next ones once these were many bytes."""
        size = sum(map(len, parts))
        if ask.lanes and size >= WORTH:
            client.tell(LENGTH, LENGTH_LAYOUT.pack(ask.id, size, sum(map(len, parts[:2]))))
        for last, piece in in_pieces(*parts, most=LONG_PIECE if client.lanes is not None else PIECE):
            client.tell(CONTRIBUTIONS, ASK_ID_LAYOUT.pack(ask.id) + last, piece)
        client.sent += size
        if ask.lanes and client.lanes is None and client.sent >= LANES_FROM:
            client.lanes = LinkLanes(None)
            if offer := client.lanes.offer():
                client.tell(OFFER, msgspec.msgpack.encode(offer["lanes"]))

    def _place(self, client: _Client, ask: Ask, came: dict[int, Contribution]) -> dict[int, Contribution]:
        """Name the contributions in memory that the client maps; return the rest, which is sent."""
        if client.memory is None:
            return came
        rows, rest = [], {}
        for rank, one in came.items():
            if (place := self._segments.lend(one.data, client.memory)) is None:
                rest[rank] = one
            else:
                rows.append((rank, int(one.kind), int(one.data_type), int(one.reduction), one.peer, one.count,
                             one.scalar, *place))
        if rows:
            client.tell(PLACED, ASK_ID_LAYOUT.pack(ask.id), msgspec.msgpack.encode(rows))
        return rest

    def _refill(self, client: _Client, asked: Refill) -> None:
        """Send all contributions kept of a communicator; none where it is not here, or not the asker's."""
        if not 0 <= asked.id < 1 << 64:
            raise Corrupt(f"REFILL {asked.id} on a rank link", reason="id")
        with self._lock:
            shared = self._shared.get(asked.unique)
        if shared is None or client.asker.session not in shared.members:
            return
        for key in self._log.keys(asked.unique):
            if here := self._log.get(asked.unique, key):
                for last, piece in in_pieces(*encode(here)):
                    client.tell(KEPT, KEPT_HEAD_LAYOUT.pack(asked.id, *key) + last, piece)

    def _look_at(self, unique: Unique, key: Key) -> None:
        self._look(lambda ask: (ask.unique, ask.key) == (unique, key))

    def _look(self, which: Callable[[Ask], bool]) -> None:
        with self._lock:
            found = [(client, ask) for client in self._clients for ask in list(client.pending.values()) if which(ask)]
        for client, ask in found:
            self._answer(client, ask)

    def _answer(self, client: _Client, ask: Ask) -> None:
        with self._lock:
            shared = self._shared.get(ask.unique)
            if shared is None or ask.id not in client.pending:
                return  # its communicator may still be made here
            why = "" if client.asker.session in shared.members else \
                f"session {client.asker.session} has no rank of that communicator"
            if any(rank >= len(shared.members) for rank in (*ask.want, *ask.own, *ask.key[:2])):
                why = why or f"the communicator has {len(shared.members)} ranks"
            here = self._log.get(ask.unique, ask.key)
            came = {rank: here[rank] for rank in ask.want if rank in here}
            if came and not why:  # at once: the asker can check that these belong to the same call
                if rest := self._place(client, ask, came):
                    self._send(client, ask, encode(rest))
                ask.want = [rank for rank in ask.want if rank not in came]
            # A contribution that is not held (it was received with others', in KEPT) might be dropped before its use.
            had = self._log.holds(ask.unique, ask.key) and all(rank in here for rank in ask.own)
            if ask.own and not why and (had or shared.taken(ask.key)):
                client.tell(HOLDS, ASK_ID_LAYOUT.pack(ask.id))
                ask.own = []
            if not ask.want and not ask.own:
                del client.pending[ask.id]
                return
            again = not why and not ask.now and not client.asker.replaying and shared.again(ask.key)
            why = why or self._why_never(ask, shared, here)
            if why:
                del client.pending[ask.id]
                client.tell(NEVER, msgspec.msgpack.encode(Never(ask.id, why, again)))

    def _why_never(self, ask: Ask, shared: Shared, here: Mapping[int, object]) -> str:
        if ask.now:
            return f"ranks {[rank for rank in ask.want if rank not in here]} are not kept here either"
        if ask.key[0] >= 0 and ask.own:  # a message to a rank here
            return shared.never(ask.key[1], ask.key)
        return next((why for rank in ask.want if rank not in here and (why := shared.never(rank, ask.key))), "")
