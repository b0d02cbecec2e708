"""The packs of a checkpoint."""

from __future__ import annotations

from pathlib import Path


def pack_of(root: Path, number: int = 0) -> Path:
    return sorted((root / "packs").iterdir())[number]
