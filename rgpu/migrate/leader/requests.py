"""Requests of clients (``rgpu run``), read from a message and checked: pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from rgpu.migrate.records.gangs import check_gang_name
from rgpu.migrate.records.schema import GangAsk, Program, Wants, check_session_name
from rgpu.migrate.scheduling.placement import Request
from rgpu.migrate.scheduling.snapshot import demand
from rgpu.session.devices import MAX_GPUS, MAX_LIST, MAX_RANKS
from rgpu.session.errors import Refused, UsageError


@dataclass(frozen=True, slots=True)
class Order:
    """Request of a client of ``user``. ``quota`` None: ``share`` per cent of a device's memory (0: the default).

    ``defaulted``: the pool's default where that was applied, else empty. ``proves_key``: its agent makes its own
    tickets.
    """

    name: str
    agent: str
    quota: int | None = None
    share: int = 0
    program: Program = Program()
    recover: bool = True
    host: str | None = None
    device: str | None = None
    wants: Wants = field(default_factory=Wants)
    user: str = ""
    defaulted: str = ""
    proves_key: bool = False
    ask: GangAsk | None = None  #: the ranks of a gang that it asks for, each with these values
    gang: str = ""  #: gang that its session is a member of, with this rank
    rank: int = 0

    def check(self) -> None:
        """Check the names and values. Raises :class:`UsageError`."""
        check_session_name(self.name)
        if self.quota is not None and not 0 < self.quota < 2**63:
            raise UsageError(f"a session cannot have {self.quota} bytes of memory")

    def request(self) -> Request:
        """Return the request in the scheduler's form."""
        wants = self.wants
        return Request(self.name, self.quota or 0, host=self.host, device=self.device, compute=wants.compute,
                       models=tuple(wants.models), anti_affinity=wants.anti_affinity, gpus=wants.gpus, kind=wants.kind)


def read_order(args: dict[str, Any], agent: str, user: str = "") -> Order:
    """Read the order of a ``session.create``: {name, memory, recover, program, options: {host, gpus, compute, models,
    priority, anti_affinity, client_grace, labels, gang, member: {gang, rank}}}.

    Raises :class:`UsageError` for invalid values, :class:`Refused` for more GPUs than a session can have.
    """
    options = args.get("options") or {}
    if not isinstance(options, dict):
        raise UsageError("options must be a map")
    wants, share = read_wants(options)
    memory = args.get("memory")
    if memory is not None and (not isinstance(memory, int) or isinstance(memory, bool)):
        raise UsageError(f"memory must be a number of bytes, not {memory!r}")
    host = options.get("host")
    return Order(str(args.get("name", "")), agent, memory or None, share, program_of(args.get("program")),
                 args.get("recover") is not False, str(host) if host else None, wants=wants, user=user,
                 ask=read_gang(options.get("gang")), proves_key=args.get("proves_key") is True,
                 **_member(options.get("member")))


def _member(asked: Any) -> dict[str, Any]:
    """Read the rank of a session for a further process: {gang, rank}. Raises :class:`UsageError`."""
    if asked is None:
        return {}
    try:
        member = msgspec.convert(asked, _Member)
    except msgspec.ValidationError as error:
        raise UsageError(f"the member of a gang cannot be read: {error}") from error
    return {"gang": check_gang_name(member.gang), "rank": member.rank}


class _Member(msgspec.Struct, frozen=True):
    gang: str
    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_LIST)]


def read_gang(asked: Any) -> GangAsk | None:
    """Read the ranks of a gang that are asked for: {name, ranks, of, spread, deadline}; None: none are.

    Raises :class:`UsageError`.
    """
    if asked is None:
        return None
    try:
        ask = msgspec.convert(asked, GangAsk)
    except msgspec.ValidationError as error:
        raise UsageError(f"the gang cannot be read: {error}; a list has {MAX_LIST} devices at most") from error
    check_gang_name(ask.name)
    if ask.of > MAX_RANKS and not ask.spread:
        raise UsageError(f"a gang has {MAX_RANKS} ranks at most, not {ask.of}")
    if ask.ranks > ask.of:
        raise UsageError(f"{ask.ranks} ranks are asked for of a gang that has {ask.of} in all")
    if ask.spread and ask.ranks != ask.of:
        raise UsageError("--spread gives one run a list of devices: it cannot be joined by other runs")
    return ask


def read_wants(options: dict[str, Any]) -> tuple[Wants, int]:
    """Return the requirements beside memory, and the share of a device's memory (per cent; 0: none).

    Without ``gpus`` and ``compute`` nothing is promised but memory. Raises as :func:`read_order`.
    """
    gpus, compute, models = options.get("gpus"), options.get("compute"), options.get("models") or []
    if not isinstance(models, list) or not all(isinstance(model, str) for model in models):
        raise UsageError("models must be a list of names")
    if compute is not None and (not isinstance(compute, int) or isinstance(compute, bool) or not 1 <= compute <= 100):
        raise UsageError(f"--compute takes 1 to 100 per cent of a GPU, not {compute!r}")
    share, count = 0, 1
    if gpus is not None:
        asked = demand(str(gpus), compute=compute)
        if asked.gpus > MAX_GPUS:
            raise Refused(f"a session of {asked.gpus} GPUs cannot be made: {MAX_GPUS} at most, that is how many "
                          "address ranges a program has room for", gpus=asked.gpus)
        count, share, compute = asked.gpus, demand(str(gpus)).compute, asked.compute
    try:
        wants = msgspec.convert({
            "compute": compute or 0, "models": models, "priority": options.get("priority") or 0,
            "anti_affinity": options.get("anti_affinity") or "", "gpus": count,
            "client_grace": options.get("client_grace") or 0, "labels": options.get("labels") or {}}, Wants)
    except msgspec.ValidationError as error:
        raise UsageError(f"the request cannot be read: {error}") from error
    return wants, share


def program_of(program: Any) -> Program:
    """Read the client's program. Raises :class:`UsageError`."""
    values = program or {}
    if not isinstance(values, dict):
        raise UsageError("program must be a map")
    pid, command, host = values.get("pid", 0), values.get("command", ""), values.get("host", "")
    if isinstance(command, list):
        command = " ".join(str(part) for part in command)
    if not isinstance(pid, int) or not 0 <= pid < 2**63 or not isinstance(command, str) or not isinstance(host, str):
        raise UsageError("program must be {pid: number, command: text, host: text}")
    return Program(pid=pid, command=command[:4096], host=host[:4096])
