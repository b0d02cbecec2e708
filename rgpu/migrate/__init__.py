"""Ownership of sessions: records, leader, scheduling, moves. It reaches nodes and workers only by their verbs."""

import rgpu.link.logging  # noqa: F401 - before any of them imports structlog
