"""The worker's end of the data link to the agent: calls in; answers and watermarks out (:mod:`.answer_sender`).

One thread receives and applies; one sends. A program that waits for an answer has sent
nothing behind its call: with a native path the receiving thread then polls for the
answer for a short time and sends it itself, so that no thread has to be woken.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from rgpu.link import versions
from rgpu.link.data.frames import SealedConnection
from rgpu.link.data.published import Clocks, Issued, Ping, pong
from rgpu.link.data.sealing import BULK
from rgpu.link.messages.data import (
    AREA_LAYOUT,
    AREA_READY,
    ATTACH,
    ATTACHED,
    BYE,
    CALLS,
    CALLS_AT,
    CALLS_REF,
    HAVE,
    ISSUED,
    LANED,
    LANES,
    PING,
    PONG,
    PRINTED,
    STATS,
)
from rgpu.server.module_cache import ModuleCache
from rgpu.server.worker.agent.answer_sender import AnswerSender
from rgpu.server.worker.agent.link_lanes import LinkLanes
from rgpu.server.worker.agent.module_stream import ModuleStream
from rgpu.server.worker.agent.rounds import Rounds
from rgpu.server.worker.agent.same_host import Door, HostMemory
from rgpu.server.worker.apply.ordering import GAP, LATE
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.server.worker.exchange.library import Exchange
from rgpu.session.errors import Corrupt, Fenced, RgpuError, TimedOut, VersionMismatch
from rgpu.session.journal import issue_order
from rgpu.session.objects.module_table import GlobalVariable

log = structlog.get_logger(__name__)

DRY_SECONDS = 0.02  #: time without anything to read after which a shipping agent has no calls left

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode

#: (event, values): attached, detached, stats, bye
Report = Callable[[str, dict[str, Any]], None]


class AgentLink:
    """See the module docstring. ``report`` is called from the link's threads."""

    def __init__(self, connection: SealedConnection, runtime: SessionRuntime, report: Report,
                 modules: ModuleCache | None = None, host: HostMemory | None = None) -> None:
        """Make the link. ``host``: memory that may be shared with an agent on this host; None: none."""
        self.connection = connection
        self.runtime = runtime
        self.report = report
        self._lanes = LinkLanes(runtime.fast)
        self._sender = AnswerSender(connection, runtime, self._lanes)
        self._stream = ModuleStream(modules, self._sender.send_raw)
        self._host = host
        self._asked: Any = None  #: identity of the agent's host, from ATTACH
        self._door: Door | None = None
        self._printed: int | None = None  #: bytes of printed text that the agent has; None: it takes none
        #: Messages read ahead, in order: (type, body, the bytes of records that it stands for). The agent's journal
        #: bounds their size: the agent ships no call that its journal does not hold.
        self._ahead: deque[tuple[int, Any, Any]] = deque()
        self._clocks = Clocks()
        self._waited = runtime.waited  #: when the last PING arrived
        self._rounds: Rounds | None = None
        self._receiver = threading.Thread(target=self._receive, name="agent-link", daemon=True)

    def start(self) -> None:
        """Begin to receive."""
        self._receiver.start()

    # -- receiving ----------------------------------------------------------------
    def _receive(self) -> None:
        reason, feeding = "the connection ended", False
        try:
            self._check_attach()
            self.runtime.take_over()
            feeding = True
            self.runtime.executor.modules.travelled = self._stream.travelled
            self._attach()
            self._sender.start()
            feed, stream = self.runtime.open_stream(), self._stream
            if self.runtime.fast is not None:
                self.runtime.fast.share_area(False)  # until this agent has mapped it
            self.runtime.loop.read_ahead = self._read_ahead
            order = self.runtime.order
            order.queued = self._read_already
            fast = self.runtime.fast
            room, drop = (None, None) if fast is None else (fast.room, fast.give)
            answered = False
            self._rounds = self._short_rounds()
            while True:
                if self._rounds is not None and self._rounds.step():
                    continue
                if answered and fast is not None and not self._ahead and not self.connection.opener.pending:
                    self._sender.look_for_more(fast)
                answered = False
                if order.catching_up and not self._more():
                    order.feed(issue_order.Dry(*self.runtime.reach()))
                kind, body, data = self._ahead.popleft() if self._ahead else \
                    (*self.connection.recv(room=room, drop=drop), None)
                if kind == LANED:
                    kind, body = self._lanes.message(body)
                self.runtime.look()
                if kind in (CALLS, CALLS_REF, CALLS_AT):
                    awaiting = 0
                    try:
                        for part in self._parts(kind, body) if data is None else (data,):
                            awaiting = self.runtime.applying(feed, part)
                    finally:
                        self._give_back(body)
                    if awaiting and fast is not None and not self._ahead and not self.connection.opener.pending:
                        answered = self._sender.answer_here(fast)
                        if self._rounds is not None:
                            self._rounds.answered()
                elif kind == PING:
                    if not stream.waiting:  # else the calls ahead of it were dropped; the agent sends it again
                        self._pinged(Ping.unpack(body))
                        # A watermark follows, for which the agent may wait before it frees shared memory: calls that
                        # completed before their position was known are in no watermark yet.
                        self._sender.progressed()
                elif kind == ISSUED:
                    self._issued(Issued.unpack(body))
                elif kind == PRINTED:
                    self._confirmed(body)
                elif kind == HAVE:
                    stream.have(body)
                elif kind == AREA_READY:
                    self._use_area(body)
                elif kind == LANES:
                    self._lanes.use(body)
                elif kind == STATS:
                    self.report("stats", _map(body))
                elif kind == BYE:
                    self.report("bye", _map(body))
                    return
                else:
                    raise Corrupt(f"unknown message type {kind} from the agent", type=kind, reason="type")
        except RgpuError as error:
            reason = error.message
            log.info("agent link ended", session=self.runtime.session, error=error.code, reason=reason)
        except Exception as error:  # noqa: BLE001 - one bad peer must not end the worker
            reason = str(error)
            log.exception("agent link failed", session=self.runtime.session)
        finally:
            if self._rounds is not None:
                self._rounds.close()
            for _, ahead, _ in self._ahead:
                self._give_back(ahead)
            if feeding:
                self.runtime.loop.read_ahead = None
                self.runtime.order.queued = tuple
                self.runtime.hand_back()
            self.close()
            self.report("detached", {"reason": reason, "link": id(self)})

    def _short_rounds(self) -> Rounds | None:
        """Return what passes short calls and answers on in compiled code; None where that is not possible here."""
        fast = self.runtime.fast
        exchange = None if fast is None else Exchange.open(self.connection, fast.functions())
        if fast is None or exchange is None:
            return None
        return Rounds(self.connection, self.runtime, fast, self._sender, self._stream, self._clocks, exchange,
                      self._door, lambda: bool(self._ahead))

    def _more(self) -> bool:
        """Whether another message has arrived, or arrives within :data:`DRY_SECONDS`."""
        if self._ahead or self.connection.opener.pending:
            return True
        poller = select.poll()
        try:
            poller.register(self.connection.fileno(), select.POLLIN)
        except ValueError:
            return True  # it was closed: the next receive fails
        return bool(poller.poll(DRY_SECONDS * 1000))

    def _pinged(self, ping: Ping) -> None:
        """Answer with the worker's position, and note the program's."""
        runtime, distance = self.runtime, self.runtime.order.distance
        if ping.published is not None:
            distance.tell(ping.usual)
        self._sender.send_raw(PONG, pong(ping.shipped, distance.usual))
        if ping.published is None:
            return
        late = self._clocks.late(time.monotonic_ns(), ping.sent) / 1e9
        waited, self._waited = runtime.waited - self._waited, runtime.waited
        if ping.stood or late - waited > GAP:  # while it waits for the device, this side receives nothing
            runtime.stood_still("the program's agent" if ping.stood else "the link", max(late, GAP))
        runtime.order.feed(issue_order.Told(*runtime.reach(), ping.published, distance.usual, late))

    def _issued(self, issued: Issued) -> None:
        """Check whether the calls that follow arrive later than the program issued them."""
        order, late = self.runtime.order, self._clocks.late(time.monotonic_ns(), issued.sent)
        usual = order.distance.usual
        late_calls = (late + issued.sent - issued.since) / 1e9
        if late_calls > LATE:
            order.late(self.runtime.applied, late_calls, usual)
        elif order.catching_up:
            order.feed(issue_order.Told(*self.runtime.reach(), issued.published, usual, late / 1e9))

    def _read_already(self) -> list[Any]:
        """Return the records that were read ahead and not fed yet."""
        return [data for _, _, data in self._ahead if data is not None]

    def _read_ahead(self, seconds: float) -> Any:
        """Receive a message while a call waits. Return its records, for inspection only: they are fed later."""
        try:
            kind, body = self.connection.recv(seconds)
        except TimedOut:
            return b""
        if kind == LANED:
            kind, body = self._lanes.message(body)
        if kind == PRINTED:  # the call may wait for this message
            self._confirmed(body)
            return b""
        if kind == LANES:  # the messages that follow may come over them
            self._lanes.use(body)
            return b""
        if kind not in (CALLS, CALLS_REF, CALLS_AT):
            self._ahead.append((kind, body, None))
            return b""
        parts = self._parts(kind, body)
        if not parts:
            self._give_back(body)
            return b""  # it was dropped, and is sent again
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self._ahead.append((kind, body, data))
        return data

    def _give_back(self, body: Any) -> None:
        """Free the memory of a message that was fed or dropped, if it is the engine's."""
        if self.runtime.fast is not None and len(body) >= BULK - 1:
            self.runtime.fast.give(body)

    def _parts(self, kind: int, body: Any) -> tuple[Any, ...]:
        """Return the bytes of records that a message contains or names; none where it is to be dropped."""
        if kind != CALLS_AT:
            data = self._stream.take(kind, body)
            return () if data is None else (data,)
        if self._door is None:
            raise Corrupt("a place in shared memory, where none is shared", reason="place")
        offset, before, payload = self._door.place(body)
        return (before, payload) if self._stream.take_placed(offset, len(before) + len(payload)) else ()

    def _use_area(self, body: Any) -> None:
        area = self._host.area if self._host is not None and self._door is not None else None
        if area is None or len(body) != AREA_LAYOUT.size or AREA_LAYOUT.unpack(body)[0] != area.number:
            raise Corrupt("the agent has mapped an area that it was not given", reason="area")
        self._sender.area = area
        if self.runtime.fast is not None:
            self.runtime.fast.share_area(True)

    def _confirmed(self, body: Any) -> None:
        if len(body) != 8:
            raise Corrupt(f"a count of printed text has {len(body)} bytes", reason="printed text")
        self.runtime.text.confirm(self._sender, int.from_bytes(body, "little"))

    def _check_attach(self) -> None:
        kind, body = self.connection.recv()
        if kind != ATTACH:
            raise Corrupt(f"the first message is of type {kind}, not ATTACH", reason="protocol")
        request = _map(body)
        try:
            versions.check(request.get("versions"), "the client")
        except VersionMismatch as error:
            self.connection.send(ATTACHED, _encode({"refused": error.as_dict()}))
            raise
        if request.get("session") != self.runtime.session or request.get("epoch") != self.runtime.epoch:
            raise Fenced(f"attach for {request.get('session')} epoch {request.get('epoch')}; here is "
                         f"{self.runtime.session} epoch {self.runtime.epoch}")
        self._asked = request.get("host")
        usual = request.get("usual")
        if type(usual) is int and usual >= 0:
            self.runtime.order.distance.tell(usual)
        published = request.get("delivered")
        self._sender.published = published if isinstance(published, int) else 0
        self.runtime.order.distance.earlier |= self._sender.published > 0
        self.runtime.executor.modules.places = _placements(request.get("variables"))
        printed = request.get("printed")
        self._printed = printed if type(printed) is int and 0 <= printed < 1 << 63 else None

    def _attach(self) -> None:
        self.connection.send(ATTACHED, _encode({"epoch": self.runtime.epoch, "next": self.runtime.applied + 1,
                                                "state": "running", "versions": versions.ours(), **self._invite()}))
        sender = self._sender
        self.runtime.text.attach(sender, self._printed, sender.progressed)
        for seq, result, reply, payload in self.runtime.attach(sender.deliver, sender.published):
            sender.deliver(seq, result, reply, payload)
        if self.runtime.fast is None:
            self.runtime.device.on_progress(sender.progressed)
        sender.progressed()
        self.report("attached", {"link": id(self)})

    def _invite(self) -> dict[str, Any]:
        """Return the fields of ATTACHED about lanes and shared memory."""
        if self._host is None:
            return self._lanes.offer()
        said: dict[str, Any] = {"worker": self._host.worker, **self._lanes.offer()}
        found = self._host.invite(self._asked)
        if isinstance(found, str):
            said["shared"] = {"refused": found}
        elif found is not None:
            self._door = found
            found.start()
            said["shared"] = found.offer.as_dict()
            if self._sender.closed:
                found.close()
        return said

    # -- life ---------------------------------------------------------------------
    def finish(self, timeout: float = 1.0) -> None:
        """Send what is queued, then close."""
        self._sender.finish(timeout)
        self.close()

    def notice(self, kind: str, **values: Any) -> None:
        """Queue a notice to the agent about the session: its kind (cut, moved, ended, …) and its values."""
        self._sender.notice(kind, **values)

    def close(self) -> None:
        """Close the link; the session stays, for the next link."""
        self._sender.close()
        self.runtime.detach(self._sender.deliver)
        self.connection.close()
        self._lanes.close()
        if self._door is not None:
            self._door.close()

    def add_lane(self, connection: SealedConnection) -> None:
        """Add a further connection of this attachment's agent. Raises :class:`RgpuError`; the caller then closes it."""
        self._lanes.add(connection)


def _placements(rows: Any) -> dict[int, tuple[GlobalVariable, ...]]:
    """Return the addresses of variables by the position of the module's load (docs/protocols/data.md, ATTACH).

    An older agent sends none.

    Raises :class:`Corrupt`.
    """
    try:
        told = msgspec.convert([] if rows is None else rows, list[tuple[int, list[tuple[str, int, int]]]])
    except msgspec.ValidationError as error:
        raise Corrupt(f"variables of ATTACH: {error}", reason="variables") from None
    return {seq: tuple(GlobalVariable(*variable) for variable in variables) for seq, variables in told}


def _map(body: Any) -> dict[str, Any]:
    try:
        value = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corrupt(f"a message from the agent is no msgpack: {error}", reason="msgpack") from error
    if not isinstance(value, dict):
        raise Corrupt("a message from the agent is no map", reason="msgpack")
    return value
