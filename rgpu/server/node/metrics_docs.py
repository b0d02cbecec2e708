"""Write docs/operators/metrics.md from the table of metrics: ``python -m rgpu.server.node.metrics_docs``."""

from __future__ import annotations

from pathlib import Path

from rgpu.server.node.metrics import document

PATH = Path(__file__).resolve().parents[3] / "docs" / "operators" / "metrics.md"

if __name__ == "__main__":
    PATH.write_text(document())
