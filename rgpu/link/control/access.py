"""The authorization decision, from a verb's row, its caller, and the owner of the verb's target. Pure.

No other module decides it: the control port requests it for the caller's role, the gate of a node
(:mod:`rgpu.server.node.verbs.gate`) once the target's owner is read.

- An operator acts on everything, where the verb is one for operators.
- A user acts on what belongs to the same user, with any of the user's keys.
- A node acts on sessions that it has, receives or lost, and obeys only the leader.
"""

from __future__ import annotations

from dataclasses import dataclass

from rgpu.link.control.verbs import VERBS, On, Verb
from rgpu.session.errors import AuthenticationFailed, NotFound, NotPermitted


@dataclass(frozen=True, slots=True)
class Actor:
    """The caller of a verb. ``name``: of the key; ``user``: its holder, empty for nodes; ``public``: the key in Z85."""

    role: str
    name: str = ""
    user: str = ""
    public: str = ""

    @property
    def label(self) -> str:
        """Text for display: the user, and which of the user's keys where that has another name."""
        return self.name if self.user in ("", self.name) else f"{self.user} ({self.name})"


@dataclass(frozen=True, slots=True)
class Target:
    """The object that a verb acts on: ``what`` names it, for reasons. ``user``: its owner; empty: not known.

    ``nodes``: names of the keys of nodes that have it, receive it, or lost it.
    """

    what: str
    user: str = ""
    nodes: frozenset[str] = frozenset()


#: The target of a request for all users' objects.
ALL_USERS = Target("what all users have")


@dataclass(frozen=True, slots=True)
class Verdict:
    """A decision. ``reason``: a sentence for the caller, the audit log and tests."""

    allowed: bool
    reason: str


def decide(verb: Verb, actor: Actor, target: Target | None = None) -> Verdict:
    """Decide whether ``actor`` may call it; ``target`` None: no object has that name, which the verb itself reports."""
    if actor.role not in verb.roles:
        needed = " or ".join(sorted(verb.roles))
        return Verdict(False, f"{verb.name} needs a key of role {needed}; this one is a {actor.role}'s")
    if verb.on in (On.POOL, On.COMMAND):
        return Verdict(True, f"{verb.name} is for every {actor.role}")
    if target is None:
        return Verdict(True, "nobody's is touched")
    if actor.role == "operator":
        return Verdict(True, "operators act on all")
    if actor.role == "node":
        has = actor.name in target.nodes or verb.on is On.LIST
        return Verdict(has, f"{target.what} is {'' if has else 'not '}one of the sessions of {actor.name}")
    if target.user and target.user == actor.user:
        return Verdict(True, f"{target.what} belongs to {actor.user}")
    whose = f"belongs to {target.user}" if target.user else "belongs to nobody that the pool knows" \
        if target is not ALL_USERS else "is for operators"
    return Verdict(False, f"{verb.name}: {target.what} {whose}, and this key is {actor.user}'s: ask an operator")


def check(verb: str, role: str) -> Verb:
    """Return the verb, if ``role`` may call it at all. Raises :class:`NotFound`, :class:`AuthenticationFailed`."""
    entry = VERBS.get(verb)
    if entry is None:
        raise NotFound(f"no control verb is called {verb!r}", verb=verb)
    verdict = decide(entry, Actor(role))
    if not verdict.allowed:
        raise AuthenticationFailed(verdict.reason, verb=verb, role=role)
    return entry


def require(verb: Verb, actor: Actor, target: Target | None) -> None:
    """Raise :class:`AuthenticationFailed` (the role) or :class:`NotPermitted` (another's target) for a refused call."""
    verdict = decide(verb, actor, target)
    if not verdict.allowed:
        kind = NotPermitted if actor.role in verb.roles else AuthenticationFailed
        raise kind(verdict.reason, verb=verb.name, role=actor.role, user=actor.user)


def rule(verb: Verb, role: str) -> str:
    """Return the docs' table entry for a verb and a role: ``yes``, ``no``, ``own`` or ``all``; from :func:`decide`'s
    answers about a target that is the caller's and one that is not."""
    actor = Actor(role, "me", "" if role in ("node", "invited", "web") else "me")
    own, others = Target("it", "me", frozenset({"me"})), Target("it", "another", frozenset({"another"}))
    mine, theirs = decide(verb, actor, own).allowed, decide(verb, actor, others).allowed
    if verb.on in (On.POOL, On.COMMAND):
        return "yes" if mine else "no"
    return "all" if theirs else "own" if mine else "no"
