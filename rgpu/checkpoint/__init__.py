"""Checkpoints of sessions: pages, chunks, stores. Devices are a protocol here; no node or registry is imported."""

import rgpu.link.logging  # noqa: F401 - before any of them imports structlog
