"""The environment of a worker, made from nothing: what is not named here does not travel.

A daemon's environment may hold credentials of stores and registries, invitations and whatever its operator's shell has.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

#: Variables that travel as the daemon has them.
NAMES = frozenset({
    "PATH", "LANG", "TZ", "LD_LIBRARY_PATH",  # programs, texts, libraries of the node
    "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONFAULTHANDLER",  # where this package may be
    "OMP_NUM_THREADS", "NUMBA_NUM_THREADS",
    # what workers read of ours
    "RGPU_ANSWER_AREA", "RGPU_CATCH_UP", "RGPU_CPU_DRIVER_VERSION", "RGPU_CUPTI", "RGPU_EFFECTS", "RGPU_ENGINE_ARENA",
    "RGPU_ENGINE_DIR", "RGPU_ENGINE_RING", "RGPU_EXCHANGE", "RGPU_FAULT_FILE", "RGPU_HOST_IDENTITY",
    "RGPU_IMAGE_PROCESSES", "RGPU_LANES", "RGPU_PAGE_LANES", "RGPU_RESTORE_PROCESSES", "RGPU_SHIM_DIR"})
#: Beginnings of names: settings of the driver and its libraries, and of the locale.
PREFIXES = ("CUDA_", "NVIDIA_", "NCCL_", "LC_")
#: Where the driver keeps what it compiled, unless the box hides it.
HOME = "HOME"


def worker_environment(environ: Mapping[str, str], home: Path | None = None, *, driver_cache: bool = True
                       ) -> dict[str, str]:
    """Return what of ``environ`` a worker gets.

    ``home``: its own folder, for temporary files. ``driver_cache``: it shares the driver's cache of compiled code
    with the other workers of its node, in the user's home.
    """
    kept = {name: value for name, value in environ.items() if name in NAMES or name.startswith(PREFIXES)}
    if driver_cache and HOME in environ:
        kept[HOME] = environ[HOME]
    if home is not None:
        kept["TMPDIR"] = str(home)
        if not driver_cache:
            kept[HOME] = str(home)
    return kept
