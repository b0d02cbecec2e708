"""The control verbs: the roles that may call them, the nodes that answer, and the effect of a repetition.

One table for both sides. ``roles``: who may call. ``answers``: ``any`` node;
the ``leader`` (any node passes it on); the ``named`` node itself. A verb that
is not ``idempotent`` carries a command id, and a node answers a repeated id
with the result it recorded (OWNERSHIP 6). ``on``: what it acts on, which
determines its owner (:mod:`rgpu.link.control.access` decides). ``changes``: it
changes something, and is recorded in the audit log. ``web``: a user who is logged in
on a node's web page may call it there; the page refuses all others, for any user.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

USER = frozenset({"user", "operator"})
OPERATOR = frozenset({"operator"})
NODE = frozenset({"node"})
INVITED = frozenset({"invited"})
WEB = frozenset({"web"})
EVERYBODY = frozenset({"user", "operator", "node"})


class Answers(Enum):
    """Node that answers a verb."""

    ANY = "any"
    LEADER = "leader"
    NAMED = "named"


class On(Enum):
    """The object that a verb acts on, and so whose it may be."""

    POOL = "the pool"  #: without an owner: the role decides
    SESSION = "a session"  #: that the arguments name, its checkpoint's, or a request that waits under that name
    CHECKPOINT = "a checkpoint"  #: that the arguments name; for a user, those of others do not exist
    LIST = "what is seen"  #: objects of many users: the caller's own
    COMMAND = "a node"  #: by the leader: its election decides


@dataclass(frozen=True, slots=True)
class Verb:
    """A row of the table; see the module's docstring."""

    name: str
    roles: frozenset[str]
    answers: Answers
    idempotent: bool
    doc: str
    on: On = On.POOL
    changes: bool = False
    web: bool = False


ANY, LEADER, NAMED = Answers.ANY, Answers.LEADER, Answers.NAMED

TABLE: tuple[Verb, ...] = (
    Verb("pool.ping", EVERYBODY, ANY, True, "{} → {host, version, versions, time, endpoints}: does the node answer?"),
    Verb("pool.stop", OPERATOR, ANY, True, "{} → {}: end this node and its workers.", changes=True),
    Verb("pool.status", EVERYBODY, ANY, True,
         "{} → {version, cluster, revision, leader, leader_revision, paused, paused_reason, nodes, sessions: {state: "
         "count}, moves: {session: how far}, queue: [{name, kind, position, priority, memory_bytes, compute, waited_s, "
         "reason}], default_gpus: as set or empty, max_kernel_seconds: 0: no limit, "
         "rebalance: as set or null, rebalancing: the plan in progress, "
         "away: hosts with a decision that are not in the pool now, lost: {host: since when}}",
         on=On.LIST, web=True),
    Verb("pool.pause", OPERATOR, LEADER, True, "{paused, reason} → {paused, reason}: automation is paused or resumed.",
         changes=True),
    Verb("pool.set", OPERATOR, LEADER, True, "{name: default-gpus, value: as --gpus, or empty; or name: "
         "max-kernel-seconds, value: seconds, or empty} → {default_gpus} or {max_kernel_seconds}: a "
         "setting of the pool.", changes=True),
    Verb("pool.adopt", OPERATOR, ANY, False,
         "{yes, keep: {session: host}, without: [host], forget: [session], endpoints} → {went_back, steps, problems, "
         "keys, done}: a registry that went back to an older state is corrected (OWNERSHIP 10).", changes=True),
    Verb("pool.rebalance", OPERATOR, LEADER, False,
         "{auto, apply} → {auto, paused, for, fragmentation, doing, moves: [{session, from, to, device, gain, "
         "reason}], cost_gpu_seconds, reason, applied, results}: the plan of moves, and with `apply` its execution.",
         changes=True, web=True),
    Verb("pool.history", USER, ANY, True,
         "{session or host, limit} → {events: [{revision, kind, when, session, host, decision, reason, epoch, owner, "
         "leader, actor, user}], revision}", on=On.LIST, web=True),
    Verb("pool.events", USER, ANY, True,
         "{since, wait} → {events, revision}: the decisions after revision `since`; waits up to `wait` s for some.",
         on=On.LIST),
    Verb("pool.join", INVITED, LEADER, True,
         "{host, public} → {pool, secret, secrets, registry, cluster, endpoints}: a host joins by its invitation.",
         changes=True),
    Verb("pool.login", INVITED, LEADER, True,
         "{public} → {pool, name, role, endpoints}: a user's machine joins by its invitation.", changes=True),
    Verb("keys.invite", OPERATOR, LEADER, False,
         "{name, public, host, seconds, role, member} → {name, expires, pool, role, member}: of a host, or with `role` "
         "user or operator of `member`.", changes=True),
    Verb("keys.list", USER, ANY, True, "{} → {keys: [{name, role, user, public}]}: the keys that this node accepts."),
    Verb("keys.revoke", OPERATOR, LEADER, True,
         "{name, public, last, checkpoint} → {name, keys, holds: [host], not_yet: {host: why}, sessions}: no node "
         "accepts that key any more, and its sessions end; `last`: also the last operator's.", changes=True),
    Verb("quota.set", OPERATOR, LEADER, True,
         "{user or default: true, limits: {sessions, memory, gpus, queued, checkpoints}, inherit: [names]} → {user, "
         "limits, own, use, over, notes}: limits of a user or of all users; nil: none; `inherit`: those of all users "
         "again.",
         changes=True),
    Verb("quota.unset", OPERATOR, LEADER, True,
         "{user or default: true} → as quota.set: all limits of that user, or of all users, are removed.",
         changes=True),
    Verb("quota.show", USER, ANY, True,
         "{user, all_users} → {quotas: [{user, limits, own: those set for that user, use, over: what is above them}], "
         "default: limits of all users}: the caller's own; another's or `all_users`: for an operator.", on=On.LIST),
    Verb("keys.rotate", OPERATOR, LEADER, False,
         "{overlap: s, finish} → as keys.rotation: the pool gets a new secret, and the old one is accepted for "
         "`overlap` s once every node has the new one; `finish`: the overlap ends now.", changes=True),
    Verb("keys.rotation", USER, ANY, True,
         "{} → {phase: settled | spreading | overlap, secret, new, until, hosts: {host: it has the newest}, reason}"),
    Verb("pool.secret", NODE, ANY, True,
         "{number, mark} → {secret}: a secret of the pool, for a node that lacks it.", changes=True),
    Verb("session.create", USER, LEADER, False,
         "{name, memory, recover, parent, program: {pid, command, host}, options: {host, gpus, compute, models, "
         "priority, anti_affinity, queue, gang: {name, ranks, of, spread, deadline}, member: {gang, rank}}, versions, "
         "wait, known, proves_key: it makes its own tickets} → {session, "
         "owner, address, public: the owner's key, if it takes those, ticket, secret, expires, "
         "epoch, facts, driver_release, versions, endpoints, given: {host, device, kind, gpus, "
         "compute, memory_bytes, device_bytes}}; with `queue`, where there is no place, within `wait` s, "
         "or at once when the reason is not `known`: {queued: {position, waiting, reason}}; ask again. With "
         "`gang`: {gang, generation, members: [such an answer for each member, with rank]}.",
         changes=True),
    Verb("session.candidate", USER, ANY, True,
         "{memory, options, versions} → {host, device, facts, driver_release, versions}: the device that a session "
         "would get now; promises nothing."),
    Verb("session.owner", EVERYBODY, ANY, True,
         "{session, epoch: the highest that the agent has seen} → {session, owner, address, public, epoch, state, "
         "alive, endpoints}", on=On.SESSION),
    Verb("session.renew_ticket", USER, ANY, True, "{session} → {ticket, secret, expires, endpoints}", on=On.SESSION),
    Verb("session.unreachable", USER, LEADER, True,
         "{session, epoch, host, seconds}: the agent cannot reach the owner (OWNERSHIP 7).", on=On.SESSION),
    Verb("session.gather", USER, LEADER, True,
         "{session, name: hash of what the ranks share, ranks, rank, payload} → {came: [[rank, session, payload]]}: a "
         "rank of a communicator has arrived, and receives the others that have.", on=On.SESSION),
    Verb("session.list", USER, ANY, True,
         "{all, all_users} → {sessions: […], queue: requests that wait}: the caller's own; `all_users`: all users', "
         "for an operator.", on=On.LIST, web=True),
    Verb("session.page", USER, ANY, True,
         "{all, all_users, state, host, user, q, page} → {rows, page, pages, total, states}: of both the page of that "
         "number, in the order of names; `q`: in name, command or labels.", on=On.LIST, web=True),
    Verb("session.describe", USER, ANY, True, "{session} → the record and what its worker reports", on=On.SESSION,
         web=True),
    Verb("session.logs", USER, ANY, True, "{session, lines} → {lines: […]}", on=On.SESSION),
    Verb("session.end", USER | NODE, LEADER, True, "{session, reason, exit_code, statistics}: its program ended.",
         on=On.SESSION, changes=True),
    Verb("session.withdraw", USER, LEADER, True,
         "{session, program, reason}: that program waits for no place any more; if it just got one, that ends.",
         on=On.SESSION, changes=True),
    Verb("session.keep", USER, LEADER, True,
         "{session, program} → {session, state, endpoints}: that program lives and has not used its session yet.",
         on=On.SESSION),
    Verb("gang.list", USER, ANY, True,
         "{all, all_users} → {gangs: [{gang, user, state, generation, ranks, spread, hosts, runs, members: [{rank, "
         "session, state, host, device, epoch, in_generation, came, collective, …}], waits, position, reason, note, "
         "…}]}: the caller's own, also those that wait; `all`: ended ones too.", on=On.LIST, web=True),
    Verb("gang.describe", USER, ANY, True, "{session: the gang's name} → its row of gang.list", on=On.SESSION,
         web=True),
    Verb("session.kill", USER, LEADER, True, "{session}: end it now; a gang's name: all of its members.",
         on=On.SESSION, changes=True, web=True),
    Verb("session.migrate", USER, LEADER, False, "{session, host, options} → the move's outcome; progress in between",
         on=On.SESSION, changes=True, web=True),
    Verb("session.move_status", USER, ANY, True, "{session} → {move}", on=On.SESSION, web=True),
    Verb("session.move_abort", USER, LEADER, True, "{session, move}", on=On.SESSION, changes=True, web=True),
    Verb("session.checkpoint", USER | NODE, LEADER, False, "{session} → {image, position, pages, bytes, pause_ms, …}",
         on=On.SESSION, changes=True, web=True),
    Verb("session.restore", USER, LEADER, False, "{image, host} → {session, owner, epoch}",
         on=On.SESSION, changes=True),
    Verb("image.ls", USER, ANY, True, "{session} → {images: […], store}: a user's own, an operator's: all.",
         on=On.LIST),
    Verb("image.show", USER, ANY, True, "{image} → its content, without its pages", on=On.CHECKPOINT),
    Verb("image.verify", USER, ANY, True, "{image} → {pages, chunks, packs}: every byte was read and matches its hash.",
         on=On.CHECKPOINT),
    Verb("image.rm", USER, ANY, True, "{image} → {freed}; refused for one that the registry names.",
         on=On.CHECKPOINT, changes=True),
    Verb("image.gc", USER, ANY, True, "{keep_last, max_age, ended, grace, dry_run} → {images, packs, freed, …}",
         on=On.LIST, changes=True),
    Verb("image.state", USER, ANY, True, "{image, offset} → {data, size, facts}: a piece of its encoded state.",
         on=On.CHECKPOINT),
    Verb("image.pages", USER, ANY, True, "{image, region, start, count} → {pages: […]}", on=On.CHECKPOINT),
    Verb("image.import", USER, NAMED, False, "{id, offset, data} → {size}; {id, end, name} → {image, pages, bytes}",
         changes=True),
    Verb("web.login", USER, NAMED, True,
         "{} → {code, seconds, url}: a code for that node's web page, valid once.", changes=True),
    Verb("web.redeem", WEB, NAMED, False,
         "{code} → {grant, seconds, role, user, name}: the code is used up; the grant stands for who requested it.",
         changes=True),
    Verb("web.logout", WEB, NAMED, True, "{grant}: the grant ends.", changes=True),
    Verb("node.list", EVERYBODY, ANY, True, "{} → {nodes: […], lost: hosts that stopped answering}", web=True),
    Verb("node.info", EVERYBODY, NAMED, True, "{} → devices, sessions, workers", on=On.LIST),
    Verb("node.cordon", OPERATOR, LEADER, True,
         "{host, state: ready | cordoned | draining, reason} → {host, state, reason}: take sessions, none, or give "
         "them all away.", changes=True, web=True),
    Verb("node.drain_status", USER, LEADER, True,
         "{host} → {host, state, reason, alive, drained, sessions: [{session, state, epoch, to, move, blocked, "
         "waits}]}", on=On.LIST, web=True),
    Verb("node.remove", OPERATOR, LEADER, True, "{host}: delete an empty lost host, with its key.",
         changes=True),
    Verb("node.command", NODE, NAMED, False, "{verb, args}: passed on between nodes, with leader revision and epoch.",
         on=On.COMMAND),
    Verb("worker.died", NODE, LEADER, True,
         "{session, host, epoch, position, begun, complete, reason}: a session lost its worker there.",
         on=On.SESSION, changes=True),
    Verb("session.shares", NODE, LEADER, True,
         "{session, host, epoch, peer}: the session is about to share device memory with that session of its user.",
         on=On.SESSION, changes=True),
    Verb("agent.silent", NODE, LEADER, True,
         "{session, host, epoch, seconds, had_agent} → {again}: for how long its client's host has sent nothing.",
         on=On.SESSION),
    Verb("keys.forget", NODE, NAMED, True, "{keys: {public: name}}: refuse these from the next request on.",
         on=On.COMMAND, changes=True),
    Verb("worker.start", NODE, NAMED, False, "{session, epoch, quota, device, image, recover} → {position}",
         on=On.COMMAND, changes=True),
    Verb("worker.describe", NODE, NAMED, True, "{session} → what the worker reports", on=On.COMMAND),
    Verb("worker.forget", NODE, NAMED, True, "{session, epoch, reason}: end a worker that owns nothing.",
         on=On.COMMAND, changes=True),
    Verb("node.holdings", NODE, NAMED, True, "{} → what this node holds, and whether it trusts the registry",
         on=On.COMMAND),
    Verb("node.adopt", NODE, NAMED, True,
         "{own: {session: epoch}, forget: [session]}: serve those at these epochs; {cluster, revision}: trust it.",
         on=On.COMMAND, changes=True),
    Verb("move.receive", NODE, NAMED, False, "{session, move, quota, device, source} → {address, ticket, secret}",
         on=On.COMMAND, changes=True),
    Verb("move.send", NODE, NAMED, False, "{session, move, address, ticket, secret, …} → statistics",
         on=On.COMMAND, changes=True),
    Verb("move.reconcile", NODE, NAMED, True, "{session, move}: read the registry's record and obey it.",
         on=On.COMMAND, changes=True),
    Verb("move.settle", NODE, NAMED, True, "The name of `move.reconcile` in 0.1, which leaders still send.",
         on=On.COMMAND, changes=True),
    Verb("session.image", NODE, NAMED, False,
         "{session, image, limited, cut} → {image, position, pages, bytes, pause_ms, given, peers, …}; `limited`: its "
         "user's quota bounds it; `cut`: its snapshot point is shared with other sessions.",
         on=On.COMMAND, changes=True),
    Verb("session.cut", NODE, NAMED, True,
         "{session, do, cut, attempt, target, seconds, wait, drain} → {ready, open, stands, drained, given}: close the "
         "session's gate (`hold`), open it (`open`), take its checkpoint's snapshot point (`take`), give that up "
         "(`give_up`), or only report (`look`).",
         on=On.COMMAND),
    Verb("session.notice", NODE, NAMED, True, "{session, epoch, kind, …}: to the agent of a session.", on=On.COMMAND),
    Verb("session.drop", NODE, NAMED, True, "{session, reason}: end the worker, free its device.",
         on=On.COMMAND, changes=True),
)

VERBS: dict[str, Verb] = {verb.name: verb for verb in TABLE}
