import rgpu.plain_structlog  # noqa: F401 - before any of them imports structlog
