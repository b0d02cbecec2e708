"""The one exception that loading PTX can raise."""

from __future__ import annotations


class PtxError(Exception):
    """PTX that cannot run here: what is wrong and, where known, on which line."""

    def __init__(self, reason: str, line: int | None = None):
        self.reason = reason
        self.line = line
        super().__init__(reason if line is None else f"line {line}: {reason}")
