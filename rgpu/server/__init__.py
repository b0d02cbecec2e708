"""The server side: node daemon, workers, devices. It never imports the client."""

import rgpu.link.logging  # noqa: F401 - before any of them imports structlog
