"""What connects processes: control, data, local links, keys, logs. It knows no checkpoints, moves or devices."""

import rgpu.link.logging  # noqa: F401 - before any of them imports structlog
