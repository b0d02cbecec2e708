"""The control verbs: who may ask, who answers, and what a repetition does.

One table for both sides. ``roles``: who may call. ``answers``: ``any`` node;
the ``leader`` (any node passes it on); the ``named`` node itself. A verb that
is not ``idempotent`` carries a command id, and a node answers a repeated id
with the result it recorded (OWNERSHIP 6).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rgpu.session.errors import AuthenticationFailed, NotFound

USER = frozenset({"user", "operator"})
OPERATOR = frozenset({"operator"})
NODE = frozenset({"node"})
INVITED = frozenset({"invited"})
EVERYBODY = frozenset({"user", "operator", "node"})


class Answers(Enum):
    """Which node answers."""

    ANY = "any"
    LEADER = "leader"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class Verb:
    name: str
    roles: frozenset[str]
    answers: Answers
    idempotent: bool
    doc: str


ANY, LEADER, NAMED = Answers.ANY, Answers.LEADER, Answers.NAMED

TABLE: tuple[Verb, ...] = (
    Verb("pool.ping", EVERYBODY, ANY, True, "{} → {host, version, versions, time, endpoints}: is the node there?"),
    Verb("pool.stop", OPERATOR, ANY, True, "{} → {}: end this node and its workers."),
    Verb("pool.status", EVERYBODY, ANY, True,
         "{} → {version, cluster, revision, leader, leader_revision, paused, paused_reason, nodes, sessions: {state: "
         "count}, moves: {session: how far}, queue: [{name, kind, position, priority, memory_bytes, compute, waited_s, "
         "reason}], rebalance: as set or null, rebalancing: the plan under way, "
         "away: hosts that something was decided about and that are not there, lost: {host: since when}}"),
    Verb("pool.pause", OPERATOR, LEADER, True, "{paused, reason} → {paused, reason}: automation stops, or goes on."),
    Verb("pool.adopt", OPERATOR, ANY, False,
         "{yes, keep: {session: host}, without: [host], forget: [session], endpoints} → {went_back, steps, problems, "
         "keys, done}: a registry that went back is made to say what is true (OWNERSHIP 10)."),
    Verb("pool.rebalance", OPERATOR, LEADER, False,
         "{auto, apply} → {auto, paused, for, fragmentation, doing, moves: [{session, from, to, device, gain, "
         "reason}], cost_gpu_seconds, reason, applied, results}: the plan of moves, and with `apply` its execution."),
    Verb("pool.history", USER, ANY, True,
         "{session or host, limit} → {events: [{revision, kind, when, session, host, decision, reason, epoch, owner, "
         "leader}], revision}"),
    Verb("pool.events", USER, ANY, True,
         "{since, wait} → {events, revision}: what was decided after revision `since`; waits up to `wait` s for some."),
    Verb("pool.join", INVITED, LEADER, True,
         "{host, public} → {pool, secret, registry, cluster, endpoints}: a host joins by its invitation."),
    Verb("keys.invite", OPERATOR, LEADER, False, "{name, public, host, seconds} → {name, expires, pool}"),
    Verb("keys.list", USER, ANY, True, "{} → {keys: [{name, role, public}]}: whom that node lets in."),
    Verb("keys.revoke", OPERATOR, LEADER, True, "{name}: no node lets that key in any more."),
    Verb("session.create", USER, LEADER, False,
         "{name, memory, recover, parent, program: {pid, command, host}, options: {host, gpus, compute, models, "
         "priority, anti_affinity, queue}, versions, wait, known} → {session, owner, address, ticket, secret, expires, "
         "epoch, facts, driver_release, versions, endpoints}; with `queue`, where there is no place, within `wait` s, "
         "or at once when the reason is not `known`: {queued: {position, waiting, reason}}, to be asked again."),
    Verb("session.candidate", USER, ANY, True,
         "{memory, options, versions} → {host, device, facts, driver_release, versions}: the device that a session "
         "would get now; promises nothing."),
    Verb("session.owner", EVERYBODY, ANY, True,
         "{session, epoch: the highest that the agent has seen} → {session, owner, address, epoch, state, alive, "
         "endpoints}"),
    Verb("session.renew_ticket", USER, ANY, True, "{session} → {ticket, secret, expires, endpoints}"),
    Verb("session.unreachable", USER, LEADER, True,
         "{session, epoch, host, seconds}: the agent cannot reach the owner (OWNERSHIP 7)."),
    Verb("session.list", USER, ANY, True, "{} → {sessions: […], queue: requests that wait}"),
    Verb("session.describe", USER, ANY, True, "{session} → the record and what its worker reports"),
    Verb("session.logs", USER, ANY, True, "{session, lines} → {lines: […]}"),
    Verb("session.end", USER | NODE, LEADER, True, "{session, reason, exit_code, statistics}: its program ended."),
    Verb("session.withdraw", USER, LEADER, True,
         "{session, program, reason}: that program waits for a place no more; if it has just got one, that ends."),
    Verb("session.keep", USER, LEADER, True,
         "{session, program} → {session, state, endpoints}: that program lives and has not used its session yet."),
    Verb("session.kill", USER, LEADER, True, "{session}: end it now."),
    Verb("session.migrate", USER, LEADER, False, "{session, host, options} → the move's outcome; progress in between"),
    Verb("session.move_status", USER, ANY, True, "{session} → {move}"),
    Verb("session.move_abort", USER, LEADER, True, "{session, move}"),
    Verb("session.checkpoint", USER | NODE, LEADER, False, "{session} → {image, position, pages, bytes, pause_ms, …}"),
    Verb("session.restore", USER, LEADER, False, "{image, name, host} → {session, owner, epoch}"),
    Verb("image.ls", USER, ANY, True, "{session} → {images: […], store}: a user's own, an operator's: all."),
    Verb("image.show", USER, ANY, True, "{image} → what it holds, without its pages"),
    Verb("image.verify", USER, ANY, True, "{image} → {pages, chunks, packs}: every byte was read and is right."),
    Verb("image.rm", USER, ANY, True, "{image} → {freed}; refused for one that the registry names."),
    Verb("image.gc", USER, ANY, True, "{keep_last, max_age, ended, grace, dry_run} → {images, packs, freed, …}"),
    Verb("image.state", USER, ANY, True, "{image, offset} → {data, size, facts}: a piece of its encoded state."),
    Verb("image.pages", USER, ANY, True, "{image, region, start, count} → {pages: […]}"),
    Verb("image.import", USER, NAMED, False, "{id, offset, data} → {size}; {id, end, name} → {image, pages, bytes}"),
    Verb("node.list", EVERYBODY, ANY, True, "{} → {nodes: […], lost: hosts that went without a word}"),
    Verb("node.info", EVERYBODY, NAMED, True, "{} → devices, sessions, workers"),
    Verb("node.cordon", OPERATOR, LEADER, True,
         "{host, state: ready | cordoned | draining, reason} → {host, state, reason}: take sessions, none, or give "
         "them all away."),
    Verb("node.drain_status", USER, LEADER, True,
         "{host} → {host, state, reason, alive, drained, sessions: [{session, state, epoch, to, move, blocked, "
         "waits}]}"),
    Verb("node.remove", OPERATOR, LEADER, True, "{host}: forget an empty host that is gone, with its key."),
    Verb("node.command", NODE, NAMED, False, "{verb, args}: passed on between nodes, with leader revision and epoch."),
    Verb("worker.start", NODE, NAMED, False, "{session, epoch, quota, device, image, recover} → {position}"),
    Verb("worker.describe", NODE, NAMED, True, "{session} → what the worker reports"),
    Verb("worker.forget", NODE, NAMED, True, "{session, epoch, reason}: end a worker that owns nothing."),
    Verb("node.holdings", NODE, NAMED, True, "{} → what this node holds, and whether it believes the registry"),
    Verb("node.adopt", NODE, NAMED, True,
         "{own: {session: epoch}, forget: [session]}: serve those at these epochs; {cluster, revision}: believe it."),
    Verb("move.receive", NODE, NAMED, False, "{session, move, quota, device, source} → {address, ticket, secret}"),
    Verb("move.send", NODE, NAMED, False, "{session, move, address, ticket, secret, …} → statistics"),
    Verb("move.settle", NODE, NAMED, True, "{session, move}: read the registry's record and obey it."),
    Verb("session.image", NODE, NAMED, False, "{session, image} → {image, position, pages, bytes, pause_ms, …}"),
    Verb("session.notice", NODE, NAMED, True, "{session, epoch, kind, …}: to the agent of a session."),
    Verb("session.drop", NODE, NAMED, True, "{session, reason}: end the worker, free its device."),
)

VERBS: dict[str, Verb] = {verb.name: verb for verb in TABLE}


def check(verb: str, role: str) -> Verb:
    """The verb, if ``role`` may call it. Raises :class:`NotFound`, :class:`AuthenticationFailed`."""
    entry = VERBS.get(verb)
    if entry is None:
        raise NotFound(f"no control verb is called {verb!r}", verb=verb)
    if role not in entry.roles:
        needed = " or ".join(sorted(entry.roles))
        raise AuthenticationFailed(f"{verb} needs a key of role {needed}; this one is a {role}'s", verb=verb, role=role)
    return entry
