"""The agent: a private socket for the program's processes, one session for each that connects.

Sessions are named NAME, NAME/2, NAME/3 … in the order in which the processes
first use CUDA; the first one may be made before the program starts (:meth:`Agent.place`).
A process that cannot get a session is refused, with the
reason, and its CUDA calls return an error; the agent and the others continue.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rgpu.client.run import pool_requests
from rgpu.client.run.given import given_line
from rgpu.client.run.placing import PlacedSession, program_asking
from rgpu.client.run.pool_requests import Grant, PoolRequests
from rgpu.client.run.read_ahead import ReadAhead
from rgpu.client.run.run_memory import RunMemory
from rgpu.client.run.waiting import create_session
from rgpu.client.shim_link.listening import listen
from rgpu.client.shim_link.observe import Observer
from rgpu.link import versions
from rgpu.link.accepting import accept_next
from rgpu.link.keys import Endpoint, KeyPair
from rgpu.link.loggers import get_logger
from rgpu.session.errors import (
    Conflict,
    Corrupt,
    Fenced,
    PoolUnavailable,
    Refused,
    RgpuError,
    StoreError,
    TimedOut,
    UnknownOutcome,
    VersionMismatch,
)
from rgpu.session.facts import SessionFacts

# Modules for programs that use CUDA only are imported with the first process, or ahead of it (read_ahead.py).
if TYPE_CHECKING:
    from rgpu.client.journal.kept import Policy
    from rgpu.client.journal.recorder import Recorder
    from rgpu.client.run.gang import GangMember, GangRun
    from rgpu.client.session.owner import Owner
    from rgpu.client.session.shipper import Shipper
    from rgpu.client.shim_link.local import Gather, Hello, LocalPeer, NewSegment

log = get_logger(__name__)

GATHER_TIMEOUT = 10.0
LIST_TIMEOUT = 5.0
EXIT_CODE_TIMEOUT = 5.0
NO_DEVICE, SYSTEM_NOT_READY = 100, 802  #: CUresult


@dataclass(frozen=True, slots=True)
class Options:
    """Options of ``rgpu run``. ``memory``, ``journal_limit``: bytes; None: the pool's default."""

    name: str
    memory: int | None = None
    recover: bool | None = None
    journal_limit: int = 1 << 30
    journal_dir: Path | None = None
    on_full: str = "block"
    extra: dict[str, Any] = field(default_factory=dict)
    record: Path | None = None  #: folder for recordings of the sessions
    checkpoint_every: float = 0.0  #: seconds after which the journal is worth a checkpoint; 0: any time
    max_replay: float = 0.0  #: seconds that the replay of a recovery may be predicted to take; 0: any time
    divergence: str = "warn"  #: at a divergence: ``warn`` or ``stop``
    same_host: bool = True  #: bulk through shared memory where the worker is on this host
    quiet: bool = False  #: no line at the start that says what was given
    pid: int = field(default_factory=os.getpid)  #: of `rgpu run`, where this process is only its agent


class Agent:
    """Owns the sessions of one program and its children; see the module docstring."""

    def __init__(self, options: Options, keys: KeyPair, endpoints: list[Endpoint], *,
                 requests: PoolRequests | None = None,
                 complain: Callable[[str], None] = lambda line: None,
                 described: Callable[[], list[Endpoint]] | None = None,
                 learned: Callable[[list[Endpoint]], None] | None = None) -> None:
        """``complain(line)``: prints a line for the user. ``described``, ``learned``: as for
        :class:`PoolRequests`."""
        self.options = options
        self.requests = requests or PoolRequests(keys, endpoints, described=described, learned=learned)
        self._client = keys.public
        self._complain = complain
        self._directory = Path(tempfile.mkdtemp(prefix="rgpu-"))  # mode 0700
        self._listener, self.socket_path = listen(self._directory)
        self.memory = RunMemory(self._directory)
        self.observer = Observer(self.requests, lambda: {"memory": options.memory, "options": options.extra,
                                                       "versions": versions.ours()})
        self._lock = threading.Lock()
        self._counter = 0
        self._placed: PlacedSession | None = None
        self._gang: GangRun | None = None
        self.missing = ""  #: which ranks of its gang did not come, if the run is ended for that
        self.end_program: Callable[[], None] = lambda: None  #: set by the launcher, while the program runs
        self._shippers: dict[str, Shipper] = {}
        self._threads: list[threading.Thread] = []
        self._closing = False
        self._interrupts = 0
        self._child: int | None = None
        self._exit_code: int | None = None
        self.why = ""  #: why the run is ended, if not by its program itself
        self._exited = threading.Event()
        self._reading = ReadAhead()
        self._accepting = threading.Thread(target=self._accept, name="agent-accept", daemon=True)

    def start(self) -> None:
        """Begin to accept programs."""
        self._accepting.start()

    # -- calls of the launcher -----------------------------------------------------------
    def place(self, command: str, given_up: Callable[[], str] = lambda: "") -> None:
        """Make the session of the first process that will use CUDA, before any process of the program runs.

        ``command``: the program's path. ``given_up()``: why it is not needed any more; empty while it is.
        Raises the pool's refusal, :class:`Corrupt`, :class:`VersionMismatch`.
        """
        _, name = self._next_name()
        args = self._order(name, program_asking(command, socket.gethostname(), self.options.pid))
        self._reading.start()
        reply = create_session(self.requests, args, tell=self._complain, given_up=given_up)
        self._reading.placed()
        if "members" in reply:
            from rgpu.client.run.gang import GangRun

            self._gang = GangRun(self.requests, args, reply, lambda one: self._read(one)[0], self._directory)
            if not self.options.quiet:
                self._complain(self._gang.line())
            release = str(reply["members"][0].get("driver_release") or "")
            self.observer.placed(self._gang.facts, release)
            self.observer.listed(self._gang.facts, release)
            return
        facts, *_ = self._read(reply)
        self._placed = PlacedSession(self.requests, args, reply)
        if "gang" in args["options"]:
            raise VersionMismatch("the pool's coordinator is of a version that knows no gangs, and made one session: "
                                  "update it, or run without --ranks, --spread and --gang")
        self._announce(reply)
        self.observer.placed(facts, str(reply.get("driver_release") or ""))

    def child_started(self, pid: int) -> None:
        """Note the process id of the program that ``rgpu run`` started."""
        self._child = pid
        self._reading.start()
        self._reading.placed()

    def child_exited(self, code: int) -> None:
        """Note the program's exit code, for its session's record."""
        self._exit_code = code
        self._exited.set()

    def ends_by(self, why: str) -> None:
        """Note why the run is being ended, for its sessions' records, and tell the user."""
        self.why = why
        self._complain(f"rgpu: {self.options.name}: {why}")

    def interrupted(self) -> None:
        """Withdraw requests that wait for a place in the pool: the user pressed Ctrl-C."""
        self._interrupts += 1

    def close(self, timeout: float = 10.0) -> None:
        """End all sessions, tell the pool, and delete the socket. ``timeout``: seconds for the threads to end."""
        self._reading.stop()
        with self._lock:
            self._closing = True
            shippers, threads = list(self._shippers.values()), list(self._threads)
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._listener.close()
        for shipper in shippers:
            shipper.stop("the program ended")
        if (placed := self._take_placed()) is not None:
            placed.give_up(self._exit_code, self.why)
        if self._gang is not None:
            self._gang.give_up(self._exit_code, self.why)
        deadline = time.monotonic() + timeout
        for thread in [self._accepting, *threads]:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
        self.requests.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def statistics(self) -> dict[str, dict[str, Any]]:
        """Figures of all sessions, by name."""
        with self._lock:
            return {name: shipper.upkeep.statistics() for name, shipper in self._shippers.items()}

    # -- one process after another ------------------------------------------------------
    def _accept(self) -> None:
        while True:
            found = accept_next(self._listener, lambda: self._closing, "the agent's socket")
            if found is None:
                return
            sock = found[0]
            with self._lock:
                if self._closing:
                    sock.close()
                    return
                self._threads = [thread for thread in self._threads if thread.is_alive()]
                thread = threading.Thread(target=self._serve, args=(sock,), name="agent-session", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, sock: socket.socket) -> None:
        peer: LocalPeer | None = None
        try:
            from rgpu.client.run.hello import wait_hello
            from rgpu.client.shim_link.local import Gather, ListDevices, LocalPeer, Observe

            peer = LocalPeer(sock)
            hello, early, device = wait_hello(peer)
            if isinstance(hello, Observe):
                self._observe(peer)
                return
            if isinstance(hello, ListDevices):
                self._list(peer)
                return
            if isinstance(hello, Gather):
                self._gather(peer, hello)
                return
            try:
                number, shipper = self._open_session(peer, hello, early, device)
            except BaseException:
                hello.close()
                for segment in early:
                    os.close(segment.fd)
                raise
        except RgpuError as error:
            self._refuse(peer, error)
            return
        except Exception as error:  # noqa: BLE001 - one process's error does not affect the others
            log.exception("a process could not be served")
            self._refuse(peer, RgpuError(f"the agent failed: {error}"))
            return
        try:
            shipper.run()
        finally:
            self.observer.ended(shipper.identity.session)
            self.memory.ended(number)
            if self._gang is not None:
                self._gang.ended(number)
            with self._lock:
                self._shippers.pop(shipper.identity.session, None)
        if shipper.over and not shipper.ended_well:
            self._complain(f"rgpu: session {shipper.identity.session}: {shipper.over}")

    def _observe(self, peer: LocalPeer) -> None:
        """Answer a monitor. No place in the pool is an answer too; the user is not told."""
        try:
            peer.observed(self.observer.answer(peer.pid).encode())
        except RgpuError as error:
            peer.refuse(NO_DEVICE if isinstance(error, Refused) else SYSTEM_NOT_READY, error.message)
        finally:
            peer.close()

    def _list(self, peer: LocalPeer) -> None:
        """Send a process the devices of its gang's run. Raises :class:`Refused` where the run has none."""
        if self._gang is None:
            raise Refused("this run is not a gang's: it has no list of devices")
        peer.send_list(self._gang.facts.encode())
        while not peer.flush():
            select.select([], [peer.fileno()], [], LIST_TIMEOUT)
        peer.close()

    def _gather(self, peer: LocalPeer, asked: Gather) -> None:
        """Report to the pool that a rank of that process has come, and to the process which others have.

        A refusal is passed on to the process only: the agent and its sessions continue.
        """
        import blake3

        try:
            session = self.observer.session_of(peer.pid)
            reply = self.requests.call("session.gather", {
                "session": session, "name": blake3.blake3(asked.name).hexdigest(length=16), "ranks": asked.ranks,
                "rank": asked.rank, "payload": asked.payload}, GATHER_TIMEOUT)
            came = {int(rank): (int(payload), str(name)) for rank, name, payload in reply["came"]}
            peer.gathered([came.get(rank, (0, "")) for rank in range(asked.ranks)])
        except RgpuError as error:
            again = isinstance(error, PoolUnavailable | TimedOut | Fenced | Conflict | UnknownOutcome)
            peer.refuse(SYSTEM_NOT_READY if again else NO_DEVICE, error.message)
        except (KeyError, TypeError, ValueError) as error:
            peer.refuse(SYSTEM_NOT_READY, f"the pool's reply to session.gather cannot be read: {error!r}")
        finally:
            peer.close()

    def _refuse(self, peer: LocalPeer | None, error: RgpuError) -> None:
        log.error("no session for a process", error=error.code, reason=error.message)
        self._complain(f"rgpu: no session: {error.message}")
        if peer is not None:
            peer.refuse(SYSTEM_NOT_READY if isinstance(error, PoolUnavailable) else NO_DEVICE, error.message)
            peer.close()

    @property
    def members(self) -> int:
        """How many members of a gang the run has; 0 where it is not of a gang."""
        return len(self._gang.members) if self._gang is not None else 0

    def _open_session(self, peer: LocalPeer, hello: Hello, early: list[NewSegment],
                      device: int | None) -> tuple[int, Shipper]:
        from rgpu.client.journal.kept import Journal
        from rgpu.client.session.identity import Identity
        from rgpu.client.session.shipper import Shipper
        from rgpu.client.shim_link.answer_ring import CAPACITY, AgentPage, AnswerRing

        number, reply, asked = self._ask_session(peer, hello, device)
        facts, owner, grant = self._read(reply)
        name = str(reply["session"])
        policy = self._policy(name, reply)
        # The journal is kept here, so this agent's limits apply, not those in the node's reply.
        facts = replace(facts, number=number, journal_limit=policy.limit, recover=policy.recover)
        page = AgentPage(CAPACITY if hello.ring else 0)
        ring = AnswerRing(page, *hello.ring) if hello.ring else None
        identity = Identity(name, peer.pid, hello.executable, self._client, asked)
        shared = self.options.same_host
        shipper = Shipper(identity, peer, page, hello.eventfd, Journal(policy, shared), self.requests, owner, grant,
                          lambda: (self._code_of(peer.pid), self.why), ring,
                          lambda usage: self.observer.counts(name, usage), self._recorder(name), hello.text,
                          hello.area and shared, shared)
        for segment in early:
            shipper.journal.offer(segment)
        first = self._gang.first_of(device) if self._gang is not None and device is not None else 0
        self.observer.began(name, peer.pid, facts, str(reply.get("driver_release") or ""), first)
        with self._lock:
            self._shippers[name] = shipper
            closing = self._closing
        if closing:
            shipper.stop("the program ended")
        peer.send_welcome(facts.encode(), page.fd)
        log.info("session created", session=name, owner=owner.host, epoch=owner.epoch, pid=peer.pid)
        return number, shipper

    def _ask_session(self, peer: LocalPeer, hello: Hello,
                     device: int | None) -> tuple[int, dict[str, Any], int]:
        """Return (number in the run, the pool's reply, the pid in the request) of a session made now or before.

        ``device``: in a gang, the one chosen from the run's list.
        """
        if self._gang is not None:
            if device is None:
                raise Corrupt("a process of a gang did not say which device it uses", reason="protocol")
            return self._ask_member(peer, hello, self._gang.member_of(device), self._gang)
        if (placed := self._take_placed()) is not None:
            return 1, placed.take(), placed.asked_pid
        number, name = self._next_name()
        program = {"pid": peer.pid, "command": hello.executable, "host": socket.gethostname()}
        reply = create_session(self.requests, self._order(name, program), tell=self._complain,
                               given_up=self._wanted_by(peer))
        if number == 1:
            self._announce(reply)
        return number, reply, peer.pid

    def _ask_member(self, peer: LocalPeer, hello: Hello, member: GangMember,
                    gang: GangRun) -> tuple[int, dict[str, Any], int]:
        number, _ = self._next_name()
        placed = gang.take(member, self._ranks_missing)
        if placed is not None:
            return number, placed.take(), placed.asked_pid
        program = {"pid": peer.pid, "command": hello.executable, "host": socket.gethostname()}
        order = self._order(gang.further_name(member), program)
        order["options"] = {key: value for key, value in order["options"].items() if key != "gang"}
        order["options"]["member"] = {"gang": gang.name, "rank": member.first}
        reply = create_session(self.requests, order, tell=self._complain, given_up=self._wanted_by(peer))
        return number, reply, peer.pid

    def _ranks_missing(self, why: str) -> None:
        """End the run, as ranks of the gang did not come: the others would wait for them for ever."""
        self.missing = why
        self.ends_by(why)
        self.end_program()

    def _announce(self, reply: dict[str, Any]) -> None:
        """Show the user what the run was given, once."""
        if not self.options.quiet and (line := given_line(str(reply.get("session")), reply.get("given"))):
            self._complain(line)

    def _take_placed(self) -> PlacedSession | None:
        """Return the session that was made before the program, at the first call; then None."""
        with self._lock:
            placed, self._placed = self._placed, None
        return placed

    def _order(self, name: str, program: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of session.create."""
        return {"name": name, "memory": self.options.memory, "recover": self.options.recover,
                "parent": self.options.name if name != self.options.name else None, "program": program,
                "options": self.options.extra, "versions": versions.ours(), "proves_key": True}

    def _read(self, reply: dict[str, Any]) -> tuple[SessionFacts, Owner, Grant]:
        """Read a reply to session.create. Raises :class:`Corrupt`, and :class:`VersionMismatch` for other versions."""
        try:
            self._check_versions(str(reply["session"]), reply)
            return SessionFacts.from_dict(reply["facts"]), pool_requests.owner(reply), self.requests.grant(reply)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Corrupt(f"the pool's reply to session.create cannot be read: {error!r}", reason="reply") from error

    def _wanted_by(self, peer: LocalPeer) -> Callable[[], str]:
        """Return a function: why a process that waits for a session needs none any more; empty while it does."""
        before = self._interrupts
        poller = select.poll()
        poller.register(peer.fileno(), select.POLLRDHUP)

        def given_up() -> str:
            if self._closing or poller.poll(0):
                return "the program ended"
            return "interrupted" if self._interrupts != before else ""

        return given_up

    def _recorder(self, session: str) -> Recorder | None:
        """Return a recorder, if requested. Raises :class:`StoreError` when it cannot begin."""
        if self.options.record is None:
            return None
        from rgpu.client.journal.recorder import Recorder

        try:
            return Recorder(self.options.record, session)
        except OSError as error:
            self.requests.quietly("session.end", {"session": session, "reason": str(error), "exit_code": None}, 5.0)
            raise StoreError(f"the session cannot be recorded: {error}") from error

    def _check_versions(self, session: str, reply: dict[str, Any]) -> None:
        """Give a session back whose node's versions do not fit, or are not named. Raises :class:`VersionMismatch`."""
        try:
            versions.check(reply.get("versions"), "the pool")
        except VersionMismatch as error:
            self.requests.quietly("session.end", {"session": session, "reason": error.message, "exit_code": None}, 5.0)
            raise

    def _next_name(self) -> tuple[int, str]:
        with self._lock:
            self._counter += 1
            number = self._counter
        return number, self.options.name if number == 1 else f"{self.options.name}/{number}"

    def _policy(self, name: str, reply: dict[str, Any]) -> Policy:
        from rgpu.client.journal.kept import Policy, prepare_directory

        recover = bool(reply.get("recover", True)) and self.options.recover is not False
        directory = None
        if recover and self.options.journal_dir is not None:
            directory = prepare_directory(self.options.journal_dir / name.replace("/", "~"))
        options = self.options
        return Policy(recover, options.journal_limit, directory, options.on_full, options.checkpoint_every,
                      options.max_replay, options.divergence)

    def _code_of(self, pid: int) -> int | None:
        """Return the exit code of the process that the launcher started; None for others, which are not known."""
        if pid != self._child:
            return None
        self._exited.wait(EXIT_CODE_TIMEOUT)
        return self._exit_code
