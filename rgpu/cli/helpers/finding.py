"""What one check of ``rgpu doctor`` found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Finding:
    """``advice``: what to do where it is not ok."""

    check: str
    ok: bool
    found: str
    advice: str = ""
