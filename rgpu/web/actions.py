"""The actions of the pages: one table, from which the questions, the forms and the requests are made."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rgpu.session.errors import NotPermitted, Refused, RgpuError, UsageError
from rgpu.session.printable import printable
from rgpu.web.asking import Asking
from rgpu.web.logins import Job, Login
from rgpu.web.rendering import size

Values = Mapping[str, str]
SOON_SECONDS = 1.0  #: for which an answer waits for an action, so that the result of a quick one is shown at once
MODES = ("auto", "copy", "replay")


@dataclass(frozen=True, slots=True)
class Action:
    """One action. ``fields``: its parameters; ``asks``: the question before it, into which these are filled.

    ``request(values)``: arguments of the control verb. ``harm``: it ends or empties something.
    """

    name: str
    title: str
    verb: str
    fields: tuple[str, ...]
    asks: str
    request: Callable[[Values], dict[str, Any]]
    operator: bool = False
    harm: bool = False

    def question(self, values: Values) -> str:
        """Return the question before it is done."""
        return self.asks.format(**{name: printable(values[name]) for name in self.fields})

    def read(self, given: Values) -> dict[str, str]:
        """Return its fields from a form or a URL. Raises :class:`UsageError` for missing ones."""
        found = {name: given.get(name, "") for name in self.fields}
        missing = [name for name, value in found.items() if not value]
        if missing:
            raise UsageError(f"{self.title}: {', '.join(missing)} is missing")
        return found


def _state(state: str) -> Callable[[Values], dict[str, Any]]:
    return lambda v: {"host": v["host"], "state": state, "reason": "by the web page"}


def _move(values: Values) -> dict[str, Any]:
    if values["mode"] not in MODES:
        raise UsageError(f"a move goes by {', '.join(MODES)}, not by {values['mode']}")
    return {"session": values["session"], "host": values["host"], "options": {"mode": values["mode"]}}


TABLE = (
    Action("migrate", "Move", "session.migrate", ("session", "host", "mode"),
           "Move session {session} to {host} (mode {mode}) while its program runs?", _move),
    Action("abort", "Give the move up", "session.move_abort", ("session", "move"),
           "Give up the move of session {session}? It runs on where it is.",
           lambda v: {"session": v["session"], "move": v["move"]}),
    Action("checkpoint", "Checkpoint", "session.checkpoint", ("session",),
           "Write a checkpoint of session {session} now?", lambda v: {"session": v["session"]}),
    Action("kill", "Kill", "session.kill", ("session",),
           "End session {session} now? Its memory is given back, its program's next call fails, and what is not in a "
           "checkpoint is lost.", lambda v: {"session": v["session"], "reason": "killed by the web page"}, harm=True),
    Action("cordon", "Cordon", "node.cordon", ("host",), "Place no more sessions on {host}? Those it has stay.",
           _state("cordoned"), operator=True),
    Action("drain", "Drain", "node.cordon", ("host",),
           "Move every session of {host} to other hosts, and place no more there?", _state("draining"), operator=True,
           harm=True),
    Action("uncordon", "Uncordon", "node.cordon", ("host",), "Let {host} take sessions again?", _state("ready"),
           operator=True),
    Action("apply", "Approve", "pool.rebalance", ("plan",), "Carry the plan that is shown out?",
           lambda v: {"apply": True}, operator=True),
)
ACTIONS = {action.name: action for action in TABLE}


def digest(plan: dict[str, Any]) -> str:
    """Return a digest of a plan's moves, so that an approval is for these and no others."""
    moves = [[move.get(name) for name in ("session", "from", "to", "device")] for move in plan.get("moves") or []]
    return hashlib.sha256(json.dumps(moves, default=str).encode()).hexdigest()[:32]


class Doing:
    """The execution of actions, in the background: the login's jobs show those that take long."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        self._tasks: set[asyncio.Task[None]] = set()

    def permit(self, action: Action, login: Login) -> None:
        """Raise :class:`NotPermitted` at once for an action that the pool would refuse this login anyway."""
        if action.operator and not login.operator:
            raise NotPermitted(f"{action.title} is for operators: log in with `rgpu web login --operator`")

    async def do(self, action: Action, values: Values, login: Login) -> Job:
        """Begin an action, and return its job, with the result if that is there soon. Raises :class:`UsageError`."""
        self.permit(action, login)
        request = action.request(values)
        about = values.get("session") or values.get("host") or "the pool"
        job = login.begin(action.title, about)
        task = asyncio.ensure_future(self._carry_out(action, values, request, login, job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.wait([task], timeout=SOON_SECONDS)
        return job

    async def _carry_out(self, action: Action, values: Values, request: dict[str, Any], login: Login, job: Job) -> None:
        def far(progress: dict[str, Any]) -> None:
            job.said = _far(progress)

        try:
            if action.name == "apply":
                plan = await self._asking.look(login, "pool.rebalance", apply=False)
                if digest(plan) != values["plan"]:
                    raise Refused("the plan has changed since it was shown: look at it again")
            result = await self._asking.act(login, action.verb, request, far)
        except RgpuError as error:
            job.state, job.said = "failed", error.message
        except Exception as error:  # noqa: BLE001 - the job shows it, and the page continues
            job.state, job.said = "failed", f"{type(error).__name__}: {error}"
        else:
            job.state, job.said = "done", outcome(action.name, result if isinstance(result, dict) else {})


def _far(progress: dict[str, Any]) -> str:
    parts = [str(progress.get(name)) for name in ("phase", "mode", "doing") if progress.get(name)]
    if isinstance(progress.get("pages_sent"), int):
        parts.append(f"{progress['pages_sent']} pages, {size(progress.get('bytes_sent'))}")
    return ", ".join(parts)


def outcome(name: str, result: dict[str, Any]) -> str:
    """Return the result of an action in words."""
    if name == "migrate":
        return (f"{result.get('outcome')}: {result.get('from')} → {result.get('to')}, downtime "
                f"{_ms(result.get('downtime_ms'))}, {size(result.get('bytes_sent'))} sent, by {result.get('mode')}; "
                f"{result.get('reason')}")
    if name == "checkpoint":
        return f"{result.get('image')}: {size(result.get('bytes'))}, pause {_ms(result.get('pause_ms'))}"
    if name == "apply":
        done = [f"{one.get('session')}: {one.get('outcome')}" for one in result.get("results") or []]
        return "; ".join(done) or str(result.get("reason") or "nothing was to be moved")
    return str(result.get("reason") or result.get("state") or "done")


def _ms(value: Any) -> str:
    return f"{value:.0f} ms" if isinstance(value, int | float) else "unknown"
