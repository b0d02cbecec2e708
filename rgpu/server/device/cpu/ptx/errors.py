"""The exceptions that loading PTX can raise."""

from __future__ import annotations


class PtxError(Exception):
    """PTX that cannot run here: the reason and, where known, the line. ``limit``: it would exceed a limit."""

    limit = False

    def __init__(self, reason: str, line: int | None = None):
        self.reason = reason
        self.line = line
        super().__init__(reason if line is None else f"line {line}: {reason}")


class CompileLimit(PtxError):
    """PTX that would take more time, memory or stack to compile or run than its limit."""

    limit = True
