"""The registry's keys: the key of each kind of record. Pure."""

from __future__ import annotations

import secrets

NODES, SESSIONS, HISTORY, LEADER = "nodes/", "sessions/", "history/", "election/leader"
HOSTS, POOL, KEYS, INVITATIONS = "hosts/", "pool/settings", "keys/", "invitations/"
QUEUE, IDENTITY, GANGS = "queue/", "pool/identity", "gangs/"


def node_key(host: str) -> str:
    """Key of a node's record."""
    return NODES + host


def host_key(host: str) -> str:
    """Key of the record of operators' decisions about a host."""
    return HOSTS + host


def member_key(name: str) -> str:
    """Key of a member's public key."""
    return KEYS + name


def invitation_key(name: str) -> str:
    """Key of an invitation."""
    return INVITATIONS + name


def session_key(name: str) -> str:
    """Key of a session's record."""
    return SESSIONS + name


def queue_key(name: str) -> str:
    """Key of a request that waits."""
    return QUEUE + name


def gang_key(name: str) -> str:
    """Key of a gang's record."""
    return GANGS + name


def history_key(subject: str, revision: int) -> str:
    """Key of one change of a record in the history: ``revision`` is the mod revision that the change replaced."""
    return f"{HISTORY}{subject}/@{revision:016d}"


def note_key(subject: str, revision: int) -> str:
    """Key of a decision that changes no session's record; unique among writers at ``revision``."""
    return f"{history_key(subject, revision)}.{secrets.token_hex(4)}"
