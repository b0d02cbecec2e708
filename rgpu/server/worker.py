"""A worker: the process that holds one session's GPU side.

Started by the node daemon (:mod:`rgpu.server.workers`), it listens on its own
Unix socket and obeys what comes over the channel: attach an agent's socket,
send the session to another worker, receive one, write an image, activate,
resume, forget. It never reads the registry and holds no pool secret. When the
daemon goes it keeps serving, and waits for the daemon's next connection.

Address randomisation is switched off before anything is loaded, so that module
globals land alike in every worker (facts: identical in three runs).
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import structlog

from rgpu.checkpoint import encoders
from rgpu.checkpoint.device import Device
from rgpu.link import effects
from rgpu.link.frames import Handover, SealedConnection
from rgpu.link.logging import configure_logging
from rgpu.link.packets import Channel
from rgpu.migrate.lease_keeper import DeadlinePage
from rgpu.migrate.leases import NODE_SLOT
from rgpu.server import position_page, spare
from rgpu.server.agent_link import AgentLink
from rgpu.server.channel import listen
from rgpu.server.device import hardware
from rgpu.server.limiter import Limiter
from rgpu.server.module_cache import ModuleCache
from rgpu.server.runtime import SessionRuntime
from rgpu.server.same_host import HostMemory
from rgpu.server.worker_tasks import Sending, Tasks
from rgpu.session.effects import Kind
from rgpu.session.errors import Fenced, LinkError, Refused, RgpuError

log = structlog.get_logger(__name__)

ADDR_NO_RANDOMIZE = 0x0040000
#: Why a worker is told to forget a session that lives on: its agent looks for the owner then.
ELSEWHERE = frozenset({"moved", "replaced", "discarded"})
#: How long a worker without daemon and without agent keeps its session.
ORPHAN_SECONDS = 60.0
#: And how long once the program has ended: a restarting daemon may still want to hear of it.
ENDED_SECONDS = 2.0
#: Within which the daemon ends a worker that told of a fault of its device.
FAULT_SECONDS = 60.0
#: How long a worker stays for modules still being written to the node's cache, and for a given up image's remains.
WRITE_SECONDS = 2.0


def without_randomisation() -> bool:
    """Switch address randomisation off for this program and start it again; False if that is forbidden."""
    libc = ctypes.CDLL(None, use_errno=True)
    persona = libc.personality(0xFFFFFFFF)
    if persona & ADDR_NO_RANDOMIZE:
        return True
    if libc.personality(persona | ADDR_NO_RANDOMIZE) == -1:
        return False
    if not libc.personality(0xFFFFFFFF) & ADDR_NO_RANDOMIZE:
        return False
    os.execv(sys.executable, [sys.executable, "-m", "rgpu.server.worker", *sys.argv[1:]])


def make_device(spec: str, memory: int, host: str = "", *, own_stdout: bool = False) -> Device:
    """``cpu:N`` or ``cuda:N``, or several of one kind, ``cuda:N+M``.

    Raises :class:`DeviceError`, :class:`Refused` for another kind. ``own_stdout``: this process's standard output
    may become the device's, for what its kernels print.
    """
    kind, _, listed = spec.partition(":")
    ordinal, *others = [int(number) for number in (listed or "0").split("+")]
    if kind == "cpu":
        from rgpu.server.device.cpu.device import CpuDevice

        return CpuDevice(ordinal, memory=memory, host=host, others=others)
    if kind == "cuda":
        from rgpu.server.device.cuda.device import CudaDevice
        from rgpu.server.device.cuda.printed import CapturedStdout

        return CudaDevice([ordinal, *others], CapturedStdout() if own_stdout else None)
    raise Refused(f"unknown device {spec!r}: use cpu:N, cuda:N or several as cuda:N+M")


def lost(spec: str, device: Device) -> str:
    """Why the driver has lost the device; empty: it has not, or cannot tell."""
    if not spec.startswith("cuda"):
        return ""
    from rgpu.server.device.cuda import nvml

    every = getattr(device, "every_facts", (device.facts,))
    return next((why for one in every if (why := nvml.lost(one.uuid))), "")


def warm(spec: str) -> None:
    """Load what a session's first calls would: for a spare, while nobody waits."""
    if spec.startswith("cpu"):
        from rgpu.server.device.cpu.ptx import jit

        jit.warm()


class Worker:
    """The worker's control side; one thread for each long task."""

    def __init__(self, session: str, epoch: int, device: Device, state: str, spec: str = "", quota: int = 0,
                 modules: ModuleCache | None = None, host: str = "", folder: Path | None = None) -> None:
        """``folder``: of this session's workers on this host; a source may hand its memory over there."""
        self.folder = folder
        self.runtime = SessionRuntime(session, epoch, device)
        self.runtime.effects = effects.open_log("worker", session, host)
        self.runtime.effect(Kind.BEGUN, state)
        self.modules = modules or ModuleCache(Path(os.devnull), 0)
        self.runtime.executor.loaded = self.modules.keep
        self.spec, self.quota = spec, quota
        self.state = state  #: empty | incoming | running | paused | over
        self.channel: Channel | None = None
        self.link: AgentLink | None = None
        self.stats: dict[str, Any] = {}
        self.tasks = Tasks(self)
        self.limiter = Limiter(self.runtime)
        self.host_memory = HostMemory(self.runtime.fast, lambda seq: seq in self.runtime.retained, host)
        self._lock = threading.RLock()
        self._exit = threading.Event()
        self._deadline: DeadlinePage | None = None
        self._detached_since = time.monotonic()
        self._judged: set[int] = set()  #: results that are the program's
        self.runtime.judge = self._judge
        self._program_over = False  #: the agent said so; the daemon, if there is one, has the session ended

    # -- the channel ------------------------------------------------------------
    def serve(self, listener: socket.socket) -> None:
        """Take the daemon's connections, one after the other, until told to exit."""
        while not self._exit.is_set():
            listener.settimeout(1.0)
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                if self._orphaned():
                    log.error("no daemon and no agent for too long: the worker ends", session=self.runtime.session)
                    return
                continue
            sock.setblocking(True)
            channel = Channel(sock)
            if channel.peer()[1] != os.getuid():
                channel.close()
                continue
            self.channel = channel
            self._converse(channel)

    def _orphaned(self) -> bool:
        patience = ENDED_SECONDS if self._program_over else ORPHAN_SECONDS
        return self.link is None and time.monotonic() - self._detached_since > patience

    def _converse(self, channel: Channel) -> None:
        try:
            while not self._exit.is_set():
                message, fds = channel.receive()
                threading.Thread(target=self._handle, args=(channel, message, fds), daemon=True,
                                 name=f"do-{message.get('do')}").start()
        except RgpuError as error:
            log.info("daemon went away", reason=error.message)
        finally:
            self._detached_since = time.monotonic()
            channel.close()

    def _handle(self, channel: Channel, message: dict[str, Any], fds: list[int]) -> None:
        name, number = str(message.pop("do", "")), message.pop("id", None)
        handler = getattr(self, f"do_{name}", None) or getattr(self.tasks, f"do_{name}", None)
        reply: dict[str, Any]
        try:
            if handler is None:
                raise Refused(f"a worker does not know {name!r}")
            sockets = [fds] if name in ("attach", "lane", "receive", "deadline", "checkpoint", "restore") else []
            reply = {"id": number, "ok": handler(*sockets, **message) or {}}
        except RgpuError as error:
            reply = {"id": number, "error": error.as_dict()}
        except Exception as error:  # noqa: BLE001 - the daemon must hear of it
            log.exception("worker task failed", task=name)
            reply = {"id": number, "error": RgpuError(f"{name}: {error}").as_dict()}
        try:
            channel.send(reply)
        except LinkError:
            log.warning("the daemon went before it had its answer", task=name)

    def report(self, event: str, **values: Any) -> None:
        """Tell the daemon; nothing is lost if there is none, it asks when it is back."""
        channel = self.channel
        if channel is not None:
            try:
                channel.send({"event": event, **values})
            except LinkError:
                pass

    # -- the hardware --------------------------------------------------------------
    def _judge(self, result: int) -> None:
        """An error, before the program is told of it. Returns where it is the program's (OWNERSHIP 9).

        Else the worker says nothing more: its daemon ends it, and the session is recovered.
        """
        if result in self._judged:
            return
        why = hardware.fault(result, lambda: lost(self.spec, self.runtime.device))
        if not why:
            self._judged.add(result)
            return
        log.error("the hardware failed", device=self.spec, result=result, reason=why,
                  detail=self.runtime.device.error_detail())
        self.report("fault", pid=os.getpid(), reason=why, result=result)
        time.sleep(FAULT_SECONDS)
        log.error("no daemon ended the worker after its device's fault: it ends")
        end_process()

    # -- the deadline --------------------------------------------------------------
    def do_deadline(self, fds: list[int]) -> None:
        """The daemon's page: until when this node may begin anything (OWNERSHIP 4)."""
        if len(fds) != 1:
            raise LinkError(f"{len(fds)} descriptors came with the deadline instead of one")
        self._deadline = DeadlinePage(fds[0], writable=False)

    def check_deadline(self, what: str) -> None:
        """Nothing begins past the deadline; what runs goes on (OWNERSHIP 3). Raises :class:`Fenced`."""
        if self._deadline is not None and not self._deadline.in_time(NODE_SLOT):
            raise Fenced(f"this node is past its deadline: {what} waits until the registry answers")

    # -- attaching ----------------------------------------------------------------
    def do_attach(self, fds: list[int], handover: bytes) -> None:
        """An authenticated agent's socket."""
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
            encoders.stand_down()  # whatever was there to be restored is there
            link = AgentLink(connection, self.runtime, self._link_report, self.modules, self.host_memory)
            old, self.link = self.link, link
            if old is not None:
                old.close()
            link.start()

    def do_lane(self, fds: list[int], handover: bytes) -> None:
        """A further connection of the agent that is attached."""
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
            self.report("bye", **{key: values[key] for key in ("reason", "exit_code") if key in values})
            self._program_over = True
            return
        elif event == "detached":
            with self._lock:
                if self.link is not None and id(self.link) == values.get("link"):
                    self.link = None
                    self._detached_since = time.monotonic()
        self.report(event, **self.describe())

    def do_describe(self) -> dict[str, Any]:
        return self.describe()

    def describe(self) -> dict[str, Any]:
        """What ``rgpu ps`` and an adopting daemon want to know."""
        runtime = self.runtime
        return {"session": runtime.session, "epoch": runtime.epoch, "state": self.state, "position": runtime.applied,
                "calls": runtime.applied, "memory_bytes": runtime.memory_bytes(), "attached": self.link is not None,
                "error": runtime.executor.error, "error_detail": runtime.device.error_detail(),
                "device": self.spec, "quota": self.quota, "shim_bugs": runtime.executor.bugs,
                "worker_pid": os.getpid(), "stats": self.stats, "pins": runtime.device.pins(),
                "move": self.tasks.progress,
                "modules": self.modules.statistics(), "gpu": self.limiter.describe()}

    def do_limit(self, share: float) -> None:
        """The share (0 to 1) of the device's time that the session may have from now on; 0: any."""
        if not 0.0 <= share <= 1.0:
            raise Refused(f"a share of {share!r} of a device")
        self.limiter.limit(share)

    # -- ownership ------------------------------------------------------------------
    def do_activate(self, epoch: int) -> None:
        """The registry names this worker the owner at ``epoch``."""
        with self._lock:
            if self.state not in ("incoming", "empty", "running"):
                raise Fenced(f"cannot activate: the session is {self.state} here")
            if epoch < self.runtime.epoch:
                raise Fenced(f"cannot activate epoch {epoch} after {self.runtime.epoch}")
            self.tasks.let_go()
            self.runtime.epoch = epoch
            self.state = "running"
            self.runtime.effect(Kind.ACTIVE)

    def do_resume(self, still_open: str = "") -> None:
        """The move was aborted: go on as if nothing had been. A copy for any move but ``still_open`` stops."""
        with self._lock:
            if self.state == "paused":
                self.state = "running"
                self.runtime.effect(Kind.RESUMED)
                self.runtime.resume()
            else:
                self.tasks.call_off(still_open)

    def do_adopt(self, epoch: int) -> None:
        """`rgpu pool adopt` gives this worker what it holds, at a higher epoch: whatever was under way is off."""
        with self._lock:
            if self.state not in ("running", "paused") or epoch <= self.runtime.epoch:
                raise Fenced(f"cannot serve epoch {epoch}: the session is {self.state} here at {self.runtime.epoch}")
            link, self.link = self.link, None
            if link is not None:  # at the epoch that is over: the agent asks for its owner then
                link.notice("moved", reason="adopted")
        if link is not None:
            link.finish()
        self.tasks.call_off("")
        with self._lock:
            self.runtime.epoch = epoch
            if paused := self.state == "paused":
                self.state = "running"
                self.runtime.effect(Kind.RESUMED)
            self.runtime.effect(Kind.ACTIVE)
            if paused:
                self.runtime.resume()

    def offer(self, sending: Sending) -> None:
        """The copy is complete: from here on only the record may say what follows. Raises :class:`Fenced`."""
        with self._lock:
            if self.state != "running" or sending.called_off:
                raise Fenced(f"the move was called off: the session is {self.state} here")
            self.state = "paused"
            self.runtime.effect(Kind.OFFERED)

    def do_forget(self, reason: str) -> None:
        """Another worker owns the session now, or it ended: tell the agent, then exit."""
        with self._lock:
            self.state = "over"
            link, self.link = self.link, None
        self.runtime.effect(Kind.OVER, reason)
        self.tasks.give_way(f"the session is not this worker's any more ({reason})")
        if link is not None:
            link.notice("moved" if reason in ELSEWHERE else "ended", reason=reason)
            link.finish()
        self.runtime.stop()
        # After the answer to this request has left. Device threads may still wait for work that
        # nobody will give them, so the process ends without asking them.
        threading.Timer(0.02, self._end).start()

    def _end(self) -> None:
        until = time.monotonic() + WRITE_SECONDS
        self.modules.flush(WRITE_SECONDS)
        self.tasks.wait_image(until)
        end_process()

    def do_notice(self, kind: str, values: dict[str, Any]) -> None:
        """Pass a notice (cut …) on to the agent, if one is attached."""
        if kind == "cut":
            self.check_deadline("a cut of the journal")
        with self._lock:
            if self.link is not None:
                self.link.notice(kind, **values)


def adopt(fds: list[int], handover: bytes) -> SealedConnection:
    """The sealed connection that the daemon hands over. Raises :class:`LinkError` without exactly one socket."""
    if len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise LinkError(f"{len(fds)} descriptors came with an attachment instead of one")
    return Handover.unpack(handover).connection(socket.socket(fileno=fds[0]))


def since_exec_ms() -> int:
    """How long ago this process began, as its parent waits for it (proc(5): starttime); -1 where it is not told."""
    try:
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return round(1000 * (time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")))
    except (OSError, ValueError, IndexError):
        return -1


def end_process() -> None:
    log.info("worker ends")
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description="internal: one session's worker; started by `rgpu server`")
    parser.add_argument("--session", default="")
    parser.add_argument("--epoch", type=int, default=0)
    parser.add_argument("--device", required=True)
    parser.add_argument("--quota", type=int, default=0)
    parser.add_argument("--spare", metavar="ROOM", help="wait for a session; ROOM is overwritten with its name")
    parser.add_argument("--host", default="")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--state", default="empty")
    parser.add_argument("--module-cache", type=Path, default=Path(os.devnull))
    parser.add_argument("--module-cache-size", type=int, default=0)
    parser.add_argument("--log-level", default="info")
    options = parser.parse_args()
    fixed = without_randomisation()
    configure_logging(level=options.log_level)
    faulthandler.enable()  # a driver that crashes leaves every thread's stack in the worker's log
    structlog.contextvars.bind_contextvars(pid=os.getpid())
    if not fixed:
        log.warning("address randomisation cannot be switched off here: module addresses may differ after a move")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = listen(options.socket)
    began = time.monotonic()
    device = make_device(options.device, options.quota, options.host, own_stdout=True)
    device_ms = round((time.monotonic() - began) * 1000)
    if options.spare:
        warm(options.device)
        found = spare.wait(listener, device)
        if found is None:
            os._exit(0)
        options.session, options.epoch, options.quota, options.state = (found.session, found.epoch, found.quota,
                                                                        found.state)
        options.socket = Path(found.socket)
    structlog.contextvars.bind_contextvars(session=options.session)
    worker = Worker(options.session, options.epoch, device, options.state, options.device, options.quota,
                    ModuleCache(options.module_cache, options.module_cache_size), options.host, options.socket.parent)
    worker.runtime.reached = position_page.writer(position_page.beside(options.socket))
    log.info("worker started", device=options.device, quota=options.quota, epoch=options.epoch,
             spare=bool(options.spare), device_ms=device_ms, since_exec_ms=since_exec_ms())
    worker.serve(listener)
    end_process()


if __name__ == "__main__":
    main()
