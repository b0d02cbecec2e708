"""A worker: the process that holds one session's GPU side.

Started by the node daemon (:mod:`rgpu.server.node.workers.handles`), it listens on its own
Unix socket and carries out the requests that it receives over the channel: attach an agent's socket,
send the session to another worker, receive one, write a checkpoint, activate,
resume, forget. It never reads the registry and holds no pool secret. When the
daemon ends, the worker keeps serving and waits for the daemon's next connection.

Address randomisation is off from its start (:mod:`rgpu.server.address_layout`), so that module globals land alike
in every worker.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from rgpu.checkpoint.codec import encoders
from rgpu.checkpoint.device import Device
from rgpu.link import effects
from rgpu.link.data.frames import Handover
from rgpu.link.local.channel import listen
from rgpu.link.local.promptness import keep_prompt
from rgpu.link.loggers import configure_logging
from rgpu.migrate.membership.lease_keeper import DeadlinePage
from rgpu.migrate.membership.leases import NODE_SLOT
from rgpu.migrate.records.reconcile import EVENTS
from rgpu.server import ended_mark, position_page
from rgpu.server.address_layout import ensure_fixed
from rgpu.server.box import privileges
from rgpu.server.derived import Derived
from rgpu.server.device import mps
from rgpu.server.device.spec import make_device, warm
from rgpu.server.module_cache import ModuleCache
from rgpu.server.worker import warm_worker
from rgpu.server.worker.agent.agent_link import AgentLink
from rgpu.server.worker.agent.same_host import HostMemory
from rgpu.server.worker.apply.runtime import SessionRuntime
from rgpu.server.worker.collectives.ranks import Ranks
from rgpu.server.worker.daemon_link import DaemonLink, end_process
from rgpu.server.worker.entered_box import NO_BOX, SOCKET, EnteredBox
from rgpu.server.worker.handed_over import adopt, exactly, single
from rgpu.server.worker.judging import Judge
from rgpu.server.worker.limiter import Limiter
from rgpu.server.worker.pulse import Pulse
from rgpu.server.worker.sharing.sharing import Sharing
from rgpu.server.worker.tasks import Tasks
from rgpu.session.devices import parts
from rgpu.session.effects import Kind
from rgpu.session.errors import Fenced, Refused, RgpuError

if TYPE_CHECKING:
    from rgpu.server.worker.move.departure import Departure

log = structlog.get_logger(__name__)

#: Reasons of `forget` after which the session lives on elsewhere: its agent then looks for the owner.
ELSEWHERE = frozenset({"moved", "replaced", "discarded"})
#: How long a worker without daemon and without agent keeps its session.
ORPHAN_SECONDS = 60.0
#: The same once the program has ended: a restarting daemon may still read the end of it.
ENDED_SECONDS = 2.0
#: How long an ending worker waits for modules being written to the node's cache and for the removal of an abandoned
#: checkpoint's files.
WRITE_SECONDS = 2.0
#: How long an ending worker waits for its daemon to kill it, where it must not end by itself.
KILL_SECONDS = 10.0
#: An attached agent's host answers each sign of life, every two seconds; after so long it counts as silent.
UNHEARD_SECONDS = 15.0


class Worker:
    """The worker's control side; one thread for each long task."""

    def __init__(self, session: str, epoch: int, device: Device, state: str, spec: str = "", quota: int = 0,
                 modules: ModuleCache | None = None, host: str = "", folder: Path | None = None,
                 box: EnteredBox | None = None) -> None:
        """Make the worker. ``folder``: its own; a source on the same host may hand its memory over there."""
        self.folder, self.box = folder, box or NO_BOX
        self.runtime = SessionRuntime(session, epoch, device)
        self.runtime.effects.log = effects.open_log("worker", session, host)
        self.runtime.effect(Kind.BEGUN, state)
        self.modules = modules or ModuleCache(Path(os.devnull), 0)
        self.runtime.executor.modules.loaded = self.modules.keep
        self.runtime.executor.unfit = self._unfit
        found = getattr(device, "derived", None)
        self.derived: Derived = found if found is not None else Derived()
        self.spec, self.quota = spec, quota
        self.runtime.loop.memory = quota * max(1, len(parts(spec)))
        self.state = state  #: empty | incoming | running | paused | over
        self.daemon = DaemonLink(self.box, self._handler, self._orphaned)
        self.link: AgentLink | None = None
        self._going_back = False
        self.stats: dict[str, Any] = {}
        self.progress: dict[str, Any] = {}  #: of a move under way, as `describe` returns it
        self.ranks = Ranks(session, self.runtime.contributions, lambda peer, linked: self.report(
                               "ranks_dial", pid=os.getpid(), peer=peer, linked=linked, borrows=True),
                           lambda: self.state == "incoming", self._go_back, lambda peer, linked, count: self.report(
                               "ranks_widen", pid=os.getpid(), peer=peer, linked=linked, count=count))
        device.reach_ranks(self.ranks)
        self.runtime.share(Sharing(session, self._ask_for_tie, lambda: self.state != "running" or self.runtime.paused,
                                   self._shares, self._severed))
        self.tasks = Tasks(self)
        self.limiter = Limiter(self.runtime)
        self.host_memory = HostMemory(self.runtime.fast, lambda seq: seq in self.runtime.retained, host)
        self._lock = threading.RLock()
        self._deadline: DeadlinePage | None = None
        self._detached_since = time.monotonic()
        self._left, self.had_agent = since_boot(), False
        self._mps = mps.used(os.environ)
        self.runtime.judge = Judge(spec, device, self.daemon.be_ended, self._mps)
        self._busy_under_mps = False  #: it ends while its kernels run
        self._program_over = False  #: the agent reported it; the daemon, if there is one, ends the session

    # -- the daemon ---------------------------------------------------------------
    def serve(self, listener: socket.socket) -> None:
        """Carry out the daemon's requests until the worker is an orphan: without daemon and agent for too long."""
        runtime = self.runtime
        runtime.pulse = Pulse(lambda seconds: runtime.stood_still("this worker", seconds), runtime.order.look)
        runtime.pulse.start()
        self.daemon.serve(listener)

    def _handler(self, name: str) -> Callable[..., Any] | None:
        return getattr(self, name, None) or getattr(self.tasks, name, None)

    def _orphaned(self, since: float) -> bool:
        patience = ENDED_SECONDS if self._program_over else ORPHAN_SECONDS
        return self.link is None and time.monotonic() - max(since, self._detached_since) > patience

    def report(self, event: str, **values: Any) -> None:
        """Send the daemon an event, if there is a daemon."""
        self.daemon.report(event, **values)

    # -- the deadline --------------------------------------------------------------
    def do_deadline(self, fds: list[int]) -> None:
        """Map the daemon's page that holds the time until which this node may begin anything (OWNERSHIP 4)."""
        self._deadline = DeadlinePage(single(fds, "the deadline"), writable=False)

    def do_derived(self, fds: list[int]) -> None:
        """Use the derived file of this session's user."""
        self.derived.adopt(single(fds, "the derived file"))

    def check_deadline(self, what: str) -> None:
        """Refuse ``what`` past the deadline; work under way goes on (OWNERSHIP 3). Raises :class:`Fenced`."""
        if self._deadline is not None and not self._deadline.in_time(NODE_SLOT):
            raise Fenced(f"this node is past its deadline: {what} waits until the registry answers")

    # -- attaching ----------------------------------------------------------------
    def do_attach(self, fds: list[int], handover: bytes) -> None:
        """Attach an agent: the daemon hands over its authenticated socket. Raises :class:`Fenced`."""
        connection = adopt(fds, handover)
        with self._lock:
            try:
                self.check_deadline("an attachment")
            except Fenced:
                connection.close()
                raise
            if self.state not in ("running", "paused"):
                connection.close()
                raise Fenced(f"the session is {self.state} here")
            encoders.stand_down()  # nothing is left to be restored
            link = AgentLink(connection, self.runtime, self._link_report, self.modules, self.host_memory)
            old, self.link, self.had_agent = self.link, link, True
            if old is not None:
                old.close()
            link.start()
            for peer in self.runtime.sharing.peers:
                link.notice("shared", peer=peer)

    def do_lane(self, fds: list[int], handover: bytes) -> None:
        """Add a further connection of the attached agent. Raises :class:`RgpuError`."""
        connection = adopt(fds, handover)
        with self._lock:
            link = self.link
        try:
            if link is None:
                raise Fenced("no agent is attached here")
            link.add_lane(connection)
        except RgpuError:
            connection.close()
            raise

    def _link_report(self, event: str, values: dict[str, Any]) -> None:
        if event == "stats":
            self.stats = values
        elif event == "bye":
            self.stats = values.get("statistics") or self.stats
            self._program_over = True
            ended_mark.write(self.folder, self.runtime.epoch, str(values.get("reason") or ""))
            self.report("bye", **{key: values[key] for key in ("reason", "exit_code") if key in values})
            return
        elif event == "detached":
            with self._lock:
                if self.link is not None and id(self.link) == values.get("link"):
                    self.link = None
                    self._detached_since, self._left = time.monotonic(), since_boot()
        self.report(event, **self.describe())

    def do_describe(self) -> dict[str, Any]:
        """Answer the request `describe`: see :meth:`describe`."""
        return self.describe()

    def silent(self) -> float:
        """Return the seconds since the agent's host last answered; 0 while it does.

        The host of a program that is only paused still answers. A host that lost its power closes no connection: its
        system acknowledges nothing any more.
        """
        with self._lock:
            link, left = self.link, self._left
        if link is None:
            return since_boot() - left
        unheard = link.connection.unheard()
        return unheard if unheard >= UNHEARD_SECONDS else 0.0

    def describe(self) -> dict[str, Any]:
        """Return the worker's state, as ``rgpu ps`` shows it and as a daemon reads it that takes this worker over."""
        runtime = self.runtime
        return {"session": runtime.session, "epoch": runtime.epoch, "state": self.state, "position": runtime.applied,
                "calls": runtime.applied, "memory_bytes": runtime.memory_bytes(), "attached": self.link is not None,
                "silent_s": self.silent(), "had_agent": self.had_agent,
                "error": runtime.executor.error, "error_detail": runtime.device.error_detail(),
                "device": self.spec, "quota": self.quota, "shim_bugs": runtime.executor.bugs,
                "worker_pid": os.getpid(), "stats": self.stats, "pins": runtime.pins(),
                "sharing": runtime.sharing.describe(),
                "communicators": runtime.device.communicators(), "ranks": self.ranks.describe(),
                "peers": runtime.given.peers(),
                "move": self.progress, "catch_up": runtime.order.describe(),
                "modules": {**self.modules.statistics(), "loads": runtime.executor.modules.figures.as_dict(),
                            "derived": self.derived.statistics()},
                "gpu": self.limiter.describe(), "box": list(self.box.walls), "mps": self._mps}

    # -- ranks of communicators ---------------------------------------------------------
    def do_ranks_link(self, fds: list[int], peer: str, epoch: int, ticket: bytes, secret: bytes, lent: bytes = b""
                      ) -> None:
        """Link to the session ``peer``, with which this one shares a communicator, over a socket to its node's port.

        ``lent``: the number of a rank memory socket, whose descriptor then follows in ``fds``.
        """
        link, *lending = exactly(1 + bool(lent), fds, "a rank link")
        self.ranks.link(link, peer, epoch, ticket, secret, (lent, lending[0]) if lent else None)

    def do_ranks_widen(self, fds: list[int], peer: str, grants: list[list[bytes]]) -> None:
        """Use further sockets to the port of the node of ``peer`` for long contributions."""
        self.ranks.widen(exactly(len(grants), fds, "lanes of a rank link"), peer, grants)

    def do_ranks_lend(self, fds: list[int], number: bytes) -> None:
        """Lend memory over this socket to a worker of this node that requests this session's contributions."""
        self.ranks.lend(number, single(fds, "a rank memory socket"))

    def do_ranks_serve(self, fds: list[int], handover: bytes) -> None:
        """Serve the authenticated socket of a worker whose session has ranks in one of this one's communicators."""
        self.ranks.serve(adopt(fds, handover), Handover.unpack(handover).agent)

    def do_ranks_gone(self, peer: str, reason: str) -> None:
        """Note that the session ``peer`` is over, or is not this user's."""
        self.ranks.gone(peer, reason)

    # -- memory that several sessions share -------------------------------------------------
    def _ask_for_tie(self, number: int, token: bytes) -> bool:
        """Have the daemon open a tie to the session that made the token. Return whether there is a daemon."""
        if self.state != "running":
            raise Refused(f"the session is {self.state} here")
        if not self.daemon.known:
            return False
        self.report("share_open", pid=os.getpid(), number=number, token=token)
        return True

    def do_share_serve(self, fds: list[int], peer: str) -> None:
        """Serve one end of a tie: the worker of ``peer``, a session of the same user, opens something of this one's."""
        self.runtime.sharing.serve(single(fds, "a tie"), peer)

    def do_share_link(self, fds: list[int], number: int, peer: str) -> None:
        """Take the opening end of a tie, which was requested by ``number``."""
        self.runtime.sharing.linked(single(fds, "a tie"), number, peer)

    def do_share_denied(self, number: int, reason: str) -> None:
        """Note that the tie requested by ``number`` is denied to this session."""
        self.runtime.sharing.denied(number, reason)

    def _shares(self, peer: str) -> None:
        """Notify the agent that no journal can restore the session from here on: it need not keep one."""
        log.info("memory or an event is shared with another session", peer=peer)
        with self._lock:
            if self.link is not None:
                self.link.notice("shared", peer=peer)

    def _go_back(self, why: str) -> None:
        """End this worker: another member of a gang replays and needs contributions that this one no longer keeps.

        The session begins again at its checkpoint, and its journal produces them again.
        """
        if self.state != "running" or self._going_back:
            return
        self._going_back = True
        log.warning("the worker ends, and its session begins again at its checkpoint", reason=why)
        threading.Thread(target=self.daemon.be_ended, args=("goes_back", why), daemon=True).start()

    def _unfit(self, why: str) -> None:
        """End this worker: a replay cannot provide something that the program holds, such as a variable's address.

        The next worker may get it: its device, the driver's history and the neighbours differ. A move's destination
        refuses the move instead.
        """
        if self.state != "running":
            return
        log.error("this worker cannot become the session", reason=why)
        self.daemon.be_ended("unfit", why)

    def _severed(self, peer: str) -> None:
        """End this worker: what session ``peer`` wrote is lost with its worker, so no consistent state is left here."""
        self.daemon.be_ended("severed", f"it shared device memory with session {peer}, whose worker was lost",
                             peer=peer)

    def do_limit(self, share: float) -> None:
        """Limit the session to a share (0 to 1) of the device's time from now on; 0: no limit. Raises :class:`Refused`.
        """
        if not 0.0 <= share <= 1.0:
            raise Refused(f"a share of {share!r} of a device")
        self.limiter.limit(share)

    # -- ownership ------------------------------------------------------------------
    def do_activate(self, epoch: int) -> None:
        """Begin to serve: the registry names this worker the owner at ``epoch``. Raises :class:`Fenced`."""
        if epoch < self.runtime.epoch:
            raise Fenced(f"cannot activate epoch {epoch} after {self.runtime.epoch}")
        arriving = self.tasks.arriving
        if self.state != "incoming":
            self.own(epoch)
        elif arriving is None or not arriving.tell(EVENTS["activate"], found=epoch):
            said = f"its move is {arriving.role.state}" if arriving else "nothing has come"
            raise Fenced(f"cannot activate: no whole session is here; {said}")

    def own(self, epoch: int) -> None:
        """Serve the session at ``epoch`` from now on. Raises :class:`Fenced`."""
        with self._lock:
            if self.state not in ("incoming", "empty", "running"):
                raise Fenced(f"cannot activate: the session is {self.state} here")
            self.tasks.let_go()
            self.runtime.epoch = epoch
            self.state = "running"
            self._left = since_boot()
            self.runtime.effect(Kind.ACTIVE)
        self.ranks.owned()

    def do_resume(self, still_open: str = "") -> None:
        """Go on as before: the move was aborted. A copy for any move but ``still_open`` stops."""
        self.tasks.call_off(still_open, "the record says so")

    def go_on(self) -> None:
        """Apply calls again: the move is aborted. Undoes :meth:`offer` and the pause before it."""
        with self._lock:
            if self.state == "paused":
                self.state = "running"
                self.runtime.effect(Kind.RESUMED)
        self.runtime.resume()

    def do_adopt(self, epoch: int) -> None:
        """Serve the session that is here at a higher epoch, as `rgpu pool adopt` says; moves under way are aborted.

        Raises :class:`Fenced`.
        """
        with self._lock:
            if self.state not in ("running", "paused") or epoch <= self.runtime.epoch:
                raise Fenced(f"cannot serve epoch {epoch}: the session is {self.state} here at {self.runtime.epoch}")
            link, self.link = self.link, None
            if link is not None:  # at the epoch that is over: the agent then looks for the owner
                link.notice("moved", reason="adopted")
        if link is not None:
            link.finish()
        with self._lock:
            self.runtime.epoch = epoch
        self.tasks.call_off("", "the session was given to this worker by an operator")
        if self.tasks.leaving is None and self.state == "paused":
            self.go_on()
        with self._lock:
            self.runtime.effect(Kind.ACTIVE)

    def offer(self, leaving: Departure) -> None:
        """Pause the session: the copy is complete, and only its record decides what follows. Raises :class:`Fenced`."""
        with self._lock:
            if self.state != "running" or leaving.called_off:
                raise Fenced(f"the move was called off: the session is {self.state} here")
            self.state = "paused"
            self.runtime.effect(Kind.OFFERED)

    def do_forget(self, reason: str) -> None:
        """Leave the session, which ended or has another owner; through this worker's role in a move, if it has one."""
        leaving, arriving = self.tasks.leaving, self.tasks.arriving
        told = leaving is not None and leaving.tell(EVENTS["forget"], reason)
        told = told or (arriving is not None and arriving.tell(EVENTS["discard"], reason))
        if not told:
            self.leave(reason)

    def leave(self, reason: str) -> None:
        """Notify the agent, then exit."""
        with self._lock:
            self.state = "over"
            link, self.link = self.link, None
        self.runtime.effect(Kind.OVER, reason)
        if reason not in ELSEWHERE:
            self.runtime.sharing.over()
        self.tasks.give_way(f"the session is not this worker's any more ({reason})")
        if link is not None:
            link.notice("moved" if reason in ELSEWHERE else "ended", reason=reason)
            link.finish()
        self._busy_under_mps = self._mps and bool(self.runtime.device.progress()[0])
        self.runtime.stop()
        # After the answer to this request has been sent. Device threads may still wait for work that
        # will not arrive, so the process ends without joining them.
        threading.Timer(0.02, self._end).start()

    def _end(self) -> None:
        until = time.monotonic() + WRITE_SECONDS
        self.modules.flush(WRITE_SECONDS)
        self.derived.flush(until - time.monotonic())
        self.tasks.wait_checkpoint(until)
        if self._busy_under_mps:  # the daemon takes this process off the server before it kills it
            time.sleep(KILL_SECONDS)
        end_process()

    def do_notice(self, kind: str, values: dict[str, Any]) -> None:
        """Pass a notice (cut …) on to the agent, if one is attached."""
        if kind == "cut":
            self.check_deadline("a cut of the journal")
            self.ranks.passed(int(values.get("position") or 0))
            self.runtime.given.cut(int(values.get("position") or 0))
        with self._lock:
            if self.link is not None:
                self.link.notice(kind, **values)


def since_boot() -> float:
    """Return the seconds since boot; they go on while this process is frozen and while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def since_exec_ms() -> int:
    """Return how many ms ago this process began (proc(5): starttime), which its parent waits for; -1: unknown."""
    try:
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return round(1000 * (time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")))
    except (OSError, ValueError, IndexError):
        return -1


def main() -> None:
    """Run a worker until its daemon or its session ends it."""
    parser = argparse.ArgumentParser(description="internal: one session's worker; started by `rgpu server`")
    parser.add_argument("--session", default="")
    parser.add_argument("--epoch", type=int, default=0)
    parser.add_argument("--device", required=True)
    parser.add_argument("--quota", type=int, default=0)
    parser.add_argument("--host-memory", type=int, default=0)
    parser.add_argument("--spare", metavar="ROOM", help="wait for a session; ROOM is overwritten with its name")
    parser.add_argument("--host", default="")
    parser.add_argument("--socket", type=Path, required=True, help="where the daemon connects to")
    parser.add_argument("--home", type=Path, help="this worker's own folder, where it listens; --socket leads there")
    parser.add_argument("--state", default="empty")
    parser.add_argument("--module-cache", type=Path, default=Path(os.devnull))
    parser.add_argument("--module-cache-size", type=int, default=0)
    parser.add_argument("--log-level", default="info")
    options = parser.parse_args()
    box = EnteredBox.from_environment(os.environ)
    fixed = ensure_fixed("rgpu.server.worker.main", sys.argv[1:])
    configure_logging(level=options.log_level)
    faulthandler.enable()  # a driver that crashes leaves every thread's stack in the worker's log
    faulthandler.register(signal.SIGUSR1)  # and so does `kill -USR1`, for a worker that makes no progress
    structlog.contextvars.bind_contextvars(pid=os.getpid())
    if not fixed:
        log.warning("address randomisation cannot be switched off here: module addresses may differ after a move")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    privileges.hide_memory()
    home = options.home or options.socket.parent
    listener = listen(options.home / SOCKET if options.home else options.socket)
    began = time.monotonic()
    device = make_device(options.device, options.quota, options.host, own_stdout=True)
    limit_host = getattr(device, "limit_host", None)
    if limit_host is not None:
        limit_host(options.host_memory)
    device_ms = round((time.monotonic() - began) * 1000)
    keep_prompt()
    if options.spare:
        warm(options.device)
        found = warm_worker.wait(listener, device, box)
        if found is None:
            os._exit(0)
        options.session, options.epoch, options.quota, options.state = (found.session, found.epoch, found.quota,
                                                                        found.state)
    structlog.contextvars.bind_contextvars(session=options.session)
    worker = Worker(options.session, options.epoch, device, options.state, options.device, options.quota,
                    ModuleCache(options.module_cache, options.module_cache_size), options.host, home, box)
    worker.runtime.keep_place(position_page.PositionPage(position_page.beside(
        home / SOCKET if options.home else options.socket)))
    log.info("worker started", device=options.device, quota=options.quota, epoch=options.epoch,
             spare=bool(options.spare), device_ms=device_ms, since_exec_ms=since_exec_ms())
    worker.serve(listener)
    end_process()


if __name__ == "__main__":
    main()
