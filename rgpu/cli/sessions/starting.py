"""Start of a program in the foreground by ``rgpu run``, once its options were read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from rgpu.api.reaching import pool_files, require_pool
from rgpu.api.settings import Settings
from rgpu.link.loggers import configure_at_first_line
from rgpu.session.devices import MAX_GPUS
from rgpu.session.errors import UsageError


def start(program: Sequence[str], settings: Settings, extra: dict[str, Any], *, name: str | None,
          **more: Any) -> NoReturn:
    """Run a program and exit as it does. ``extra``: see :func:`requested`; ``more``: of :func:`launcher.run`.

    Raises :class:`RgpuError` for errors before the program starts.
    """
    from rgpu.client.run.launcher import run

    if settings.given("client_grace"):
        extra = {**extra, "client_grace": settings.client_grace}
    configure_at_first_line(settings.log_level, _log_file(settings))
    files = pool_files(settings)
    require_pool(files)
    sys.exit(run(list(program), name=name, memory=settings.memory or None, pool=files.root, recover=settings.recover,
                 journal_limit=settings.journal_limit, journal_dir=Path(settings.journal_dir), extra=extra,
                 reraise=True, quiet=settings.quiet, **more))


def requested(host: str | None, gpus: str | None, compute: int | None = None, models: tuple[str, ...] = (),
              priority: int = 0, anti_affinity: str | None = None, queue: bool = False) -> dict[str, Any]:
    """Return the request to the pool, except memory, as `options` of session.create. Raises :class:`UsageError`."""
    if gpus is not None:
        from rgpu.migrate.scheduling.snapshot import demand

        if demand(gpus).gpus > MAX_GPUS:
            raise UsageError(f"--gpus {gpus}: a session has {MAX_GPUS} GPUs at most")
    found = {"host": host, "gpus": gpus, "compute": compute, "models": list(models), "priority": priority,
             "anti_affinity": anti_affinity, "queue": queue}
    return {key: value for key, value in found.items() if value}


def _log_file(settings: Settings) -> Path:
    """The agent's log: the terminal belongs to the program."""
    path = Path(settings.journal_dir).parent / "agent.log"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path
