"""The result of one check of ``rgpu doctor``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Finding:
    """The result of one check. ``advice``: what to do where it is not ok."""

    check: str
    ok: bool
    found: str
    advice: str = ""
