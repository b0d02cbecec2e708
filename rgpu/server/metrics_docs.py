"""Writes docs/metrics.md from the table of metrics: ``python -m rgpu.server.metrics_docs``."""

from __future__ import annotations

from pathlib import Path

from rgpu.server.metrics import document

PATH = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"

if __name__ == "__main__":
    PATH.write_text(document())
