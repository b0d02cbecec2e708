"""The server side: node daemon, workers, devices. It never imports the client."""

import rgpu.link.logging  # noqa: F401 - before any module of the package imports structlog
