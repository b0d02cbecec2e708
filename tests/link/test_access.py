"""Who may do what: every verb with every role, and whose it is."""

from __future__ import annotations

import pytest

from rgpu.link.control.access import ALL_USERS, Actor, Target, check, decide, require, rule
from rgpu.link.control.verbs import TABLE, VERBS, On, Verb
from rgpu.session.errors import AuthenticationFailed, NotFound, NotPermitted

ALICE = Actor("user", "alice", "alice", "A")
LAPTOP = Actor("user", "alice-laptop", "alice", "L")
OPERATOR = Actor("operator", "root", "root", "R")
NODE = Actor("node", "node-a", "", "N")
ALICES = Target("session s", "alice", frozenset({"node-a"}))
BOBS = Target("session t", "bob", frozenset({"node-b"}))


@pytest.mark.parametrize("verb", TABLE, ids=lambda verb: verb.name)
def test_every_verb_with_every_role(verb: Verb) -> None:
    for role in ("user", "operator", "node", "invited", "web"):
        actor = {"user": ALICE, "operator": OPERATOR, "node": NODE}.get(role, Actor(role, "guest"))
        may, others = decide(verb, actor, ALICES), decide(verb, actor, BOBS)
        assert may.reason.strip() and others.reason.strip()
        if role not in verb.roles:
            assert not may.allowed and not others.allowed and role in may.reason
        elif verb.on in (On.SESSION, On.CHECKPOINT, On.LIST) and role == "user":
            assert may.allowed and not others.allowed and "bob" in others.reason
        elif verb.on is On.SESSION and role == "node":
            assert may.allowed and not others.allowed, "a node speaks of what it has"
        else:
            assert may.allowed and others.allowed


def test_a_verb_on_somebodys_names_whose_it_is_in_the_table() -> None:
    """Nobody adds a verb about sessions or images and leaves them open to all users."""
    for verb in TABLE:
        if verb.name.startswith("session.") and "user" in verb.roles:
            assert verb.on is not On.POOL or verb.name in ("session.create", "session.candidate"), verb.name
        if "{image" in verb.doc.partition("→")[0]:
            assert verb.on in (On.CHECKPOINT, On.SESSION), verb.name


def test_a_user_has_several_keys() -> None:
    verb = VERBS["session.kill"]
    assert decide(verb, LAPTOP, ALICES).allowed and LAPTOP.label == "alice (alice-laptop)" and ALICE.label == "alice"
    assert not decide(verb, Actor("user", "alice", "mallory"), ALICES).allowed, "the user counts, not the key's name"


def test_what_belongs_to_nobody_is_the_operators() -> None:
    for nobodys in (Target("session s"), ALL_USERS):
        for verb in (VERBS["session.list"], VERBS["session.kill"]):
            assert not decide(verb, ALICE, nobodys).allowed and decide(verb, OPERATOR, nobodys).allowed
    assert not decide(VERBS["session.kill"], Actor("user"), Target("session s")).allowed


def test_refusals_are_of_their_class() -> None:
    with pytest.raises(NotPermitted, match="belongs to bob"):
        require(VERBS["session.kill"], ALICE, BOBS)
    with pytest.raises(AuthenticationFailed, match="role operator") as caught:
        require(VERBS["pool.pause"], ALICE, None)
    assert not isinstance(caught.value, NotPermitted)
    with pytest.raises(NotFound):
        check("no.such", "operator")
    require(VERBS["session.kill"], ALICE, None)  # nothing is there: the verb says so


def test_the_docs_say_what_is_decided() -> None:
    assert [rule(VERBS["session.kill"], role) for role in ("user", "operator", "node", "invited")] == \
        ["own", "all", "no", "no"]
    assert rule(VERBS["session.end"], "node") == "own" and rule(VERBS["pool.join"], "invited") == "yes"
