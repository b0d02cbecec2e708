"""The client side: driver library, agent, `rgpu run`. It never imports the server, checkpoints or moves."""

import rgpu.link.logging  # noqa: F401 - before any of them imports structlog
