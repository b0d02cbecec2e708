"""The planners' view of the pool, kept between plans: the same as ``adapter.view``, updated from the changes.

While a request waits, the leader plans every second. A session's entry depends on its
record, on whether it may be moved, and on the hosts; where none of these changed, it is reused,
and the index is updated by the changed sessions. When a host changed, everything is made anew.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from rgpu.migrate.records.schema import NodeRecord, SessionRecord
from rgpu.migrate.scheduling.adapter import Demands, View, pool_of, reserved_places, session_places, stays
from rgpu.migrate.scheduling.following.followed import differences
from rgpu.migrate.scheduling.index import Index, build
from rgpu.migrate.scheduling.mix import share_mix
from rgpu.migrate.scheduling.placement import Claim, Snapshot, claims_of
from rgpu.migrate.scheduling.shares import Shares
from rgpu.migrate.scheduling.snapshot import Placed


class Views:
    """Cache of the view, one for each leader; :meth:`view` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begin(())

    def _begin(self, nodes: tuple[NodeRecord, ...]) -> None:
        self._nodes = nodes
        self._demands = Demands(nodes)
        self._sessions: tuple[SessionRecord, ...] = ()
        self._pinned: Mapping[str, str] = {}
        self._placed: dict[str, list[Placed]] = {}  #: session: its places in the planners' form
        self._claimed: dict[str, list[Claim]] = {}
        self._reserved: list[Placed] = []
        self._shares = Shares()
        for node in nodes:
            self._shares.devices(node, 1)
        self._shares.settled()
        self._index: Index = build(pool_of(nodes), share_mix(self._shares.counts))

    def view(self, snapshot: Snapshot, pinned: Mapping[str, str]) -> View:
        """Return the pool for a planner. ``pinned``: sessions that cannot be moved, and why."""
        with self._lock:
            try:
                if snapshot.nodes != self._nodes:
                    self._begin(snapshot.nodes)
                self._follow(snapshot, pinned)
                return self._made(snapshot)
            except BaseException:
                self._begin(())  # an incomplete update is discarded
                raise

    def _follow(self, snapshot: Snapshot, pinned: Mapping[str, str]) -> None:
        gone, come = differences(self._sessions, snapshot.sessions)
        records = {session.name: session for session in come}
        for session in gone:
            self._shares.add(session, -1)
            self._drop(session.name)
        for session in come:
            self._shares.add(session, 1)
        if pinned != self._pinned:
            touched = {name for name in pinned.keys() | self._pinned.keys()
                       if pinned.get(name) != self._pinned.get(name)}
            for session in snapshot.sessions:
                if session.name in touched and session.name not in records:
                    records[session.name] = session
                    self._drop(session.name)
        for session in records.values():
            self._put(session, pinned.get(session.name) or stays(session, self._demands.nodes.get(str(session.owner))))
        self._sessions, self._pinned = snapshot.sessions, dict(pinned)
        self._count(self._reserved, -1)
        claimed = {(claim.session, claim.host, claim.device) for name in {one.session for one in snapshot.reserved}
                   for claim in self._claimed.get(name, ())}
        self._reserved = reserved_places(self._demands, snapshot.reserved, claimed)
        self._count(self._reserved, 1)

    def _put(self, session: SessionRecord, why: str) -> None:
        claims = claims_of(session)
        if claims:
            self._claimed[session.name] = claims
            self._placed[session.name] = session_places(self._demands, session, claims, why)
            self._count(self._placed[session.name], 1)

    def _drop(self, name: str) -> None:
        self._claimed.pop(name, None)
        self._count(self._placed.pop(name, ()), -1)

    def _count(self, placed: Iterable[Placed], sign: int) -> None:
        for one in placed:
            if sign > 0:
                self._index.take(one, check=False)
            else:
                self._index.give(one)

    def _made(self, snapshot: Snapshot) -> View:
        self._index.changed.clear()  # no scores are cached on this index: planners use copies
        index = self._index.copy()
        index.mix = share_mix(self._shares.counts)
        placed = [one for session in snapshot.sessions for one in self._placed.get(session.name, ())]
        return View(snapshot, index, (*placed, *self._reserved), self._demands)
