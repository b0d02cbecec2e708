"""Walls behind which a device was seen to work, kept for a node's next start on the same boot of the same host.

Examining a device takes seconds on a busy GPU, and a daemon that starts again must reach its workers before its lease
ends (DESIGN, "What each failure does"). An entry is valid for one boot, driver, package and set of walls only; damaged
or other entries are ignored, and the device is examined anew.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rgpu import __version__
from rgpu.link.private_files import write_file
from rgpu.migrate.registry.clock import boot_id

NAME = "box.json"
_DRIVER = Path("/proc/driver/nvidia/version")


def circumstances(walls: Sequence[str]) -> dict[str, Any]:
    """Return what the result of an examination depends on. ``walls``: names of the requested ones."""
    try:
        driver = _DRIVER.read_text()
    except OSError:
        driver = ""
    return {"boot": boot_id(), "kernel": platform.release(), "driver": driver, "package": __version__,
            "walls": list(walls)}


def recall(directory: Path, device: str, walls: Sequence[str]) -> list[str] | None:
    """Return the names of the walls behind which ``device`` worked; None where unknown for these circumstances."""
    kept = _read(directory).get(device)
    if not isinstance(kept, dict) or kept.get("circumstances") != circumstances(walls):
        return None
    stood = kept.get("stood")
    return stood if isinstance(stood, list) and set(map(str, stood)) <= set(walls) else None


def keep(directory: Path, device: str, walls: Sequence[str], stood: Sequence[str]) -> None:
    """Record that ``device`` worked with ``stood`` of ``walls``. Disk errors are not raised."""
    found = {**_read(directory), device: {"circumstances": circumstances(walls), "stood": list(stood)}}
    try:
        write_file(directory / NAME, json.dumps(found).encode(), mode=0o600, replace=True)
    except OSError:
        return


def _read(directory: Path) -> dict[str, Any]:
    try:
        found = json.loads((directory / NAME).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
