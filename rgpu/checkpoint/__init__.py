"""Checkpoints of sessions: pages, chunks, stores. It knows devices only by a protocol, and no node or registry."""

import rgpu.link.logging  # noqa: F401 - before any of them imports structlog
